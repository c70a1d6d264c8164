"""Telling the host what happened on the device, without waiting for it.

Every `update()` writes one small record: how often it was called, the scale before and after, what
became of each step. The record travels to the host behind the work that made it, and is looked at
when it has arrived: at a later `update()`, or in `flush()`, which waits. So events come in order
and late, by as much as the device is behind the host; on the CPU they come at once.

A replay of a CUDA graph makes no record. What would have been in it is in a log on the device
(replays.py), which is read in `flush()`, and when the number of a record shows that replays came
before it: their events go first.
"""

from __future__ import annotations

import struct
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError, StuckError, caller_level
from gradscale.torch.outcome import Sent, StepOutcome
from gradscale.torch.replays import ROWS, Replays
from gradscale.torch.unscale import move

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
    """The step that this is about; of "grow", "backoff" and "floor", the last one. None if a CUDA
    graph replayed it: the next replay has written over it."""
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
        moves: Sequence[Move],
        outcomes: Sequence[tuple[frozenset[int], StepOutcome]],
        sent: Sent | None = None,
    ) -> None:
        self.numbers = numbers
        """int32, on the device; on the host, if it is `sent` already."""
        self.moves = moves
        self.outcomes = outcomes
        """Every step since the last `update()`, with the ids of its optimizers."""
        self._sent = sent
        self._told: Told | None = None

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
        return cls(sent, moves, outcomes)

    def send(self) -> Sent:
        """Itself on its way to the host; not before this is called, and never in a capture."""
        if self._sent is None:
            self._sent = Sent.away(self.numbers)
        return self._sent

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return self.send().arrived()

    def read(self) -> Told:
        """Its contents; waits for the work that made it, and for nothing that was queued later."""
        if self._told is None:
            self._told = Told.by(self.send().read().tolist(), len(self.moves))
        return self._told


class Told(NamedTuple):
    """A record that has arrived."""

    step: int
    scale: float
    """Of loss 0, from here on."""
    scales: list[tuple[float, float]]
    """Before and after, for every move."""
    steps: list[tuple[bool, bool, int]]
    """applied, loss_finite and skipped_in_a_row, for every step."""

    @classmethod
    def by(cls, numbers: list[int], num_moves: int) -> Told:
        """What the numbers of a record with `num_moves` moves say."""
        step, *rest = numbers
        cut = 1 + 2 * num_moves
        scale, *scales = struct.unpack(f"{cut}f", struct.pack(f"{cut}i", *rest[:cut]))
        steps = [rest[i : i + _PER_STEP] for i in range(cut, len(rest), _PER_STEP)]
        return cls(
            step,
            scale,
            list(zip(scales[::2], scales[1::2], strict=True)),
            [(bool(applied), bool(finite), row) for applied, finite, row in steps],
        )


class Level(NamedTuple):
    """What is known in a capture of a `Move`, which every replay makes anew."""

    loss_id: int | str
    floor: float


class Layout(NamedTuple):
    """What is known in a capture of an `update()`: what the numbers in the log are about."""

    moves: tuple[Level, ...]
    keys: tuple[frozenset[int], ...]
    """The ids of the optimizers of every step."""


class Replay:
    """What one `update()` inside a CUDA graph told in one replay; read like a `Record`."""

    def __init__(self, layout: Layout, numbers: list[int]) -> None:
        self.moves = layout.moves
        self.outcomes = [(key, None) for key in layout.keys]
        self._told = Told.by(numbers, len(layout.moves))

    def read(self) -> Told:
        """Its contents."""
        return self._told


class Events:
    """Records on their way, who wants to hear of them, and the last thousand events."""

    def __init__(
        self, on_stuck: str, stuck_after: int, on_replay: Callable[[Replay], object]
    ) -> None:
        if on_stuck not in ON_STUCK:
            raise SettingError(f"on_stuck must be one of {', '.join(ON_STUCK)}, got {on_stuck!r}.")
        if isinstance(stuck_after, bool) or not isinstance(stuck_after, int) or stuck_after < 1:
            raise SettingError(f"stuck_after must be a whole number >= 1, got {stuck_after!r}.")
        self.on_stuck = on_stuck
        self.stuck_after = stuck_after
        self.history: deque[tuple[int, float, str]] = deque(maxlen=_HISTORY)
        """(step, scale, event), oldest first."""
        self.listeners: dict[str, list[Callable[[Event], object]]] = defaultdict(list)
        self.replays = Replays()
        self._on_replay = on_replay
        """Is called with every replay, before its events are told."""
        self._records: deque[Record] = deque(maxlen=_HISTORY)
        self._replayed: deque[Replay] = deque()
        """Replays that were read from the log and not yet told."""
        self._looked_for: Record | None = None
        """The record before which the log was read."""
        self._step = 0
        """The number of the last record or replay that was told."""
        self._due: deque[Callable[[], object]] = deque()
        self._down: dict[frozenset[int], int] = {}
        """The optimizers whose last step was skipped, and how many in a row that made."""

    def on(self, name: str, callback: Callable[[Event], object]) -> None:
        """Calls `callback` with every event called `name`."""
        if name not in NAMES:
            raise SettingError(f"event must be one of {', '.join(NAMES)}, got {name!r}.")
        self.listeners[name].append(callback)

    def forget(self) -> None:
        """Drops what is on its way: it is of another run."""
        self._records.clear()
        self._replayed.clear()
        self._due.clear()
        self._down.clear()
        self._step = 0
        self.replays.forget()

    def take(self, record: Record) -> None:
        """Sends `record` on its way, behind those before."""
        record.send()
        self._records.append(record)

    def log(self, record: Record) -> None:
        """Makes the graph that is being captured log, in every replay, what `record` would tell."""
        levels = tuple(Level(one.loss_id, one.floor) for one in record.moves)
        layout = Layout(levels, tuple(key for key, _ in record.outcomes))
        self.replays.log(record.numbers, layout)

    def deliver(self, wait: bool = False) -> None:
        """Tells of every record that has arrived, or, with `wait`, of all of them and all replays.

        A callback that raises stops this; the others are called the next time.
        """
        if wait:
            self._fetch(wait=True)
        while True:
            while self._due:
                self._due.popleft()()
            record = self._next(wait)
            if record is None:
                return
            told = record.read()
            self._step = told.step
            if isinstance(record, Replay):
                self._due.append(partial(self._on_replay, record))
            for event in self._events(record, told):
                self.history.append((event.step, event.scale, event.name))
                for callback in self.listeners[event.name]:
                    self._due.append(partial(callback, event))
                if event.name == "stuck" and self.on_stuck != "ignore":
                    losses_finite = all(finite for _, finite, _ in told.steps)
                    self._due.append(partial(self._complain, event, losses_finite))

    def _next(self, wait: bool) -> Record | Replay | None:
        """What comes next by its number, taken out of its queue; None if that cannot be said."""
        if not self._records:
            return self._replayed.popleft() if self._replayed else None
        record = self._records[0]
        if not (wait or record.arrived()):
            return None
        step = record.read().step
        # The number of an `update()` that moved nothing is that of the one before.
        if self._replayed and self._replayed[0].read().step <= step:
            return self._replayed.popleft()
        if step > self._step + 1 and self.replays.captured() and record is not self._looked_for:
            # Now that the record is here, so is in the log what was replayed before it.
            if not self._fetch(wait):
                return None
            self._looked_for = record
            return self._next(wait)
        return self._records.popleft()

    def _fetch(self, wait: bool) -> bool:
        """Takes over what is new in the log; False if it is still on its way."""
        fetched = self.replays.fetch(wait)
        if fetched is None:
            return False
        layouts: Any = fetched.entries
        self._replayed.extend(Replay(layout, numbers) for layout, numbers in layouts)
        if fetched.lost:
            self._due.append(partial(_warn_of_loss, fetched.lost))
        return True

    def _events(self, record: Record | Replay, told: Told) -> list[Event]:
        """What `record` amounts to, in order."""
        events = []
        scale = told.scale
        for (key, outcome), (applied, _, row) in zip(record.outcomes, told.steps, strict=True):
            if not applied:
                events.append(Event("skip", told.step, scale, outcome))
                # Usually row - 1; less if the log of replays has lost some.
                if self._down.get(key, 0) < self.stuck_after <= row:
                    events.append(Event("stuck", told.step, scale, outcome))
                self._down[key] = row
            elif key in self._down:
                events.append(Event("recover", told.step, scale, outcome))
                del self._down[key]
        last = record.outcomes[-1][1] if record.outcomes else None
        moves: Sequence[Move | Level] = record.moves
        for scale_move, (before, after) in zip(moves, told.scales, strict=True):
            if before != after:
                name = "grow" if after > before else "backoff"
                events.append(Event(name, told.step, after, last, scale_move.loss_id))
            if after <= scale_move.floor < before:
                events.append(Event("floor", told.step, after, last, scale_move.loss_id))
        return events

    def _complain(self, event: Event, losses_finite: bool) -> None:
        """Raises or warns, with a diagnosis."""
        text = diagnosis(event, self.stuck_after, losses_finite)
        if self.on_stuck == "raise":
            raise StuckError(text)
        warnings.warn(text, stacklevel=caller_level())


def _warn_of_loss(count: int) -> None:
    """Says that the log was too short."""
    warnings.warn(
        f"What became of {count} steps in CUDA graphs is lost: they have no events, and nothing "
        f"follows them. flush() has to be called at least every {ROWS:,} replays.",
        stacklevel=caller_level(),
    )


def diagnosis(event: Event, count: int, losses_finite: bool) -> str:
    """What is wrong when nothing is applied any more, and what to look at."""
    if event.outcome is None:
        known = "" if losses_finite else f" ({_DIAGNOSIS['loss not finite']})"
        return (
            f"{count} steps in a row were skipped in a CUDA graph, and the scale is now "
            f"{event.scale:g}{known}. Take a step outside of the graph for its verdict() and "
            "culprits(). What happens after how many is up to on_stuck and stuck_after."
        )
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
