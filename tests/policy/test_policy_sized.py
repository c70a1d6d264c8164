"""The rules that go by the size of gradients: their laws, and what they do where it counts.

Each law is a promise about any such policy, state and history; FAULTS names a rule that breaks it.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, given, settings

import gradscale as gs
from gradscale.errors import SettingError
from gradscale.policy import GradStats, Headroom, Histogram, LogMax
from gradscale.simulate import History, made_up, walk

SIZED = (Headroom, LogMax, Histogram)
EXPONENTS = st.integers(-126, 127)


def measured(amax: float, **more: Any) -> GradStats:
    """Finite gradients, the largest of which is `amax`."""
    exponent = math.frexp(amax)[1]
    return GradStats(**{"finite": True, "upper": 0.0, **more}, amax=amax, exponent=exponent)


LOST = GradStats(finite=False, amax=math.inf, exponent=0, upper=1.0)


@st.composite
def policies(draw: st.DrawFn, kind: type | None = None) -> Any:
    """Any of them, with bounds anywhere and settings small enough to matter within a few steps."""
    low, start, high = (2.0**n for n in sorted(draw(st.tuples(*[EXPONENTS] * 3))))
    rule = draw(st.sampled_from(SIZED)) if kind is None else kind
    given_settings: dict[str, Any] = {"init_scale": start, "min_scale": low, "max_scale": high}
    if issubclass(rule, Headroom):
        names = ("margin", "memory", "forget", "pause")
        given_settings |= {name: draw(st.integers(1, 9)) for name in names}
        given_settings["spikes"] = draw(st.sampled_from(["fit", "skip"]))
    given_settings["format"] = draw(st.sampled_from(["float16", "bfloat16", "float8_e4m3"]))
    return rule(**given_settings)


@st.composite
def stats(draw: st.DrawFn) -> GradStats:
    """Whatever a backward pass may tell, also what none ever does."""
    finite = draw(st.booleans())
    amax = draw(st.sampled_from([0.0, 1.0])) * 2.0 ** draw(st.integers(-140, 120))
    return GradStats(
        finite=finite,
        amax=amax if finite else math.inf,
        loss_finite=draw(st.sampled_from([True, True, True, False])),
        fits=draw(st.sampled_from([True, True, True, False])),
        exponent=math.frexp(amax)[1] if finite else draw(st.integers(-200, 200)),
        upper=draw(st.sampled_from([None, 0.0, 1e-8, 0.3])),
    )


histories = st.lists(stats(), max_size=12)
Case = tuple[Any, list[GradStats]]
cases = st.tuples(policies(), histories)
LAWS: list[Any] = []


def law(promise: Callable[[Case], None]) -> Any:
    """A promise about any case."""
    test = given(cases)(promise)
    LAWS.append(test)
    return test


def steps(case: Case) -> list[tuple[GradStats, Any, Any]]:
    """What happened, the state before and the state after."""
    policy, history = case
    state, found = policy.init(), []
    for told in history:
        after = policy.update(state, told)
        found.append((told, state, after))
        state = after
    return found


@law
def test_scale_is_a_power_of_two_within_its_bounds(case: Case) -> None:
    policy, _ = case
    for _, _, after in steps(case):
        assert policy.min_scale <= after.scale <= policy.max_scale
        assert math.frexp(after.scale)[0] == 0.5


@law
def test_bad_step_never_raises_the_scale(case: Case) -> None:
    for told, before, after in steps(case):
        assert told.finite or after.scale <= before.scale


@law
def test_bad_loss_or_one_that_does_not_fit_changes_nothing(case: Case) -> None:
    policy, _ = case
    for told, before, _ in steps(case):
        assert policy.update(before, told._replace(loss_finite=False)) == before
        spoilt = told._replace(finite=True, loss_finite=True, fits=False, amax=1.0, exponent=1)
        assert policy.update(before, spoilt) == before


@law
def test_update_depends_on_nothing_but_state_and_stats(case: Case) -> None:
    policy, _ = case
    # Neither on what it was built from, nor on bounds that nothing reaches.
    twin = dataclasses.replace(policy, init_scale=policy.min_scale)
    for told, before, after in steps(case):
        assert twin.update(before, told) == policy.update(before, told) == after


@law
def test_numbers_stay_those_of_float32_and_int32(case: Case) -> None:
    for _, _, after in steps(case):
        for value in after:
            if isinstance(value, int):
                assert -(2**31) <= value < 2**31
            else:
                assert float(np.float32(value)) == value


class Soaring(Headroom):
    """Ignores its bounds."""

    def update(self, state: Any, stats: GradStats, xp: Any = None) -> Any:
        return Headroom.update(self, state, stats)._replace(scale=self.max_scale * 2)


class Blaming(Headroom):
    """Listens to steps whose loss was not finite."""

    def update(self, state: Any, stats: GradStats, xp: Any = None) -> Any:
        return Headroom.update(self, state, stats._replace(loss_finite=True))


class Counting(Headroom):
    """Remembers how often it was asked."""

    calls = 0

    def update(self, state: Any, stats: GradStats, xp: Any = None) -> Any:
        Counting.calls += 1
        return Headroom.update(self, state, stats)._replace(rest=Counting.calls)


class Wide(Headroom):
    """Counts beyond int32."""

    def update(self, state: Any, stats: GradStats, xp: Any = None) -> Any:
        return Headroom.update(self, state, stats)._replace(calm=2**31)


FAULTS = [
    (test_scale_is_a_power_of_two_within_its_bounds, Soaring),
    (test_bad_step_never_raises_the_scale, Soaring),
    (test_bad_loss_or_one_that_does_not_fit_changes_nothing, Blaming),
    (test_update_depends_on_nothing_but_state_and_stats, Counting),
    (test_numbers_stay_those_of_float32_and_int32, Wide),
]


@pytest.mark.parametrize(("promise", "wrong"), FAULTS, ids=[p.__name__ for p, _ in FAULTS])
def test_law_is_broken_by_a_planted_fault(promise: Any, wrong: type[Headroom]) -> None:
    search = settings(
        phases=[Phase.generate], database=None, derandomize=True, report_multiple_bugs=False
    )
    planted = st.tuples(policies(wrong), histories)
    with pytest.raises(AssertionError):
        search(given(planted)(promise.hypothesis.inner_test))()


def test_every_law_is_broken_by_some_fault() -> None:
    assert set(LAWS) == {promise for promise, _ in FAULTS}


@pytest.mark.parametrize("rule", SIZED)
@pytest.mark.parametrize("name", ["amax", "exponent", "upper"])
def test_what_a_rule_goes_by_is_demanded(rule: Any, name: str) -> None:
    policy, told = rule(), measured(1.0)._replace(**{name: None})
    if name in policy.goes_by and name != "exponent":
        with pytest.raises(SettingError, match=f"needs {name}, which must be measured"):
            policy.update(policy.init(), told)
    else:
        assert policy.update(policy.init(), told) == policy.update(policy.init(), measured(1.0))


# Headroom.


@pytest.mark.parametrize(
    "settings", [{}, {"memory": 3, "forget": 5, "pause": 2}, {"spikes": "skip", "forget": 40}]
)
def test_plain_numbers_walk_as_arrays_do(settings: dict[str, Any]) -> None:
    # Finite steps in plain numbers take a way of their own.
    rng = random.Random(len(settings))
    policy = Headroom(max_scale=2.0**40, **settings)
    plain, arrays, binade = policy.init(), policy.init(np), 0
    for _ in range(2000):
        binade += rng.choice([-1, 0, 0, 0, 0, 1])
        amax = rng.choice([0.0, *[math.ldexp(1.5, binade + rng.randint(-3, 3))] * 40])
        told = GradStats(
            finite=rng.random() > 0.01,
            amax=amax * plain.scale,
            loss_finite=rng.random() > 0.01,
            fits=rng.random() > 0.01,
            exponent=math.frexp(amax * plain.scale)[1],
        )
        plain, arrays = policy.update(plain, told), policy.update(arrays, told, np)
        assert plain == arrays


def together(amax: np.ndarray, **more: Any) -> History:
    """A history of these sizes, a row for every step."""
    none = np.zeros(amax.shape)
    return History(amax, more.get("above", none), more.get("loss_finite", none == 0))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16))
def test_headroom_settles_on_a_stationary_history(seed: int) -> None:
    rng, runs = np.random.default_rng(seed), 100
    level, jitter = rng.uniform(-40, 10, runs), rng.uniform(0, 0.45, runs)
    amax = level + jitter * rng.uniform(-1, 1, (800, runs))
    starts = np.exp2(rng.integers(0, 41, runs))
    # What `spread` begins with is forgotten by then, and a raise by one binade has had its rest.
    found = walk(Headroom(), together(amax), scales=starts).scales[500:]
    assert (found.max(axis=0) - found.min(axis=0)).max() <= 1


def test_headroom_wastes_at_most_two_steps_from_any_scale() -> None:
    starts = np.exp2(np.arange(41.0))
    for level in range(-40, 9):
        for above in (0.0, 3.0):
            amax = np.random.default_rng(level + 99).normal(level, 0.3, (40, 41))
            history = together(amax, above=np.full(amax.shape, above))
            report = walk(Headroom(), history, scales=starts)
            assert report.skipped.max() <= 2, (level, above)
            # The first overflow makes a spread of at most 4 * 2 + 2 binades.
            assert np.abs(report.scales[-1] + level + above - 13).max() <= 10 - 3, (level, above)


def test_headroom_is_back_ten_steps_after_a_burst() -> None:
    # With the rule about losses off, as where ranks do not know of each other.
    amax = np.random.default_rng(0).normal(-2.0, 0.5, (400, 200))
    amax[200:260] = 1000.0
    scales = walk(Headroom(), together(amax)).scales
    assert np.abs(scales[270] - scales[199]).max() <= 2
    told = made_up("burst", 400, 200)
    scales = walk(Headroom(), told).scales
    assert (scales[200] == scales[260]).all()


def test_one_spike_or_one_gradient_of_zero_does_not_poison_headroom() -> None:
    amax = np.full((1700, 1), -2.3)
    calm = walk(Headroom(), together(amax)).scales[-1]
    for odd in (-2.3 + 30, -2.3 + 3, -np.inf):
        spiked = amax.copy()
        spiked[150] = odd
        scales = walk(Headroom(), together(spiked)).scales
        assert (np.abs(scales - calm)[1:] <= 6).all()
        assert (scales[-50:] == calm).all()


def test_one_spike_is_no_level() -> None:
    policy = Headroom()
    state = policy.init()
    for _ in range(3):
        state = policy.update(state, measured(2.0**-8 * state.scale))
    before = state
    state = policy.update(state, measured(2.0**-4 * state.scale))
    assert state.crest == before.crest
    assert state.peak == -3 * policy.memory
    crests = []
    for _ in range(6):
        state = policy.update(state, measured(2.0**-4 * state.scale))
        crests.append(state.crest)
    assert crests == [policy.memory * binade for binade in (-6, -5, -4, -3, -3, -3)]


def test_headroom_jumps() -> None:
    policy = Headroom(init_scale=1.0)
    state = policy.update(policy.init(), measured(2.0**-30 * 0.75))
    assert state.scale == 2.0**42  # the ceiling's 16, a margin of 2, a spread of 2, -30
    assert policy.update(policy.init(), measured(0.0)).scale == 2.0**24
    lowered = policy.update(state, measured(2.0**15))
    assert lowered.scale == 2.0**40


def fed(policy: Headroom, binades: list[float], state: Any = None) -> tuple[Any, list[float]]:
    """The state after gradients of these sizes, and log2 of the scale after each."""
    state, scales = state or policy.init(), []
    for binade in binades:
        amax = 2.0**binade * state.scale
        told = measured(amax) if amax < 65520 else LOST
        state = policy.update(state, told)
        scales.append(math.log2(state.scale))
    return state, scales


@pytest.mark.parametrize("steps", [130, 157, 158, 190, 250, 400])
def test_overflow_by_a_little_costs_two_binades_whenever_the_last_room_was_given_up(
    steps: int,
) -> None:
    # Room that was forgotten a moment ago is no overflow of a moment ago.
    policy = Headroom()
    state, _ = fed(policy, [-9.0] * steps)
    assert state.spread == 0
    over = 1.01 * 65504 / state.scale
    after, (scale,) = fed(policy, [math.log2(over)], state)
    assert scale == math.log2(state.scale) - 2
    assert after.spread == 2


def test_first_overflow_makes_more_room_than_a_later_one() -> None:
    policy = Headroom()
    state, _ = fed(policy, [-9.0] * 20)
    assert state.spread == 2
    first = policy.update(state, LOST)
    assert (first.spread, first.scale) == (4 * 2 + 2, state.scale / 2**8)
    later = policy.update(state._replace(patience=first.patience), LOST)
    assert (later.spread, later.scale) == (2 * 2 + 2, state.scale / 2**4)


def test_overflow_again_while_the_last_is_remembered_doubles_the_room() -> None:
    policy = Headroom()
    state, _ = fed(policy, [-9.0] * 200)
    widths = []
    for _ in range(4):
        state, _ = fed(policy, [20.0, *[-9.0] * 40], state)
        widths.append(state.spread)
    assert widths == [2, 6, 14, 15]


def test_spikes_in_a_row_cost_no_more_than_one_where_there_is_room_for_them() -> None:
    policy = Headroom()
    often = [2.0 if step % 50 == 49 else -10.0 for step in range(580)]
    state, _ = fed(policy, often)
    before = math.log2(state.scale)
    assert state.spread >= 10
    _, scales = fed(policy, [2.0, 2.0, *[-10.0] * 40], state)
    assert min(scales) >= before - 1
    _, scales = fed(policy, [2.0, *[-10.0] * 40], state)
    assert min(scales) >= before - 1


def test_room_that_gradients_need_is_not_forgotten() -> None:
    policy = Headroom(memory=1, forget=200)
    state, _ = fed(policy, [*[-9.0] * 200, 20.0, *[-9.0] * 10, 20.0, *[-9.0] * 3])
    assert state.spread == 6
    often = [-3.0, *[-9.0] * 20]  # six above the others: four, and the margin of two
    kept, _ = fed(policy, often * 40, state)
    assert kept.spread == 4
    assert kept.patience == state.patience  # none of them overflowed
    lost, _ = fed(policy, [-9.0] * 840, state)
    assert lost.spread == 0


# Headroom, with spikes that are skipped.


def test_lone_spike_that_is_skipped_moves_nothing() -> None:
    policy = Headroom(spikes="skip")
    state, _ = fed(policy, [-9.0] * 200)
    spiked, scales = fed(policy, [20.0, -9.0, -9.0], state)
    assert set(scales) == {math.log2(state.scale)}
    assert (spiked.spread, spiked.credit) == (0, state.credit - 16 + 2)
    _, scales = fed(Headroom(), [20.0, -9.0, -9.0], state)
    assert scales[0] == math.log2(state.scale) - 2  # with "fit" it does


def test_second_bad_step_in_a_row_is_no_lone_spike() -> None:
    policy = Headroom(spikes="skip")
    state, _ = fed(policy, [-9.0] * 200)
    after, scales = fed(policy, [20.0, 20.0], state)
    assert scales == [math.log2(state.scale), math.log2(state.scale) - 2]
    assert after.patience == policy.forget


def test_spikes_that_come_too_often_are_no_lone_spikes() -> None:
    policy = Headroom(spikes="skip")
    steady = [-9.0] * 200
    state, _ = fed(policy, steady)
    _, scales = fed(policy, [20.0, -9.0] * 8, state)
    lowered = [scale < math.log2(state.scale) for scale in scales[::2]]
    assert lowered == [False] * 4 + [True] * 4
    # One in 17 steps for ever is not too often, one in 10 is.
    rare, _ = fed(policy, [20.0, *[-9.0] * 16] * 40, state)
    often, _ = fed(policy, [20.0, *[-9.0] * 9] * 40, state)
    assert rare.scale == state.scale > often.scale


def test_first_step_that_overflows_is_no_lone_spike() -> None:
    policy = Headroom(spikes="skip")
    assert policy.update(policy.init(), LOST).scale == Headroom().update(policy.init(), LOST).scale
    assert policy.update(policy.init(), LOST).scale == 2.0**-8


# Headroom, told the largest gradient alone.


@pytest.mark.parametrize("amax", [0.0, 2.0**-120, 0.3, 0.5, 1.0, 6e4, 3e38, math.inf, math.nan])
def test_headroom_takes_the_exponent_from_amax(amax: float) -> None:
    policy = Headroom(max_scale=2.0**100)
    finite = math.isfinite(amax)
    exponent = math.frexp(amax)[1] if finite else 0
    for state in (policy.init(), fed(policy, [-9.0] * 20)[0]):
        told = GradStats(finite=finite, amax=amax, exponent=exponent)
        expected = policy.update(state, told)
        assert policy.update(state, told._replace(exponent=None)) == expected
        arrays = type(state)(
            *(
                np.asarray(value, np.float32 if isinstance(value, float) else np.int32)
                for value in state
            )
        )
        short = told._replace(exponent=None, amax=np.float32(amax))
        assert policy.update(arrays, short, np) == expected


def test_moves_of_headroom_are_few() -> None:
    for kind, most in (("steady", 12), ("spikes", 20), ("activations", 22), ("heavy", 40)):
        assert walk(Headroom(), made_up(kind, 1000, 300)).moves.max() <= most, kind


# The published rules.


def test_logmax_comes_back_from_one_overflow() -> None:
    # OpenSeq2Seq's own takes 12,286 steps to come back from one.
    amax = np.random.default_rng(1).normal(-2.0, 1.0, (600, 50))
    amax[300] = 40.0
    report = walk(LogMax(), together(amax))
    assert np.abs(report.scales[320] - report.scales[299]).max() <= 2


def test_logmax_comes_back_from_a_burst() -> None:
    # With the rule about losses off. The scale is lowered all the while, which must not be taken
    # for gradients that grow.
    amax = np.random.default_rng(1).normal(-2.0, 0.5, (300, 50))
    amax[200:260] = 1000.0
    scales = walk(LogMax(), together(amax)).scales
    assert (scales[262] >= scales[199] - 10).all()


def test_logmax_takes_a_gradient_of_zero_for_nothing() -> None:
    policy = LogMax()
    state = policy.update(policy.init(), measured(2.0**-5))
    assert policy.update(state, measured(0.0)) == state


def test_histogram_holds_still_where_the_published_rule_does_not() -> None:
    amax = np.full((500, 1), -2.5)
    scales = walk(Histogram(), together(amax)).scales[400:]
    assert scales.max() == scales.min()


@pytest.mark.parametrize("upper", [None, 1.0], ids=["not measured", "measured"])
def test_overflow_lowers_the_scale_of_histogram(upper: float | None) -> None:
    policy = Histogram()
    told = LOST._replace(upper=upper)
    assert policy.update(policy.init(), told).scale == policy.init_scale / 2


@pytest.mark.parametrize(("format", "edge"), [("float16", 8188.0), ("float8_e4m3", 56.0)])
def test_one_element_above_the_edge_is_enough_where_their_share_is_not_measured(
    format: str, edge: float
) -> None:
    policy = Histogram(format=format, interval=1)
    start, above = policy.init(), edge * (1 + 2**-20)
    assert policy.update(start, measured(edge, upper=None)) == start
    assert policy.update(start, measured(above, upper=None)).scale == start.scale / 2
    # Measured, it is the share that counts.
    assert policy.update(start, measured(above, upper=0.0)) == start
    assert policy.update(start, measured(edge, upper=1.0)).scale == start.scale / 2


def test_norm_of_the_gradients_is_the_last_of_the_stats_and_moves_no_scale() -> None:
    assert GradStats._fields[-1] == "norm"
    assert GradStats(finite=True).norm is None
    for rule in SIZED:
        policy, told = rule(), measured(1.0)
        assert policy.update(policy.init(), told) == policy.update(
            policy.init(), told._replace(norm=3.0)
        )


@pytest.mark.parametrize(
    ("rule", "name", "value"),
    [
        (Headroom, "margin", 101),
        (Headroom, "memory", 2**21),
        (Headroom, "format", "float12"),
        (LogMax, "deviations", 101.0),
        (LogMax, "format", "int8"),
        (Histogram, "format", ""),
    ],
)
def test_setting_out_of_reach_is_refused(rule: Any, name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{name} must be .*got {value!r}"):
        rule(**{name: value})


# Presets.


def test_growth_takes_longer_the_higher_the_scale() -> None:
    policy = gs.Dynamic(init_scale=1.0, growth_interval=2, slow_growth_above=2.0, max_scale=2.0**5)
    amax = np.full((100, 1), -30.0)
    scales = walk(policy, together(amax)).scales[:, 0]
    held = [int((scales == exponent).sum()) for exponent in range(5)]
    assert held == [2, 2, 4, 8, 16]


def test_old_name_of_slow_growth_gives_the_same_policy_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"Dynamic\(slow_growth_above=1.0\)"):
        assert gs.Lengthening(init_scale=8.0) == gs.Dynamic(init_scale=8.0, slow_growth_above=1.0)
    with pytest.warns(DeprecationWarning, match=r"Dynamic\(slow_growth_above=4.0\)"):
        assert gs.Lengthening(above=4.0) == gs.Dynamic(slow_growth_above=4.0)


def test_only_an_interval_that_is_the_same_at_every_scale_is_plain() -> None:
    assert gs.Dynamic(hysteresis=3, growth_interval=7).is_plain
    assert not gs.Dynamic(slow_growth_above=4.0).is_plain
    assert not gs.for_pretraining().is_plain


def test_presets_do_what_they_are_for() -> None:
    short = walk(gs.for_short_runs(), made_up("spikes", 300, 50))
    assert short.skipped.max() <= 3
    # From far below it comes back as quickly as Dynamic with that interval.
    low = np.array([2.0**-5])
    report = walk(gs.for_pretraining(), together(np.full((256 * 8, 1), -30.0)), scales=low)
    assert report.scales[256 * 7, 0] == 2.0
