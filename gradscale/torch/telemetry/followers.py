"""Schedulers, averages and counters that advance only when a step was applied.

A follower is called just before the next step changes the parameters: by then the result of the
last one is known on the host, without waiting for it. So the learning rate is in time for the next
step, and an average sees the parameters as the step left them.

Followers of steps inside CUDA graphs are called when the log of replays is read: as often as steps
were applied, but after the last of them.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gradscale.errors import SettingError, caller_level
from gradscale.monitor import Step, StepRecord
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.telemetry.transport import Record


class _Follower:
    """One function that is called after applied steps."""

    __slots__ = ("_seen", "_thing", "_warned", "call", "optimizer", "wait")

    def __init__(self, thing: Any, call: Callable[[], object], optimizer: Any, wait: bool) -> None:
        self._thing, self.call, self.wait, self._warned = thing, call, wait, False
        self.optimizer: weakref.ref[Optimizer] | None = None
        """Whose steps it follows; None: any."""
        if hasattr(optimizer, "param_groups"):
            self.optimizer = weakref.ref(innermost(optimizer))
        self.note()

    def note(self) -> None:
        """Stores how often a scheduler has been stepped."""
        self._seen = getattr(self._thing, "last_epoch", None)

    def run(self) -> None:
        """Calls it, unless it is a scheduler that the user has stepped since."""
        moved = getattr(self._thing, "last_epoch", None) != self._seen
        if moved and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self._thing).__name__}.step() was called manually, but follow() calls it "
                "as well, so this call of follow() is left out. Remove one of the two.",
                stacklevel=caller_level(),
            )
        if not moved:
            self.call()
        self.note()


class Followers:
    """Everything that follows the steps of one scaler."""

    def __init__(self) -> None:
        self.all: list[_Follower] = []
        self._late: tuple[Record, list[_Follower]] | None = None
        """The last record, and the followers at that time."""
        self._due: deque[_Follower] = deque()

    def add(self, things: Sequence[Any], optimizer: Optimizer | None, wait: bool) -> None:
        """Calls `things`, or their `step()`, after every applied step of `optimizer`."""
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise SettingError(
                f"optimizer must be one that the scaler steps, got {type(optimizer).__name__}."
            )
        self.all += [_follower(thing, optimizer, wait) for thing in things]

    def forget(self) -> None:
        """Drops what is still due: it is of another run."""
        self._late = None
        self._due.clear()

    def take(self, record: Record) -> None:
        """Calls those with `wait=True` for `record`, and keeps it for the others."""
        self.catch_up()
        late = [follower for follower in self.all if not follower.wait]
        for follower in late:
            follower.note()
        if late:
            self._late = record, late
        if len(late) < len(self.all):
            self._call(record.read().steps, [follower for follower in self.all if follower.wait])

    def replay(self, record: StepRecord) -> None:
        """Calls the followers of the steps that were applied in a replay."""
        self._call(record.steps, self.all)

    def catch_up(self) -> None:
        """Calls those without `wait`, for the last record; in a capture, the next time."""
        if self._late is None and not self._due:
            return
        if capturing():
            return  # it would wait for the record, which ends a capture with an error
        late, self._late = self._late, None
        if late is None:
            self._call((), [])
        else:
            self._call(late[0].read().steps, late[1])

    def _call(self, steps: Iterable[Step], followers: list[_Follower]) -> None:
        """Calls those of `followers` whose steps were applied.

        After one that raises, the others are called the next time.
        """
        keys: list[Any] = [step.key for step in steps if step.applied]
        applied = set().union(*keys)
        for follower in followers:
            ref = follower.optimizer
            if bool(applied) if ref is None else id(ref()) in applied:
                self._due.append(follower)
        while self._due:
            self._due.popleft().run()


def innermost(optimizer: Any) -> Any:
    """The optimizer inside all wrappers, which is the one that a scheduler refers to."""
    inner = getattr(optimizer, "optimizer", None)
    while inner is not None and inner is not optimizer and hasattr(inner, "param_groups"):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer


def _follower(thing: Any, optimizer: Optimizer | None, wait: bool) -> _Follower:
    """What calls `thing`, or its `step()`; a SettingError if that needs arguments."""
    if hasattr(thing, "param_groups"):
        raise SettingError(
            "follow() takes schedulers and other objects that follow an optimizer, got the "
            f"optimizer {type(thing).__name__} itself. Pass it to apply() or step()."
        )
    step = getattr(thing, "step", None)
    call = step if callable(step) else thing
    if not callable(call) or isinstance(call, torch.nn.Module) or _wants_arguments(call):
        # What `scheduler.step()` returns is None.
        hint = "Wrap the call in a lambda." if thing is not None else "Pass the object itself."
        raise SettingError(
            "follow() takes functions without arguments and objects whose step() needs none, got "
            f"{type(thing).__name__}. {hint}"
        )
    whose = getattr(thing, "optimizer", None) if optimizer is None else optimizer
    return _Follower(thing, call, whose, wait)


def _wants_arguments(call: Callable[..., object]) -> bool:
    """Whether `call` cannot be called without arguments, as far as its signature is known."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind()
    except TypeError:
        return True
    return False
