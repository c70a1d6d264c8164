"""Events from step records: skipped steps, recoveries, moves of the scale.

The tracker runs once per training step, and in almost every one nothing happens: that case returns
before anything is built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from gradscale.errors import SettingError
from gradscale.monitor.records import Step, StepRecord

EVENTS = ("skip", "grow", "backoff", "floor", "recover", "stuck")
"""The names of events."""
ON_STUCK = ("warn", "raise", "ignore")
"""The values of `on_stuck`."""
HISTORY = 1000
"""Events that are kept."""


class Event(NamedTuple):
    """A change of the scale, or of whether steps are applied."""

    name: str
    """One of `EVENTS`."""
    step: int
    """Number of the `update()` in which it happened, counted from 1 since the start of training."""
    scale: float
    """The scale after it."""
    outcome: Any = None
    """The outcome of the step; of "grow", "backoff" and "floor", that of the last step. None if the
    engine has none, as for replays of a CUDA graph."""
    loss_id: int | str = 0
    """The loss whose scale moved."""


class Tracker:
    """Converts step records to events, and counts consecutive skipped steps.

    Examples:
        >>> from gradscale.monitor.records import Move
        >>> tracker = Tracker(stuck_after=2)
        >>> bad = Step(key="optimizer", applied=False)
        >>> [e.name for e in tracker.events(StepRecord(1, 8.0, (bad,), (Move(0, 16.0, 8.0),)))]
        ['skip', 'backoff']
        >>> [e.name for e in tracker.events(StepRecord(2, 8.0, (bad,)))]
        ['skip', 'stuck']
        >>> [e.name for e in tracker.events(StepRecord(3, 8.0, (Step("optimizer", applied=True),)))]
        ['recover']
    """

    __slots__ = ("_restored", "_skipped", "history", "stuck_after")

    def __init__(self, stuck_after: int = 50) -> None:
        if isinstance(stuck_after, bool) or not isinstance(stuck_after, int) or stuck_after < 1:
            raise SettingError(f"stuck_after must be a whole number >= 1, got {stuck_after!r}.")
        self.stuck_after = stuck_after
        """Skipped steps in a row at which a "stuck" event is due."""
        self.history: deque[tuple[int, float, str]] = deque(maxlen=HISTORY)
        """(step, scale, name) of the last events, oldest first."""
        self._skipped: dict[Hashable, int] = {}
        self._restored: deque[int] = deque()

    @property
    def skipped_in_a_row(self) -> list[int]:
        """Consecutive skipped steps of every optimizer, in order of first use."""
        return [*self._skipped.values(), *self._restored]

    def restore(self, skipped_in_a_row: Sequence[int] = ()) -> None:
        """Starts a run with these counts: the n-th optimizer that steps continues the n-th count.

        Keys of earlier steps are discarded, since optimizers of another process have other keys;
        `history` is kept. An engine that counts by itself (`Step.skipped_in_a_row`) must restore
        its own counts too.
        """
        self._skipped.clear()
        self._restored = deque(skipped_in_a_row)

    def drop(self, optimizer: Hashable) -> None:
        """Discards the count of an optimizer that no longer exists, since its id may be reused."""
        self._skipped.pop(optimizer, None)

    def events(self, record: StepRecord) -> list[Event]:
        """Returns the events of `record`, steps before moves, and adds them to `history`."""
        number, scale, steps, moves = record  # unpacked: attributes take twice as long
        skipped = self._skipped
        for key, applied, _, _, _ in steps:
            if not applied or any(skipped.get(each, -1) for each in _optimizers(key)):
                break
        else:
            for _, before, after, _ in moves:
                if before != after:
                    break
            else:
                return []
        events: list[Event] = []
        for step in steps:
            names = self._count(step)
            events += [Event(name, number, scale, step.outcome) for name in names]
        last = steps[-1].outcome if steps else None
        for loss_id, before, after, floor in moves:
            if before != after:
                name = "grow" if after > before else "backoff"
                events.append(Event(name, number, after, last, loss_id))
            if after <= floor < before:
                events.append(Event("floor", number, after, last, loss_id))
        self.history.extend((event.step, event.scale, event.name) for event in events)
        return events

    def _count(self, step: Step) -> Sequence[str]:
        """Counts `step`; returns the names of its events."""
        before = 0
        for each in _optimizers(step.key):
            if each not in self._skipped:
                self._skipped[each] = self._restored.popleft() if self._restored else 0
            before = max(before, self._skipped[each])
        count = 0
        if not step.applied:
            count = before + 1 if step.skipped_in_a_row is None else step.skipped_in_a_row
        self._skipped.update(dict.fromkeys(_optimizers(step.key), count))
        if step.applied:
            return ("recover",) if before else ()
        # A count may jump: replays of a CUDA graph can be missing from the records.
        return ("skip", "stuck") if before < self.stuck_after <= count else ("skip",)


def _optimizers(key: Hashable) -> Iterable[Hashable]:
    """What is counted for the steps of `key`."""
    return key if isinstance(key, frozenset) else (key,)


def as_event_name(name: Any) -> str:
    """Returns `name`; a SettingError if there is no such event."""
    if name not in EVENTS:
        raise SettingError(f"event must be one of {', '.join(EVENTS)}, got {name!r}.")
    return str(name)


def as_on_stuck(value: Any) -> str:
    """Returns `value`; a SettingError if it is not valid for `on_stuck`."""
    if value not in ON_STUCK:
        raise SettingError(f"on_stuck must be one of {', '.join(ON_STUCK)}, got {value!r}.")
    return str(value)
