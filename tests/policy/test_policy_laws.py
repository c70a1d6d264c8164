"""The laws of the rules. Each is a promise about any Dynamic; FAULTS names one that breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from gradscale.formats import FLOAT32
from gradscale.policy import Dynamic, DynamicState, GradStats, Off, Policy, Static
from policy_cases import BAD, GOOD, History, plain
from policy_faults import (
    Backward,
    Blaming,
    Bottomless,
    Eager,
    Equals,
    Fitting,
    Forgiving,
    Grudging,
    Impatient,
    Late,
    Remembering,
    Soaring,
)


def by_hand(policy: Dynamic, state: DynamicState, stats: GradStats) -> DynamicState:
    """The rule as its docstring tells it, in numpy's float32."""
    scale, good_steps, bad_steps = np.float64(state.scale), state.good_steps, state.bad_steps
    low, high = np.float32(policy.min_scale), np.float32(policy.max_scale)
    if not stats.loss_finite:
        return state
    if stats.finite:
        bad_steps = 0
        good_steps += 1
        if good_steps >= policy.growth_interval:
            good_steps = 0
            scale = min(scale * np.float32(policy.growth_factor), high)
    else:
        good_steps = 0
        bad_steps += 1
        if bad_steps >= policy.hysteresis:
            scale = max(scale * np.float32(policy.backoff_factor), low)
    return DynamicState(float(np.float32(scale)), good_steps, bad_steps)


def walk_on(policy: Dynamic, state: DynamicState, history: History) -> list[DynamicState]:
    """`state` and those that follow it."""
    return list(itertools.accumulate(history, policy.update, initial=state))


def float32(value: float) -> float:
    return float(np.float32(value))


EXACT = {
    "scale": st.integers(-126, 127).map(lambda n: 2.0**n),
    "growth_factor": st.integers(1, 8).map(lambda n: 2.0**n),
    "backoff_factor": st.integers(-8, -1).map(lambda n: 2.0**n),
}
INEXACT = {
    "scale": st.floats(FLOAT32.smallest_normal, FLOAT32.max),
    "growth_factor": st.floats(1.001, 300.0),
    "backoff_factor": st.floats(0.003, 0.999),
}


@st.composite
def dynamics(draw: st.DrawFn, rule: type[Dynamic] = Dynamic) -> Dynamic:
    """Any Dynamic that moves within a few steps, with bounds anywhere."""
    exact = draw(st.booleans())
    numbers = EXACT if exact else INEXACT
    low, start, high = sorted(draw(st.tuples(*[numbers["scale"]] * 3)))
    return rule(
        init_scale=start,
        growth_factor=draw(numbers["growth_factor"]),
        backoff_factor=draw(numbers["backoff_factor"]),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=high,
        exact=exact,
    )


class Case(NamedTuple):
    """A policy, a state that it starts from, and what then happens."""

    policy: Dynamic
    start: DynamicState
    history: History

    def walk(self, *more: GradStats) -> list[DynamicState]:
        """The states from the first on, `more` coming after the history."""
        return walk_on(self.policy, self.start, [*self.history, *more])

    def steps(self) -> Iterator[tuple[GradStats, DynamicState, DynamicState]]:
        """What happened, the state before and the state after."""
        for stats, (before, after) in zip(
            self.history, itertools.pairwise(self.walk()), strict=True
        ):
            yield stats, before, after


histories = st.lists(
    st.tuples(st.booleans(), st.sampled_from([True, True, True, False]), st.booleans()).map(
        lambda flags: GradStats(finite=flags[0], loss_finite=flags[1], fits=flags[2])
    ),
    max_size=40,
)


@st.composite
def cases(draw: st.DrawFn, rule: type[Dynamic] = Dynamic) -> Case:
    """Counters start anywhere, also where none but a loaded checkpoint can have them."""
    policy = draw(dynamics(rule))
    counter = st.integers(0, 9)
    start = DynamicState(policy.init().scale, draw(counter), draw(counter))
    return Case(policy, start, draw(histories))


LAWS: list[Any] = []


def law(promise: Callable[[Case], None]) -> Any:
    """A promise about any case."""
    test = given(cases())(promise)
    LAWS.append(test)
    return test


@law
def test_update_follows_the_pseudo_code(case: Case) -> None:
    expected = case.start
    for stats, _, after in case.steps():
        expected = by_hand(case.policy, expected, stats)
        assert after == expected


@law
def test_scale_stays_within_its_bounds(case: Case) -> None:
    for state in case.walk():
        assert float32(case.policy.min_scale) <= state.scale <= float32(case.policy.max_scale)


@law
def test_bad_step_never_raises_the_scale(case: Case) -> None:
    for stats, before, after in case.steps():
        assert stats.finite or after.scale <= before.scale


@law
def test_good_step_never_lowers_the_scale(case: Case) -> None:
    for stats, before, after in case.steps():
        assert not stats.finite or after.scale >= before.scale


@law
def test_n_clean_steps_raise_the_scale_once_and_on_the_nth(case: Case) -> None:
    # A bad step first: wherever the counters stood, the run of clean steps begins after it.
    policy, state = case.policy, case.walk(BAD)[-1]
    raised = by_hand(policy, state._replace(good_steps=policy.growth_interval), GOOD).scale
    scales = [s.scale for s in walk_on(policy, state, [GOOD] * policy.growth_interval)]
    assert scales == [state.scale] * policy.growth_interval + [raised]


@law
def test_clean_steps_raise_the_scale_once_per_interval(case: Case) -> None:
    interval = case.policy.growth_interval
    states = walk_on(case.policy, case.walk(BAD)[-1], [GOOD] * 3 * interval)
    grew = [i for i, state in enumerate(states) if state.good_steps == 0]
    assert grew == [0, interval, 2 * interval, 3 * interval]


@law
def test_counter_beyond_its_interval_still_grows(case: Case) -> None:
    beyond = case.policy.growth_interval + case.start.good_steps
    state = case.walk()[-1]._replace(good_steps=beyond)
    raised = by_hand(case.policy, state, GOOD).scale
    assert case.policy.update(state, GOOD) == DynamicState(raised, good_steps=0, bad_steps=0)


@law
def test_scale_falls_on_the_nth_bad_step_in_a_row_and_each_further_one(case: Case) -> None:
    # A finite step first: it refills the patience, wherever the counters stood.
    policy, state = case.policy, case.walk(GOOD)[-1]
    scales = [s.scale for s in walk_on(policy, state, [BAD] * (policy.hysteresis + 3))]
    for i, (before, after) in enumerate(itertools.pairwise(scales), start=1):
        lowered = max(float32(before * float32(policy.backoff_factor)), float32(policy.min_scale))
        assert after == (lowered if i >= policy.hysteresis else before)


@law
def test_loss_that_is_not_finite_leaves_the_state_as_it_was(case: Case) -> None:
    for stats, before, _ in case.steps():
        assert case.policy.update(before, stats._replace(loss_finite=False)) == before


@law
def test_fits_has_no_influence(case: Case) -> None:
    for stats, before, after in case.steps():
        assert case.policy.update(before, stats._replace(fits=not stats.fits)) == after


@law
def test_update_depends_on_nothing_but_state_and_stats(case: Case) -> None:
    for stats, before, after in case.steps():
        assert case.policy.update(before, stats) == after


@law
def test_500_bad_steps_leave_a_scale_with_a_finite_reciprocal(case: Case) -> None:
    scale = case.walk(*[BAD] * 500)[-1].scale
    assert scale > 0
    assert 1 / scale <= FLOAT32.max


FAULTS = [
    (test_update_follows_the_pseudo_code, Equals),
    (test_update_follows_the_pseudo_code, Late),
    (test_update_follows_the_pseudo_code, Forgiving),
    (test_scale_stays_within_its_bounds, Bottomless),
    (test_scale_stays_within_its_bounds, Soaring),
    (test_bad_step_never_raises_the_scale, Backward),
    (test_good_step_never_lowers_the_scale, Backward),
    (test_good_step_never_lowers_the_scale, Fitting),
    (test_n_clean_steps_raise_the_scale_once_and_on_the_nth, Late),
    (test_n_clean_steps_raise_the_scale_once_and_on_the_nth, Eager),
    (test_clean_steps_raise_the_scale_once_per_interval, Late),
    (test_clean_steps_raise_the_scale_once_per_interval, Eager),
    (test_counter_beyond_its_interval_still_grows, Equals),
    (test_scale_falls_on_the_nth_bad_step_in_a_row_and_each_further_one, Impatient),
    (test_scale_falls_on_the_nth_bad_step_in_a_row_and_each_further_one, Grudging),
    (test_scale_falls_on_the_nth_bad_step_in_a_row_and_each_further_one, Forgiving),
    (test_loss_that_is_not_finite_leaves_the_state_as_it_was, Blaming),
    (test_fits_has_no_influence, Fitting),
    (test_update_depends_on_nothing_but_state_and_stats, Remembering),
    (test_500_bad_steps_leave_a_scale_with_a_finite_reciprocal, Bottomless),
]


@pytest.mark.parametrize(
    ("promise", "wrong"), FAULTS, ids=[f"{p.__name__}-{w.__name__}" for p, w in FAULTS]
)
def test_law_is_broken_by_a_planted_fault(promise: Any, wrong: type[Dynamic]) -> None:
    search = settings(
        phases=[Phase.generate], database=None, derandomize=True, report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        search(given(cases(wrong))(promise.hypothesis.inner_test))()


def test_every_law_is_broken_by_some_fault() -> None:
    assert len(LAWS) >= 12
    assert set(LAWS) == {promise for promise, _ in FAULTS}


@pytest.mark.parametrize("policy", [Off(), Static(init_scale=2.0**-3)], ids=["Off", "Static"])
@given(history=histories)
def test_constant_policy_is_constant(policy: Policy, history: History) -> None:
    assert {state.scale for state in plain(policy, history)} <= {policy.init_scale}


def test_off_is_one_and_static_is_what_it_was_told() -> None:
    assert Off().init() == (1.0,)
    assert Off().init_scale == 1.0
    assert Static(init_scale=2.0**-3).init() == (2.0**-3,)
