"""Carries step records to the host and delivers what follows from them, without waiting.

Records are looked at when they have arrived: at a later `update()`, or in `flush()`, which waits.
So events come late by as much as the device is behind the host; on the CPU they come at once. A
replay of a CUDA graph runs no Python: what it did is in a log on the device (graph_log.py), which
is read in `flush()`, and when the number of a record shows that replays came before it: their
events go first.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import SettingError, StuckError, caller_level
from gradscale.monitor import (
    Event,
    Move,
    Step,
    StepRecord,
    Tracker,
    as_event_name,
    as_on_stuck,
    replay_message,
    stuck_message,
)
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.grads.scale import readable
from gradscale.torch.telemetry.followers import Followers, innermost
from gradscale.torch.telemetry.graph_log import ROWS, GraphLog
from gradscale.torch.telemetry.names import Names
from gradscale.torch.telemetry.outcome import StepOutcome
from gradscale.torch.telemetry.run_log import Stream
from gradscale.torch.telemetry.transport import Layout, Mark, Record, Slots, numbers_of, record_of
from gradscale.torch.telemetry.weights import bad_weights

_KEPT = 1000
"""Records that can be on their way."""
_TOGETHER = 8
"""Records on a device that are looked at together, where there are no listeners."""


class Monitor:
    """Outcomes, records on their way, events and followers of one scaler."""

    def __init__(self, on_stuck: str, stuck_after: int) -> None:
        self.on_stuck = as_on_stuck(on_stuck)
        self.tracker = Tracker(stuck_after)
        self.names = Names()
        self.followers = Followers()
        self.log = GraphLog()
        self.slots = Slots()
        self._mark: Mark | None = None
        self.prompt = False
        """Whether a decision by a kernel can be read before the step that follows it is done."""
        self._latest: Record | None = None
        self._layout: Any = None
        self._calm = False
        """Whether the last step of every optimizer was applied."""
        self.busy = False
        """Whether an `update()` must be delivered even if nothing has happened in it."""
        self.steps: list[Any] = []
        """The steps since the last `update()`."""
        self.last: Any = None
        """The last step before these."""
        self.watchers: list[Callable[[], object]] = []
        """Called at the end of every iteration, before entries forget it."""
        self.stream: Stream | None = None
        """What writes a line for every record, where there is a log."""
        self._listeners: dict[str, list[Callable[[Event], object]]] = {}
        self._records: deque[Record] = deque(maxlen=_KEPT)
        self._replayed: deque[StepRecord] = deque()
        """Replays that were read from the log and not yet delivered."""
        self._looked_for: Record | None = None
        """The record before which the log was read."""
        self._number = 0
        """The number of the last record or replay that was delivered."""
        self._due: deque[Callable[[], object]] = deque()

    # Steps.

    def outcome(self) -> StepOutcome | None:
        """What became of the last step; None before the first."""
        last = self.steps[-1] if self.steps else self.last
        return None if last is None else last.outcome()

    def note_plain(self, optimizers: Sequence[Any], outcome: StepOutcome) -> None:
        """Keeps the outcome of a step that a disabled scaler took."""
        # One for each optimizer: with a disabled scaler, update() need not be called.
        key = self.key_of(optimizers)
        others = [
            each for each in self.steps if self.key_of(each.optimizers()) not in (key, _NOBODY)
        ]
        self.steps = [*others, PlainStep(optimizers, outcome)]

    def key_of(self, optimizers: Sequence[Any]) -> frozenset[int]:
        """The ids of the optimizers that step together, without their wrappers."""
        return frozenset([id(innermost(optimizer)) for optimizer in optimizers])

    def layout_of(self, optimizers: list[Any], floor: float) -> Layout:
        """The layout of a record of one step of `optimizers` and one move."""
        known = self._layout
        if known is None or known[0] != list(map(id, optimizers)) or known[1] != floor:
            layout = Layout(((0, floor),), (self.key_of(optimizers),))
            known = self._layout = (list(map(id, optimizers)), floor, layout)
        return known[2]

    # Records.

    def record(
        self, number: Any, scale: Any, moves: Sequence[tuple[int | str, Any, Any, float]]
    ) -> Record:
        """The record of an `update()`, of the steps since the last one.

        Args:
            number: The number of the `update()`: a number on the CPU, else an int32 tensor.
            scale: The scale of loss 0 from now on.
            moves: Loss, scale before and after, and floor, of every scale that may have moved.
        """
        steps, self.steps = self.steps, []
        if steps:
            self.last = steps[-1]
        keys = [self.key_of(step.optimizers()) for step in steps]
        if not isinstance(number, Tensor):
            made = tuple(
                Step(key, not step.skip, step.losses_finite is not False, step.row, step)
                for key, step in zip(keys, steps, strict=True)
            )
            record = StepRecord(number, scale, made, tuple([Move(*each) for each in moves]))
            return Record(_NO_LAYOUT, (), read=record)
        layout = Layout(tuple((loss_id, floor) for loss_id, _, _, floor in moves), tuple(keys))
        flags = [
            (step.skip == 0, True if step.losses_finite is None else step.losses_finite, step.row)
            for step in steps
        ]
        numbers = numbers_of(number, scale, [(b, a) for _, b, a, _ in moves], flags)
        return Record(layout, steps, numbers)

    def announce(self, record: Record) -> None:
        """Sends `record` on its way, and delivers what has arrived; in a capture, logs it.

        The last thing to do in an `update()`, because callbacks may raise.
        """
        if not record.is_sent():
            if capturing():
                # Nothing has happened yet: every replay will log what it did.
                if record.numbers is not None:  # a disabled scaler has none
                    self.log.log(record.numbers, record.layout)
                return
            record.send()
        if self.stream is not None:
            self.stream.send(record)
        self._records.append(record)
        self._latest = record
        if self.followers.all:
            self.followers.take(record)
        mark = self._mark
        if mark is not None:
            # Looking whether a record has arrived takes as long as a launch: without listeners,
            # only every few records.
            alone = self.stream is None and not self._listeners
            if alone and self._calm and len(self._records) < _TOGETHER:
                return
            mark.put()
            self._mark = None
        self.deliver()

    def was_applied(self, outcome: Any) -> bool:
        """Whether the last step, whose outcome this is, was applied.

        **Waits for the device**; if `prompt`, for no more than the decision, if it can.
        """
        record = None if readable(outcome.applied) else self._latest
        if record is None or not record.outcomes or record.outcomes[-1] is not self.last:
            return bool(outcome.applied)
        return record.read().steps[-1].applied

    def mark_on(self, device: Any) -> Mark:
        """The mark that follows the records that are made now."""
        if self._mark is None or self._mark.is_put:
            self._mark = Mark(device)
        return self._mark

    def on(self, name: str, callback: Callable[[Event], object]) -> None:
        """Calls `callback` with every event called `name`."""
        event = as_event_name(name)
        if not callable(callback):
            raise SettingError(
                f"callback must be a function that takes an Event, got {type(callback).__name__}."
            )
        self._listeners.setdefault(event, []).append(callback)

    def follow(self, things: Sequence[Any], optimizer: Any, wait: bool) -> None:
        """Steps or calls `things` after every applied step, see `Followers.add`."""
        self.followers.add(things, optimizer, wait)
        self.busy = True

    def forget(self, rows: Sequence[int] = ()) -> None:
        """Drops what is on its way, which is of another run; `rows` are the skips of this one.

        The log gets it first, and that **waits for the device**.
        """
        try:
            if self.stream is not None:
                self._log_the_rest(self.stream)
        finally:
            self._drop(rows)

    def _drop(self, rows: Sequence[int]) -> None:
        """Drops what is on its way."""
        self.steps = []
        self._records.clear()
        self._replayed.clear()
        self._due.clear()
        self._number = 0
        self.restore(rows)
        self.followers.forget()
        self.log.forget()

    def restore(self, rows: Sequence[int]) -> None:
        """Goes on with these skips in a row, of every optimizer."""
        self.tracker.restore(rows)
        self.busy, self._calm = True, False

    def deliver(self, wait: bool = False) -> None:
        """Calls back for every record that has arrived, or, with `wait`, for all and all replays.

        A callback that raises stops this; the others are called the next time.
        """
        if wait:
            self._fetch(wait=True)
        while True:
            while self._due:
                self._due.popleft()()
            found = self._next(wait)
            if found is None:
                self._calm = not any(self.tracker.skipped_in_a_row)
                waiting = bool(self._records or self.followers.all or self.stream is not None)
                self.busy = waiting or not self._calm
                if self.stream is not None:
                    self.stream.settle(wait)
                return
            record, source = found
            self._number, self._calm = record.step, False
            if source is None:
                self._due.append(partial(self.followers.replay, record))
            events, weights = self.tracker.events(record), []
            for made in events:
                event = made
                if made.outcome is not None:
                    event = made._replace(outcome=made.outcome.outcome())
                for callback in self._listeners.get(event.name, ()):
                    self._due.append(partial(callback, event))
                asked = self.on_stuck != "ignore" or self.stream is not None
                if event.name == "stuck" and asked:
                    last = made.outcome or self.last
                    weights = bad_weights(self.names, last.optimizers() if last else ())
                    finite = all(step.loss_finite for step in record.steps)
                    self._due.append(partial(self._complain, event, finite, weights))
            if self.stream is not None:
                extra = None if source is None else source.extra
                self.stream.take(record, extra, events, weights)

    def look_once_more(self) -> None:
        """Writes the lines of the records that have arrived, and calls nobody else."""
        while self._records and self._records[0].arrived():
            source = self._records.popleft()
            record = source.read()
            if self.stream is not None:
                self.stream.take(record, source.extra, self.tracker.events(record), ())
        if self.stream is not None:
            self.stream.settle()

    def _log_the_rest(self, stream: Stream) -> None:
        """Hands everything that is on its way to the log, and calls nobody else."""
        self._fetch(wait=True)
        while (found := self._next(wait=True)) is not None:
            record, source = found
            self._number = record.step
            extra = None if source is None else source.extra
            stream.take(record, extra, self.tracker.events(record), ())

    def _next(self, wait: bool) -> tuple[StepRecord, Record | None] | None:
        """What comes next by its number, and what brought it: None for a replay.

        None alone if it is not there.
        """
        while self._records:
            record = self._records[0]
            if not (wait or record.arrived()):
                return None
            number = record.number()
            # The number of an `update()` that moved nothing is that of the one before.
            if self._replayed and self._replayed[0].step <= number:
                break
            if number > self._number + 1 and self.log.captured() and record is not self._looked_for:
                # Now that the record is here, so is in the log what was replayed before it.
                if not self._fetch(wait):
                    return None
                self._looked_for = record
                continue
            self._records.popleft()
            if self.stream is not None or not (self._calm and record.is_quiet()):
                return record.read(), record
            self._number = number
        return (self._replayed.popleft(), None) if self._replayed else None

    def _fetch(self, wait: bool) -> bool:
        """Takes over what is new in the log; False if it is still on its way."""
        fetched = self.log.fetch(wait)
        if fetched is None:
            return False
        for layout, numbers in fetched.entries:
            self._replayed.append(record_of(layout, numbers, ()))  # type: ignore[arg-type]
        if fetched.lost:
            self._due.append(partial(_warn_of_loss, fetched.lost))
        return True

    def _complain(self, event: Event, losses_finite: bool, weights: Sequence[str]) -> None:
        """Raises or warns, with a diagnosis; `weights` are those that are not finite."""
        if self.on_stuck == "ignore":
            return
        count, outcome = self.tracker.stuck_after, event.outcome
        if outcome is None:
            text = replay_message(count, event.scale, losses_finite, weights)
        else:
            names = [str(culprit.name) for culprit in outcome.culprits()]
            text = stuck_message(count, float(outcome.scale), outcome.verdict(), names, weights)
        if self.on_stuck == "raise":
            raise StuckError(text)
        warnings.warn(text, stacklevel=caller_level())

    def __getstate__(self) -> dict[str, Any]:
        """The settings: callbacks, followers, outcomes and counts stay where they are."""
        return {"settings": (self.on_stuck, self.tracker.stuck_after)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["settings"])  # type: ignore[misc]


_NO_LAYOUT = Layout((), ())
_NOBODY: frozenset[int] = frozenset()
"""The key of a step whose optimizers are gone."""


def _warn_of_loss(count: int) -> None:
    """Warns that the log was too short."""
    warnings.warn(
        f"The results of {count} steps in CUDA graphs are lost: there are no events for them, and "
        f"follow() has not stepped schedulers for them. Call flush() at least every {ROWS:,} "
        "replays.",
        stacklevel=caller_level(),
    )


class PlainStep:
    """A step that a disabled scaler took; it does not keep the optimizers alive."""

    __slots__ = ("_outcome", "_refs", "losses_finite", "row", "skip")

    def __init__(self, optimizers: Sequence[Any], outcome: StepOutcome) -> None:
        self._refs = [weakref.ref(optimizer) for optimizer in optimizers]
        self.skip, self.losses_finite, self.row = False, True, 0
        self._outcome = outcome

    def optimizers(self) -> list[Any]:
        """The optimizers that it stepped and that are still there."""
        return [optimizer for ref in self._refs if (optimizer := ref()) is not None]

    def outcome(self) -> StepOutcome:
        """What became of it."""
        return self._outcome


def plain_outcome(returned: Any) -> StepOutcome:
    """The outcome of a step that a disabled scaler took."""
    yes = torch.ones((), dtype=torch.bool, device="cpu")
    one = torch.ones((), dtype=torch.float32, device="cpu")
    none = torch.zeros((), dtype=torch.int32, device="cpu")
    return StepOutcome(
        applied=yes,
        finite=yes,
        fits=yes,
        loss_finite=yes,
        scale=one,
        skipped_in_a_row=none,
        loss=returned,
    )
