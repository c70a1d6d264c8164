"""Events from records: which, in which order, and what survives a restart."""

from __future__ import annotations

from typing import Any

import pytest

from gradscale.errors import SettingError
from gradscale.monitor import (
    EVENTS,
    ON_STUCK,
    Event,
    Move,
    Step,
    StepRecord,
    Tracker,
    as_event_name,
    as_on_stuck,
)


def record(number: int, *applied: bool, moves: tuple[Move, ...] = (), scale: float = 8.0) -> Any:
    """A record in which the optimizers "a", "b", ... took a step each."""
    steps = tuple(
        Step(key, done, outcome=f"{key}{number}") for key, done in zip("abc", applied, strict=False)
    )
    return StepRecord(number, scale, steps, moves)


def names(tracker: Tracker, *records: StepRecord) -> list[list[str]]:
    return [[event.name for event in tracker.events(each)] for each in records]


# Steps.


def test_applied_step_at_an_unchanged_scale_is_no_event() -> None:
    tracker = Tracker()
    quiet = record(1, True, moves=(Move(0, 8.0, 8.0, 8.0),))
    assert names(tracker, quiet, quiet, StepRecord(3, 8.0)) == [[], [], []]
    assert list(tracker.history) == []


def test_every_skipped_step_is_an_event_and_the_first_applied_one_a_recovery() -> None:
    walk = [record(i, applied) for i, applied in enumerate([False, False, True, True, False], 1)]
    assert names(Tracker(), *walk) == [["skip"], ["skip"], ["recover"], [], ["skip"]]


def test_event_has_the_step_the_scale_and_the_outcome() -> None:
    tracker = Tracker(stuck_after=1)
    moves = (Move(0, 8.0, 4.0), Move("penalty", 2.0, 1.0, 1.0))
    assert tracker.events(record(7, True, False, moves=moves, scale=4.0)) == [
        Event("skip", 7, 4.0, "b7"),
        Event("stuck", 7, 4.0, "b7"),
        Event("backoff", 7, 4.0, "b7"),
        Event("backoff", 7, 1.0, "b7", "penalty"),
        Event("floor", 7, 1.0, "b7", "penalty"),
    ]
    assert list(tracker.history) == [
        (7, 4.0, "skip"),
        (7, 4.0, "stuck"),
        (7, 4.0, "backoff"),
        (7, 1.0, "backoff"),
        (7, 1.0, "floor"),
    ]


def test_stuck_comes_once_and_again_after_a_recovery() -> None:
    walk = [record(i, applied) for i, applied in enumerate([False] * 4 + [True] + [False] * 3, 1)]
    stuck = [step for step, found in enumerate(names(Tracker(3), *walk), 1) if "stuck" in found]
    assert stuck == [3, 8]


def test_optimizers_are_counted_apart() -> None:
    tracker = Tracker(stuck_after=2)
    walk = [record(1, False, True), record(2, True, False), record(3, False, False)]
    assert names(tracker, *walk) == [["skip"], ["recover", "skip"], ["skip", "skip", "stuck"]]
    assert tracker.skipped_in_a_row == [1, 2]


def test_optimizers_that_step_together_have_a_count_each() -> None:
    tracker, both = Tracker(), frozenset("ab")
    tracker.restore([2, 2])
    walk = [(both, False), (frozenset("a"), True), (both, True), (frozenset("c"), True)]
    steps = [StepRecord(i, 8.0, (Step(*step),)) for i, step in enumerate(walk, 1)]
    assert names(tracker, *steps) == [["skip"], ["recover"], ["recover"], []]
    assert tracker.skipped_in_a_row == [0, 0, 0]


def test_count_of_the_engine_goes_before_the_trackers_own() -> None:
    # As from a log of CUDA graphs in which replays are missing.
    tracker = Tracker(stuck_after=10)
    counts = [1, 2, 25, 26]
    walk = [StepRecord(i, 1.0, (Step("a", False, skipped_in_a_row=i),)) for i in counts]
    assert names(tracker, *walk) == [["skip"], ["skip"], ["skip", "stuck"], ["skip"]]
    assert tracker.skipped_in_a_row == [26]


# Moves.


@pytest.mark.parametrize(
    ("before", "after", "floor", "expected"),
    [
        (4.0, 8.0, 1.0, ["grow"]),
        (4.0, 2.0, 1.0, ["backoff"]),
        (2.0, 1.0, 1.0, ["backoff", "floor"]),
        (1.0, 1.0, 1.0, []),
        (0.5, 1.0, 1.0, ["grow"]),
        (4.0, 4.0, 1.0, []),
    ],
)
def test_move_is_named_by_its_direction(
    before: float, after: float, floor: float, expected: list[str]
) -> None:
    tracker = Tracker()
    moved = record(1, True, moves=(Move(0, before, after, floor),))
    assert names(tracker, moved, StepRecord(2, after, (), moved.moves)) == [expected, expected]


# Restarts.


@pytest.mark.parametrize("every", [1, 3, 5, 49, 50, 51])
def test_job_that_is_restarted_between_bad_steps_gets_stuck_at_the_same_step(every: int) -> None:
    tracker, stuck = Tracker(stuck_after=50), []
    for number in range(1, 121):
        if "stuck" in names(tracker, record(number, False))[0]:
            stuck.append(number)
        if number % every == 0:
            saved = tracker.skipped_in_a_row
            tracker = Tracker(stuck_after=50)
            tracker.restore(saved)
            assert tracker.skipped_in_a_row == saved  # also before the first step
    assert stuck == [50]


def test_counts_go_to_optimizers_in_order_of_first_use() -> None:
    tracker = Tracker()
    tracker.restore([0, 4])
    after = StepRecord(1, 8.0, (Step("new a", True), Step("new b", True)))
    assert [(event.name, event.outcome) for event in tracker.events(after)] == [("recover", None)]
    assert tracker.skipped_in_a_row == [0, 0]
    names(tracker, StepRecord(2, 8.0, (Step("third", False),)))
    assert tracker.skipped_in_a_row == [0, 0, 1]


def test_restore_without_counts_forgets_them_and_keeps_the_history() -> None:
    tracker = Tracker(stuck_after=2)
    names(tracker, record(1, False))
    tracker.restore()
    assert names(tracker, record(2, False), record(3, True)) == [["skip"], ["recover"]]
    assert [name for _, _, name in tracker.history] == ["skip", "skip", "recover"]


# History, settings, cost.


def test_last_thousand_events_are_kept() -> None:
    tracker = Tracker()
    names(tracker, *(record(number, False) for number in range(1, 1201)))
    assert len(tracker.history) == 1000
    assert tracker.history[0] == (201, 8.0, "skip")
    assert tracker.history[-1] == (1200, 8.0, "skip")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "50"])
def test_wrong_stuck_after_is_refused_by_name_and_value(value: Any) -> None:
    with pytest.raises(SettingError, match=f"stuck_after must be .*got {value!r}"):
        Tracker(value)


def test_wrong_names_are_refused() -> None:
    assert [as_event_name(name) for name in EVENTS] == list(EVENTS)
    assert [as_on_stuck(name) for name in ON_STUCK] == list(ON_STUCK)
    for wrong in ("", "Skip", "overflow", None, 3):
        with pytest.raises(SettingError, match=f"event must be one of skip.*got {wrong!r}"):
            as_event_name(wrong)
        with pytest.raises(SettingError, match=f"on_stuck must be one of warn.*got {wrong!r}"):
            as_on_stuck(wrong)


def test_record_in_which_nothing_happened_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    quiet = record(1, True, moves=(Move(0, 8.0, 8.0),))
    names(tracker, quiet)

    def refuse(*_: Any) -> Any:
        raise AssertionError("the slow way")

    monkeypatch.setattr(Tracker, "_count", refuse)
    assert tracker.events(quiet) == []
    with pytest.raises(AssertionError, match="the slow way"):
        tracker.events(record(2, False))
