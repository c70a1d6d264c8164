"""One function that trains a model and returns what is wrong with the run, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscale.monitor.findings import Finding
from gradscale.torch import GradScaler, Inspector

STEPS, EVERY = 60, 4

LossOf = Callable[[int], Tensor]
"""The loss of the step of this number."""
Step = Callable[[GradScaler, torch.optim.Optimizer, Tensor], None]
"""Everything in an iteration after the loss."""


class Case(NamedTuple):
    """A run, and what must be found."""

    name: str
    kind: str
    """The kind of finding; "" for a healthy run."""
    where: str
    """The module or parameter."""
    train: Callable[[], list[Finding]]


class Verdict(NamedTuple):
    """What was found in a run."""

    case: Case
    findings: list[Finding]

    def right(self) -> bool:
        """Whether the illness is among the findings; of a healthy run, whether there are none."""
        if not self.case.kind:
            return not self.findings
        return (self.case.kind, self.case.where) in [(f.kind, f.where) for f in self.findings]


def two_calls(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """The scaler's own loop."""
    scaler.backward(loss)
    scaler.apply(optimizer)


def torchs_loop(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """torch's loop."""
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def diagnose(
    model: nn.Module,
    loss_of: LossOf,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    step: Step = two_calls,
    autocast: bool = True,
    steps: int = STEPS,
    every: int = EVERY,
) -> list[Finding]:
    """Trains a model, and returns what the inspector and the log found, in that order."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if scaler is None:
        scaler = GradScaler("cpu", on_stuck="ignore")
    scaler.name(model)
    lines: list[dict[str, Any]] = []
    scaler.log_to(lines.append)
    inspector = Inspector(model, scaler, every=every)
    cast = torch.autocast("cpu", dtype=torch.float16, enabled=autocast)
    for number in range(steps):
        with cast:
            loss = loss_of(number)
        step(scaler, optimizer, loss)
    if autocast and not loss.dim() and bool(loss.isfinite()):
        inspector.replay(lambda: loss_of(steps))
    inspector.close()
    scaler.flush()
    found = logged(lines)
    # The log has a finding from when it was first seen; the inspector has the last word on its own.
    last = inspector.findings()
    own = {(f.kind, f.where) for f in last}
    records = [f for f in found if f.kind in RECORDS and (f.kind, f.where) not in own]
    return [*last, *records] or found  # nothing may be wrong at any time in a healthy run


def logged(lines: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """The findings among the lines of a log."""
    return [Finding.from_dict(line["finding"]) for line in lines if line["kind"] == "finding"]


RECORDS = {"losses-unbalanced", "stuck", "skips-too-often", "scale-too-low"}
"""Kinds that only the records of steps show."""
