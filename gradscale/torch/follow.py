"""Schedulers, averages and counters that move only when the optimizer did.

A follower waits for nobody: what became of a step is known on the host by the time the next step
is about to move the parameters, so the follower is called just before that. Nothing of it is late
for the training: the learning rate is in time for the next step, and an average sees the parameters
as the step left them. Only who looks in between sees the old values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim import Optimizer

from gradscale.errors import SettingError
from gradscale.torch.events import Record


class _Follower(NamedTuple):
    call: Callable[[], object]
    optimizer: weakref.ref[Optimizer] | None
    """Whose steps it follows; None: any."""
    wait: bool


class Followers:
    """Everything that follows the steps of one scaler."""

    def __init__(self) -> None:
        self._followers: list[_Follower] = []
        self._record: Record | None = None

    def add(self, thing: Any, optimizer: Optimizer | None, wait: bool) -> None:
        """Calls `thing`, or its `step()`, after every applied step of `optimizer`."""
        step = getattr(thing, "step", None)
        call = step if callable(step) else thing
        if not callable(call):
            raise SettingError(
                "follow() takes functions and objects with a step() method, got "
                f"{type(thing).__name__}."
            )
        whose = getattr(thing, "optimizer", None) if optimizer is None else optimizer
        ref = weakref.ref(whose) if isinstance(whose, Optimizer) else None
        self._followers.append(_Follower(call, ref, wait))

    def take(self, record: Record) -> None:
        """Calls those that wait for `record`, and keeps it for the others."""
        self.catch_up()
        if any(follower.wait for follower in self._followers):
            self._call(record, wait=True)
        if any(not follower.wait for follower in self._followers):
            self._record = record

    def catch_up(self) -> None:
        """Calls those that do not wait, for the last record."""
        record, self._record = self._record, None
        if record is not None:
            self._call(record, wait=False)

    def _call(self, record: Record, wait: bool) -> None:
        """Calls the followers of the steps in `record` that were applied."""
        told = record.read()
        applied = {
            key
            for (key, _), (applied, _, _) in zip(record.outcomes, told.steps, strict=True)
            if applied
        }
        for call, ref, waits in self._followers:
            whose = None if ref is None else ref()
            if waits is wait and (bool(applied) if whose is None else id(whose) in applied):
                call()
