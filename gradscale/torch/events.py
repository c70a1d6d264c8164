"""Telling the host what happened on the device, without waiting for it.

Every `update()` writes one small record: how often it was called, the scale before and after, what
became of each step. The record travels to the host behind the work that made it, and is looked at
when it has arrived: at a later `update()`, or in `flush()`, which waits. So events come in order
and late, by as much as the device is behind the host; on the CPU they come at once.
"""

from __future__ import annotations

import struct
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError, StuckError, caller_level
from gradscale.torch.outcome import StepOutcome, event_on
from gradscale.torch.unscale import move, readable

NAMES = ("skip", "grow", "backoff", "floor", "recover", "stuck")
ON_STUCK = ("warn", "raise", "ignore")
_HISTORY = 1000
_PER_STEP = 3  # integers in a record for each step

_DIAGNOSIS = {
    "no gradients": "no parameter of the optimizer has a gradient",
    "loss not finite": "the loss itself is not finite, which no scale can mend: look at the "
    "forward pass, the data and the learning rate",
    "stuck at the floor": "gradients are not finite even at the smallest scale that min_scale "
    "allows, so the scale is hardly to blame: look at the parameters named here",
    "NaN at any scale": "there are NaN gradients that a lower scale does not cure: look for 0 / 0, "
    "a root or a logarithm of 0 in the backward pass of the parameters named here",
    "scale too low": "gradients are finite, but too large for the format they are stored in once "
    "unscaled: they have exploded, or were spoilt after unscale_()",
    "scale too high": "gradients overflow: a scale that is fixed must be set lower, one that moves "
    "is still falling and will find a level unless the gradients have exploded",
}


class Event(NamedTuple):
    """Something that happened to the scale or to a step."""

    name: str
    """One of "skip", "grow", "backoff", "floor", "recover" and "stuck"."""
    step: int
    """At which `update()`, counted from 1 since the beginning of the training."""
    scale: float
    """The scale from here on."""
    outcome: StepOutcome | None
    """The step that this is about; of "grow", "backoff" and "floor", the last one."""
    loss_id: int | str = 0
    """The loss whose scale moved."""


class Move(NamedTuple):
    """How the scale of one loss moved, on the device."""

    loss_id: int | str
    before: Tensor
    after: Tensor
    floor: float


class Record:
    """What one `update()` told, on its way to the host."""

    def __init__(
        self,
        numbers: Tensor,
        arrived: torch.Event | None,
        moves: Sequence[Move],
        outcomes: Sequence[tuple[frozenset[int], StepOutcome]],
    ) -> None:
        self.moves = moves
        self.outcomes = outcomes
        """Every step since the last `update()`, with the ids of its optimizers."""
        self._numbers = numbers
        self._arrived = arrived

    @classmethod
    def of(
        cls,
        step: Tensor,
        scale: Tensor,
        moves: Sequence[Move],
        outcomes: Sequence[tuple[frozenset[int], StepOutcome]],
    ) -> Record:
        """A record of these values.

        It is int32: the number of the `update()`, the scale of loss 0, every move's scale before
        and after, and of every step whether it was applied, whether its loss was finite, and how
        many were skipped in a row.
        """
        device = step.device
        numbers = [step]
        for value in [scale, *(at for one in moves for at in (one.before, one.after))]:
            # Bits travel unharmed; a float64 that holds both is not there on every device.
            numbers.append(move(value, device).view(torch.int32))
        for _, outcome in outcomes:
            numbers += [outcome.applied, outcome.loss_finite, outcome.skipped_in_a_row]
        sent = torch.stack([move(number, device).to(torch.int32) for number in numbers])
        arrived = event_on(device)
        if arrived is not None:
            pinned = torch.empty(sent.shape, dtype=torch.int32, pin_memory=True)
            sent = pinned.copy_(sent, non_blocking=True)
            arrived.record()
        return cls(sent, arrived, moves, outcomes)

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return readable(self._numbers) and (self._arrived is None or self._arrived.query())

    def read(self) -> Told:
        """Its contents; waits for the work that made it, and for nothing that was queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        step, *rest = self._numbers.tolist()
        cut = 1 + 2 * len(self.moves)
        scale, *scales = struct.unpack(f"{cut}f", struct.pack(f"{cut}i", *rest[:cut]))
        steps = [rest[i : i + _PER_STEP] for i in range(cut, len(rest), _PER_STEP)]
        return Told(
            step,
            scale,
            list(zip(scales[::2], scales[1::2], strict=True)),
            [(bool(applied), bool(finite), row) for applied, finite, row in steps],
        )


class Told(NamedTuple):
    """A record that has arrived."""

    step: int
    scale: float
    """Of loss 0, from here on."""
    scales: list[tuple[float, float]]
    """Before and after, for every move."""
    steps: list[tuple[bool, bool, int]]
    """applied, loss_finite and skipped_in_a_row, for every step."""


class Events:
    """Records on their way, who wants to hear of them, and the last thousand events."""

    def __init__(self, on_stuck: str, stuck_after: int) -> None:
        if on_stuck not in ON_STUCK:
            raise SettingError(f"on_stuck must be one of {', '.join(ON_STUCK)}, got {on_stuck!r}.")
        if isinstance(stuck_after, bool) or not isinstance(stuck_after, int) or stuck_after < 1:
            raise SettingError(f"stuck_after must be a whole number >= 1, got {stuck_after!r}.")
        self.on_stuck = on_stuck
        self.stuck_after = stuck_after
        self.history: deque[tuple[int, float, str]] = deque(maxlen=_HISTORY)
        """(step, scale, event), oldest first."""
        self.listeners: dict[str, list[Callable[[Event], object]]] = defaultdict(list)
        self._records: deque[Record] = deque(maxlen=_HISTORY)
        self._due: deque[Callable[[], object]] = deque()
        self._down: set[frozenset[int]] = set()
        """The optimizers whose last step was skipped."""

    def on(self, name: str, callback: Callable[[Event], object]) -> None:
        """Calls `callback` with every event called `name`."""
        if name not in NAMES:
            raise SettingError(f"event must be one of {', '.join(NAMES)}, got {name!r}.")
        self.listeners[name].append(callback)

    def forget(self) -> None:
        """Drops what is on its way: it is of another run."""
        self._records.clear()
        self._due.clear()
        self._down.clear()

    def take(self, record: Record) -> None:
        """Puts `record` behind those that are on their way."""
        self._records.append(record)

    def deliver(self, wait: bool = False) -> None:
        """Tells of every record that has arrived, or, with `wait`, of all of them.

        A callback that raises stops this; the others are called the next time.
        """
        while True:
            while self._due:
                self._due.popleft()()
            if not self._records or not (wait or self._records[0].arrived()):
                return
            record = self._records.popleft()
            for event in self._events(record, record.read()):
                self.history.append((event.step, event.scale, event.name))
                for callback in self.listeners[event.name]:
                    self._due.append(partial(callback, event))
                if event.name == "stuck" and self.on_stuck != "ignore":
                    self._due.append(partial(self._complain, event))

    def _events(self, record: Record, told: Told) -> list[Event]:
        """What `record` amounts to, in order."""
        events = []
        scale = told.scale
        for (key, outcome), (applied, _, row) in zip(record.outcomes, told.steps, strict=True):
            if not applied:
                events.append(Event("skip", told.step, scale, outcome))
                self._down.add(key)
                if row == self.stuck_after:
                    events.append(Event("stuck", told.step, scale, outcome))
            elif key in self._down:
                events.append(Event("recover", told.step, scale, outcome))
                self._down.discard(key)
        last = record.outcomes[-1][1] if record.outcomes else None
        for scale_move, (before, after) in zip(record.moves, told.scales, strict=True):
            if before != after:
                name = "grow" if after > before else "backoff"
                events.append(Event(name, told.step, after, last, scale_move.loss_id))
            if after <= scale_move.floor < before:
                events.append(Event("floor", told.step, after, last, scale_move.loss_id))
        return events

    def _complain(self, event: Event) -> None:
        """Raises or warns, with a diagnosis."""
        text = diagnosis(event, self.stuck_after)
        if self.on_stuck == "raise":
            raise StuckError(text)
        warnings.warn(text, stacklevel=caller_level())


def diagnosis(event: Event, count: int) -> str:
    """What is wrong when nothing is applied any more, and what to look at."""
    if event.outcome is None:
        return f"{count} steps in a row were skipped."
    verdict = event.outcome.verdict()
    culprits = event.outcome.culprits()
    shown = "; ".join(str(culprit.name) for culprit in culprits[:3])
    more = f" and {len(culprits) - 3} more" if len(culprits) > 3 else ""
    named = f" Gradients that are not finite: {shown}{more}." if culprits else ""
    return (
        f"{count} steps in a row were skipped, the last at scale {float(event.outcome.scale):g} "
        f"({verdict}): {_DIAGNOSIS[verdict]}.{named} What happens after how many is up to on_stuck "
        "and stuck_after."
    )
