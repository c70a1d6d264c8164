"""Schedulers, averages and counters that move only when the optimizer did.

A follower waits for nobody: what became of a step is known on the host by the time the next step
is about to move the parameters, so the follower is called just before that. Nothing of it is late
for the training: the learning rate is in time for the next step, and an average sees the parameters
as the step left them. Only who looks in between sees the old values.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
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
        self._due: deque[Callable[[], object]] = deque()

    def add(self, thing: Any, optimizer: Optimizer | None, wait: bool) -> None:
        """Calls `thing`, or its `step()`, after every applied step of `optimizer`."""
        step = getattr(thing, "step", None)
        call = step if callable(step) else thing
        if not callable(call) or isinstance(call, torch.nn.Module) or _wants_arguments(call):
            raise SettingError(
                "follow() takes functions without arguments and objects whose step() needs none, "
                f"got {type(thing).__name__}. Wrap the call that you want in a lambda."
            )
        whose = getattr(thing, "optimizer", None) if optimizer is None else optimizer
        ref = weakref.ref(whose) if isinstance(whose, Optimizer) else None
        self._followers.append(_Follower(call, ref, wait))

    def forget(self) -> None:
        """Drops what is still due: it is of another run."""
        self._record = None
        self._due.clear()

    def take(self, record: Record) -> None:
        """Calls those that wait for `record`, and keeps it for the others."""
        self.catch_up()
        if any(not follower.wait for follower in self._followers):
            self._record = record
        if any(follower.wait for follower in self._followers):
            self._call(record, wait=True)

    def catch_up(self) -> None:
        """Calls those that do not wait, for the last record."""
        record, self._record = self._record, None
        if record is not None:
            self._call(record, wait=False)
        elif self._due:
            self._drain()

    def _call(self, record: Record, wait: bool) -> None:
        """Calls the followers of the steps in `record` that were applied."""
        told = record.read()
        applied = {
            key
            for (keys, _), (applied, _, _) in zip(record.outcomes, told.steps, strict=True)
            if applied
            for key in keys
        }
        for call, ref, waits in self._followers:
            followed = bool(applied) if ref is None else id(ref()) in applied
            if waits is wait and followed:
                self._due.append(call)
        self._drain()

    def _drain(self) -> None:
        """Calls what is due; after one that raises, the others are called the next time."""
        while self._due:
            self._due.popleft()()


def _wants_arguments(call: Callable[..., object]) -> bool:
    """Whether `call` cannot be called without arguments, as far as it says so."""
    try:
        given = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = (*positional, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind in needed and p.default is inspect.Parameter.empty for p in given)
