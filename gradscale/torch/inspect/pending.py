"""A sample on its way to the host, and what it says when it has arrived."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.formats import FLOAT16
from gradscale.monitor.samples import (
    ACTIVATION_GRAD,
    WEIGHT_GRAD,
    Sample,
    TensorSample,
)
from gradscale.torch.inspect.counts import histograms
from gradscale.torch.inspect.probe import Probe, Subject
from gradscale.torch.inspect.weights import Numbers
from gradscale.torch.telemetry.transport import Sent

_SIZES = {"weights_before": "weights_spoilt", "weights_after": "weights_nonfinite"}
LARGE = FLOAT16.max / 64
"""The weights that are reported for their size: a sum of 64 products of them and of 1 overflows."""
FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Pending:
    """A sample that is still on its way.

    Args:
        subject: What was sampled.
        probe: What its hooks saw; closed.
        counts: The tables, and how many elements were counted in each row.
        facts: Named numbers.
        number: The iteration, where no scaler counts updates.
        trained: The parameters of optimizers; None: all that require gradients.
    """

    def __init__(
        self,
        subject: Subject,
        probe: Probe,
        counts: Sequence[tuple[Sent, list[int]]],
        facts: Sequence[Numbers],
        number: int,
        trained: Iterable[Tensor] | None = None,
    ) -> None:
        self._subject, self._probe = subject, probe
        self._trained = None if trained is None else {id(param) for param in trained}
        self._counts, self._facts, self._number = counts, facts, number

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        there = all(sent.arrived() for sent, _ in self._counts)
        return there and self._probe.trail.arrived() and all(f.arrived() for f in self._facts)

    def read(self) -> Sample:
        """The sample; waits for the work that made it."""
        numbers = {key: value for each in self._facts for key, value in each.read().items()}
        scale = numbers.get(("scale", ""), 1.0)
        tensors = self.tensors(scale)
        trail = self._probe.trail
        ranges = trail.read()
        loss_finite = numbers.get(("loss_finite", "")) == 1.0
        bad = [t.name for t in tensors if t.kind == WEIGHT_GRAD and t.infs + t.nans]
        owners = [self._subject.owner(name) for name in bad]
        facts = _facts(numbers)
        if not trail.data_is_finite(ranges, loss_finite):
            facts.append(("data_nonfinite", "", 1.0))
        if self._probe.passes and self._probe.with_grad:
            for name, param in self._subject.params.items():
                trained = self._trained is None or id(param) in self._trained
                if trained and param.requires_grad and name not in self._probe.with_grad:
                    facts.append(("no_grad", name, 1.0))
        calls = self._probe.calls
        whole = calls.get("", 0)
        facts += [("used_twice", n, c / whole) for n, c in calls.items() if whole and c > whole]
        step = int(numbers.get(("step", ""), 0.0)) or self._number
        return Sample(
            step=step,
            format=self.format(),
            tensors=tensors,
            first_nonfinite=trail.first_nonfinite(ranges, owners, loss_finite),
            facts=tuple(facts),
        )

    def format(self) -> str:
        """The narrowest format of the activations."""
        found = set(self._probe.formats.values())
        return next((FORMATS[dtype] for dtype in FORMATS if dtype in found), "float32")

    def tensors(self, scale: float) -> tuple[TensorSample, ...]:
        """Every row that has something in it."""
        tables = [(sent.read(), torch.tensor(numels)) for sent, numels in self._counts]
        total = sum((table for table, _ in tables), torch.zeros(()).long())
        numels = sum((each for _, each in tables), torch.zeros(()).long()).tolist()
        rows = histograms(total, numels) if tables else []
        found = []
        whole = self.format()
        for (kind, name), row in self._subject.rows.items():
            if not rows or not numels[row]:
                continue
            low, counts, zeros, infs, nans = rows[row]
            module = self._subject.owner(name) if kind == WEIGHT_GRAD else name
            dtype: Any = self._probe.formats.get(module)
            own = FORMATS.get(dtype, "float32")
            found.append(
                TensorSample(
                    name,
                    kind,
                    numels[row],
                    low,
                    counts,
                    zeros,
                    None,
                    infs,
                    nans,
                    scale if kind in (WEIGHT_GRAD, ACTIVATION_GRAD) else 1.0,
                    "" if own == whole else own,
                )
            )
        return tuple(found)


def _facts(numbers: dict[tuple[str, str], float]) -> list[tuple[str, str, float]]:
    """The facts of a sample."""
    facts = []
    for (fact, where), number in numbers.items():
        if fact in _SIZES:
            if not math.isfinite(number):
                facts.append((_SIZES[fact], where, 1.0))
            elif fact == "weights_before" and number > LARGE:
                facts.append(("weights_large", where, number))
        elif fact == "update_lost":
            if numbers["updates", where] > 0:
                facts.append((fact, where, number))
        elif fact in ("leftover", "trained_between"):
            if number > 0:
                facts.append((fact, where, number))
        elif fact == "grad_norm":
            if ("norm_used", "") not in numbers:
                facts.append(("norm_used", where, number))
        elif fact not in ("updates", "step"):
            facts.append((fact, where, number))
    return facts
