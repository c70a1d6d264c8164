"""What one `update()` did, as plain numbers on the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step of an optimizer, or of several that step together."""

    key: Hashable
    """Identifies the optimizer, the same at each of its steps; a frozenset of such for several."""
    applied: bool
    """Whether the step took place."""
    loss_finite: bool = True
    """Whether every loss was finite."""
    skipped_in_a_row: int | None = None
    """Consecutive skipped steps, this one included; None: the tracker counts them."""
    outcome: Any = None
    """The engine's own result of the step, passed on to events; None where there is none."""


class Move(NamedTuple):
    """The scale of one loss before and after an `update()`."""

    loss_id: int | str
    before: float
    after: float
    floor: float = 0.0
    """The smallest scale that the policy allows."""


class StepRecord(NamedTuple):
    """One `update()`: the steps since the last one, and how the scales moved."""

    step: int
    """The number of the `update()`, counted from 1 since the beginning of the training."""
    scale: float
    """The scale of loss 0 from now on."""
    steps: tuple[Step, ...] = ()
    """Every step since the last `update()`, in order."""
    moves: tuple[Move, ...] = ()
    """Every scale that may have moved; one that did not has `before == after`."""
