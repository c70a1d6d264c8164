"""What one `update()` did, as plain numbers on the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step of an optimizer, or of several that step together."""

    key: Hashable
    """Identifies the optimizer, the same in all its steps; a frozenset of keys for several."""
    applied: bool
    """Whether the step was taken."""
    loss_finite: bool = True
    """Whether every loss was finite."""
    skipped_in_a_row: int | None = None
    """Consecutive skipped steps, including this one; None: the tracker counts them."""
    outcome: Any = None
    """The engine's outcome of the step, passed on to events; None if there is none."""


class Move(NamedTuple):
    """The scale of one loss before and after an `update()`."""

    loss_id: int | str
    before: float
    after: float
    floor: float = 0.0
    """The smallest scale that the policy allows."""


class StepRecord(NamedTuple):
    """One `update()`: the steps since the previous one, and how the scales moved."""

    step: int
    """Number of the `update()`, counted from 1 since the start of training."""
    scale: float
    """The scale of loss 0 after it."""
    steps: tuple[Step, ...] = ()
    """Every step since the previous `update()`, in order."""
    moves: tuple[Move, ...] = ()
    """Every scale that may have moved; one that did not has `before == after`."""
