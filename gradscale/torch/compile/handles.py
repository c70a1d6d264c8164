"""Integer handles for scalers and optimizers in compiled graphs.

Operators take a number and look up its owner. Outcomes have numbers of their own, as tensors that
are values of the graph.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError
from gradscale.torch.telemetry.outcome import StepOutcome

KEPT = 100
"""Outcomes of compiled steps that can still be asked for."""

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class ScalerHandle:
    """What a compiled function needs of a scaler, and the lock of the scaler."""

    def __init__(self, scaler: Any) -> None:
        self.lock = threading.RLock()
        self.number = register(scaler)
        with torch.inference_mode(False):
            self.order = torch.zeros((), dtype=torch.float32, device="cpu")
        """An argument of every operator that `apply` declares to change, which keeps the order."""
        self._outcomes: deque[tuple[int, StepOutcome]] = deque(maxlen=KEPT)

    def keep(self, outcome: StepOutcome) -> Tensor:
        """The number of `outcome`, as a tensor on the CPU."""
        number = self._outcomes[-1][0] + 1 if self._outcomes else 1
        self._outcomes.append((number, outcome))
        return torch.tensor(number, dtype=torch.int64, device="cpu")

    def recall(self, number: Tensor) -> StepOutcome:
        """The outcome that has this number."""
        outcome = dict(self._outcomes).get(int(number))
        if outcome is None:
            raise CallOrderError(
                f"Only the outcomes of the last {KEPT} compiled steps are kept, and this one is "
                "older. Read it sooner."
            )
        return outcome


class OptimizerHandle:
    """What a compiled function needs of an optimizer.

    Not `param_groups`, which hold the learning rate: it would compile anew for every value.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.number = register(optimizer)
        self.params: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        """The lists of the groups themselves, so that parameters that are added are seen."""


def register(owner: object) -> int:
    """A number by which operators find `owner` as long as it lives."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def find(number: int) -> Any:
    """The scaler or optimizer of this `number`."""
    owner = _owners.get(number)
    if owner is None:
        raise CallOrderError(
            "The scaler or optimizer of a compiled function was deleted. Keep it as long as its "
            "losses and gradients are used."
        )
    return owner
