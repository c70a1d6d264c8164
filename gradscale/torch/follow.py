"""Schedulers, averages and counters that move only when the optimizer did.

A follower waits for nobody: what became of a step is known on the host by the time the next step
is about to move the parameters, so the follower is called just before that. Nothing of it is late
for the training: the learning rate is in time for the next step, and an average sees the parameters
as the step left them. Only who looks in between sees the old values.

Steps inside CUDA graphs are followed when the scaler hears of them: as often as they were applied,
but after the last of them.
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
from gradscale.torch.events import Record, Replay
from gradscale.torch.kernels import capturing


class _Follower(NamedTuple):
    call: Callable[[], object]
    optimizer: weakref.ref[Optimizer] | None
    """Whose steps it follows; None: any."""
    wait: bool


class Followers:
    """Everything that follows the steps of one scaler."""

    def __init__(self) -> None:
        self._followers: list[_Follower] = []
        self._late: tuple[Record, list[_Follower]] | None = None
        """The last record, and who followed then."""
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
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise SettingError(
                f"optimizer must be one that the scaler steps, got {type(optimizer).__name__}."
            )
        whose = getattr(thing, "optimizer", None) if optimizer is None else optimizer
        ref = weakref.ref(innermost(whose)) if hasattr(whose, "param_groups") else None
        self._followers.append(_Follower(call, ref, wait))

    def forget(self) -> None:
        """Drops what is still due: it is of another run."""
        self._late = None
        self._due.clear()

    def take(self, record: Record) -> None:
        """Calls those that wait for `record`, and keeps it for the others."""
        self.catch_up()
        late = [follower for follower in self._followers if not follower.wait]
        if late:
            self._late = record, late
        waiting = [follower for follower in self._followers if follower.wait]
        if waiting:
            self._call(record, waiting)

    def replay(self, replay: Replay) -> None:
        """Calls all that follow the steps that were applied in `replay`."""
        self._call(replay, self._followers)

    def catch_up(self) -> None:
        """Calls those that do not wait, for the last record; in a capture, the next time."""
        if (self._late is not None or self._due) and capturing():
            return  # it would wait for the record, which ends a capture with an error
        late, self._late = self._late, None
        if late is not None:
            self._call(*late)
        elif self._due:
            self._drain()

    def _call(self, record: Record | Replay, followers: list[_Follower]) -> None:
        """Calls those of `followers` whose steps in `record` were applied."""
        told = record.read()
        applied = {
            key
            for (keys, _), (applied, _, _) in zip(record.outcomes, told.steps, strict=True)
            if applied
            for key in keys
        }
        for call, ref, _ in followers:
            if bool(applied) if ref is None else id(ref()) in applied:
                self._due.append(call)
        self._drain()

    def _drain(self) -> None:
        """Calls what is due; after one that raises, the others are called the next time."""
        while self._due:
            self._due.popleft()()


def innermost(optimizer: Any) -> Any:
    """The optimizer inside all wrappers: a scheduler knows it, where the scaler sees a wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and inner is not optimizer and hasattr(inner, "param_groups"):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _wants_arguments(call: Callable[..., object]) -> bool:
    """Whether `call` cannot be called without arguments, as far as it says so."""
    try:
        given = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = (*positional, inspect.Parameter.KEYWORD_ONLY)
    return any(p.kind in needed and p.default is inspect.Parameter.empty for p in given)
