"""Every rule in every framework, the laws of the rules, and their settings.

Adding a policy is one line in POLICIES, adding an engine one line in ENGINES. Each helper that
compares, and each law, is also run on a planted fault, to show that it can fail.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings

from gradscale import policy as rules
from gradscale.errors import SettingError
from gradscale.formats import FLOAT32
from gradscale.policy import (
    MAX_SCALE,
    MIN_SCALE,
    Dynamic,
    DynamicState,
    GradStats,
    Off,
    Policy,
    State,
    Static,
    scalars,
)

History = list[GradStats]
Walk = Callable[[Policy, History], list[State]]

GOOD, BAD = GradStats(finite=True), GradStats(finite=False)
BOTTOM, TOP = 2.0**-126, 2.0**127  # the powers of two that float32 holds as normal numbers
INT32_MAX = 2**31 - 1


def dynamic(*numbers: float, exact: bool = True) -> Dynamic:
    """A Dynamic by its seven numbers in order, none of them left to its default."""
    names = [field.name for field in dataclasses.fields(Dynamic) if field.name != "exact"]
    return Dynamic(**dict(zip(names, numbers, strict=True)), exact=exact)


POLICIES: dict[str, Policy] = {
    "Off": Off(),
    "Static": Static(init_scale=2.0**11),
    "Static, inexact": Static(init_scale=1000.1, exact=False),
    "Dynamic": dynamic(2.0**10, 4.0, 0.25, 3, 2, 2.0**-8, 2.0**30),
    "Dynamic, tight bounds": dynamic(8.0, 8.0, 0.125, 2, 3, 4.0, 16.0),
    "Dynamic, restless": dynamic(2.0**-3, 16.0, 2.0**-7, 1, 4, 2.0**-20, 2.0**40),
    "Dynamic, inexact": dynamic(1000.1, 1.7, 0.3, 2, 2, 0.07, 54321.9, exact=False),
    "Dynamic, at the bottom": dynamic(2.0**-124, 4.0, 0.25, 2, 3, BOTTOM, 2.0**-80),
    "Dynamic, at the top": dynamic(2.0**126, 4.0, 0.25, 2, 2, 2.0**90, TOP),
    "Dynamic, inexact at the top": dynamic(3e38, 1.7, 0.3, 2, 2, 1e30, 3.4e38, exact=False),
}


# The engines.


def eager(xp: Any, flag: Callable[[bool], Any]) -> Walk:
    """A walk one step at a time; `flag` makes what the policy is told of a Python bool."""

    def walk(policy: Policy, history: History) -> list[State]:
        state, states = policy.init(xp), []
        for stats in history:
            told = GradStats(*(flag(v) if isinstance(v, bool) else v for v in stats))
            state = policy.update(state, told, xp)
            states.append(state)
        return states

    return walk


@functools.cache
def compiled(policy: Policy, **options: Any) -> Callable[[State, GradStats], State]:
    """The step of a policy, compiled. State and stats cross the border as pytrees."""
    return jax.jit(functools.partial(policy.update, xp=jnp), **options)


def jitted(policy: Policy, history: History, **options: Any) -> list[State]:
    """A walk of compiled steps."""
    step = compiled(policy, **options)
    return list(itertools.accumulate(history, step, initial=policy.init(jnp)))[1:]


def scanned(policy: Policy, history: History) -> list[State]:
    """A walk inside one lax.scan."""

    def step(state: State, stats: GradStats) -> tuple[State, State]:
        state = compiled(policy)(state, stats)
        return state, state

    columns = {name: jnp.array([getattr(stats, name) for stats in history]) for name in FLAGS}
    _, stacked = jax.lax.scan(step, policy.init(jnp), GradStats(**columns))
    return [type(stacked)(*values) for values in zip(*map(np.asarray, stacked), strict=True)]


@contextmanager
def strict_jax(x64: bool = False) -> Iterator[None]:
    """No promotion in JAX; with `x64` also the 64-bit types that it does without otherwise."""
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(x64):
        yield


@contextmanager
def torch_default(dtype: torch.dtype) -> Iterator[None]:
    """A default dtype that torch falls back on wherever ours is not said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def keras_floatx(dtype: str) -> Iterator[None]:
    """The same for Keras, with JAX strict below it."""
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        with strict_jax():
            yield
    finally:
        keras.config.set_floatx(before)


class Engine(NamedTuple):
    """How a framework walks through a history, and under which circumstances."""

    walk: Walk
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    steps: int = 60


FLAGS = ("finite", "loss_finite", "fits")
to_keras = keras.ops.convert_to_tensor
x64 = functools.partial(strict_jax, x64=True)
ENGINES: dict[str, Engine] = {
    "numpy": Engine(eager(np, np.asarray)),
    "numpy, plain flags": Engine(eager(np, bool)),
    "torch": Engine(eager(torch, torch.tensor)),
    "torch, plain flags": Engine(eager(torch, bool)),
    "torch, float64": Engine(
        eager(torch, torch.tensor), functools.partial(torch_default, torch.float64)
    ),
    "jax": Engine(eager(jnp, jnp.asarray), strict_jax),
    "jax, plain flags": Engine(eager(jnp, bool), strict_jax),
    "jax, x64": Engine(eager(jnp, jnp.asarray), x64),
    "jax.jit": Engine(jitted, strict_jax),
    "jax.jit, plain flags": Engine(
        functools.partial(jitted, static_argnums=1),
        strict_jax,
        steps=8,  # it compiles once for every combination of flags
    ),
    "jax.jit, x64": Engine(jitted, x64),
    "lax.scan": Engine(scanned, strict_jax),
    "lax.scan, x64": Engine(scanned, x64),
    "keras": Engine(eager(keras.ops, to_keras), strict_jax),
    "keras, plain flags": Engine(eager(keras.ops, bool), strict_jax),
    "keras, float16": Engine(
        eager(keras.ops, to_keras), functools.partial(keras_floatx, "float16")
    ),
}


# Conformance.


def random_history(seed: int, steps: int) -> History:
    """Random flags in phases, so that long runs of either kind and every mixture occur."""
    # The first step changes nothing: what comes back is what init() gave.
    rng, history = random.Random(seed), [GradStats(finite=True, loss_finite=False)]
    while len(history) < steps:
        chance = rng.choice((0.1, 0.5, 0.95))
        for _ in range(rng.randint(1, 12)):
            history.append(
                GradStats(
                    finite=rng.random() < chance,
                    loss_finite=rng.random() < 0.85,
                    fits=rng.random() < 0.7,
                )
            )
    return history[:steps]


HISTORIES = [random_history(seed, steps=Engine._field_defaults["steps"]) for seed in range(2)]
plain = eager(scalars, bool)


def differences(expected: list[State], walked: list[State]) -> list[str]:
    """Where a walk leaves the plain one, in value, or float32 and int32, in type."""
    found = []
    if len(expected) != len(walked):
        found.append(f"{len(walked)} steps instead of {len(expected)}")
    for i, (want, got) in enumerate(zip(expected, walked, strict=False)):
        if type(want) is not type(got):
            found.append(f"step {i}: {type(got).__name__} instead of {type(want).__name__}")
            continue
        for name, a, b in zip(want._fields, want, got, strict=True):
            kind = "float32" if isinstance(a, float) else "int32"
            if str(b.dtype).removeprefix("torch.") != kind or b.shape != ():
                found.append(f"step {i}: {name} has type {b.dtype} and shape {tuple(b.shape)}")
            if a != b.item():
                found.append(f"step {i}: {name} is {b.item()} instead of {a}")
    return found


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_engine_walks_as_plain_python_does(engine: Engine, policy: Policy) -> None:
    for history in (each[: engine.steps] for each in HISTORIES):
        with engine.context():
            walked = engine.walk(policy, history)
            assert differences(plain(policy, history), walked) == []


def test_conformance_covers_every_policy_and_no_default_value() -> None:
    assert {type(policy) for policy in POLICIES.values()} == set(rules.POLICIES.values())
    for policy in POLICIES.values():
        for field in dataclasses.fields(policy):
            assert field.name == "exact" or getattr(policy, field.name) != field.default


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("Dynamic")])
def test_histories_move_the_scale_both_ways(name: str) -> None:
    policy = POLICIES[name]
    for history in HISTORIES:
        scales = [policy.init_scale, *(state.scale for state in plain(policy, history))]
        moves = {math.copysign(1, b - a) for a, b in itertools.pairwise(scales) if a != b}
        assert moves == {-1, 1}


def test_keras_runs_on_jax() -> None:
    # With the torch or numpy backend keras.ops would prove nothing that is not proved already.
    assert keras.backend.backend() == "jax"


# Planted faults: Dynamic, wrong in one way each.

step = Dynamic.update


def fault(name: str, update: Callable[..., DynamicState]) -> type[Dynamic]:
    """Dynamic with another update(policy, state, stats, xp)."""

    def told(self: Dynamic, state: Any, stats: GradStats, xp: Any = scalars) -> DynamicState:
        return update(self, state, stats, xp)

    return type(name, (Dynamic,), {"update": told})


def late(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    return step(replace(p, growth_interval=p.growth_interval + 1), s, g, xp)


def equals(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    beyond = g.finite and g.loss_finite and s.good_steps >= p.growth_interval
    return DynamicState(s.scale, s.good_steps + 1, 0) if beyond else step(p, s, g, xp)


def grudging(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved = step(p, s, g, xp)
    return moved._replace(bad_steps=xp.maximum(moved.bad_steps, s.bad_steps))


def forgiving(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved = step(p, s, g, xp)
    return moved._replace(bad_steps=0) if moved.bad_steps >= p.hysteresis else moved


def bottomless(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved, lower = step(p, s, g, xp), g.loss_finite and not g.finite
    return moved._replace(scale=s.scale * p.backoff_factor) if lower else moved


def soaring(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved, grow = step(p, s, g, xp), g.loss_finite and g.finite
    return moved._replace(scale=s.scale * p.growth_factor) if grow else moved


def remembering(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    p.__dict__["calls"] = p.__dict__.get("calls", 0) + 1
    return step(p, s, g, xp)._replace(good_steps=p.__dict__["calls"])


def in_place(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    moved = step(p, s, g, xp)
    s.scale[...] = moved.scale
    return moved


def reading(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
    return step(p, s, g, xp) if s.scale > 0 else s


def spoiled(field: str, spoil: Callable[[Any], Any]) -> Callable[..., DynamicState]:
    """An update that spoils one field of its result."""

    def update(p: Dynamic, s: DynamicState, g: GradStats, xp: Any) -> DynamicState:
        moved = step(p, s, g, xp)
        return moved._replace(**{field: np.asarray(spoil(getattr(moved, field)))})

    return update


Late = fault("Late", late)  # as Flax does
Eager = fault("Eager", lambda p, s, g, xp: step(replace(p, growth_interval=1), s, g, xp))
Equals = fault("Equals", equals)  # counts by ==, as torch does
Impatient = fault("Impatient", lambda p, s, g, xp: step(replace(p, hysteresis=1), s, g, xp))
Grudging = fault("Grudging", grudging)  # a finite step forgives nothing, as in Megatron
Forgiving = fault("Forgiving", forgiving)  # counts anew after it lowered the scale
Backward = fault("Backward", lambda p, s, g, xp: step(p, s, g._replace(finite=not g.finite), xp))
Blaming = fault(
    "Blaming", lambda p, s, g, xp: step(p, s, GradStats(finite=g.finite & g.loss_finite), xp)
)
Fitting = fault("Fitting", lambda p, s, g, xp: step(p, s, g._replace(finite=g.finite & g.fits), xp))
Bottomless = fault("Bottomless", bottomless)
Soaring = fault("Soaring", soaring)
Remembering = fault("Remembering", remembering)
InPlace = fault("InPlace", in_place)
Reading = fault("Reading", reading)  # brings a value back to the host
Wide = fault("Wide", spoiled("scale", np.float64))
Long = fault("Long", spoiled("bad_steps", np.int64))
Shaped = fault("Shaped", spoiled("scale", np.atleast_1d))
Sloppy = fault("Sloppy", spoiled("scale", lambda v: np.nextafter(v, np.float32(0))))


def as_fault(policy: Policy, wrong: type[Policy]) -> Policy:
    """The same settings under another rule."""
    return wrong(**{f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)})


@pytest.mark.parametrize(
    "wrong", [Late, Eager, Impatient, Grudging, Blaming, Fitting, Wide, Long, Shaped, Sloppy]
)
@pytest.mark.parametrize("name", ["Dynamic", "Dynamic, inexact"])
def test_conformance_finds_a_planted_fault(name: str, wrong: type[Dynamic]) -> None:
    policy, history = POLICIES[name], HISTORIES[0]
    walk, expected = ENGINES["numpy"].walk, plain(policy, history)
    assert differences(expected, walk(policy, history)) == []
    assert differences(expected, walk(as_fault(policy, wrong), history))


def test_conformance_finds_a_walk_that_stops_early_or_gives_another_state() -> None:
    history = HISTORIES[0]
    walked = ENGINES["numpy"].walk(Static(init_scale=8.0), history)
    assert differences(plain(Static(init_scale=8.0), history), walked[:-1])
    assert differences(plain(Dynamic(init_scale=8.0), history), walked)


# The oracle: torch's own kernel.


def torch_differences(policy: Dynamic, xp: Any, steps: int) -> list[str]:
    """Where `policy` leaves torch's rule on random steps that keep the scale within its bounds."""
    rng, chance = random.Random(0), 0.95
    scale, tracker = torch.full((), policy.init_scale), torch.zeros((), dtype=torch.int32)
    state, seen = policy.init(xp), [policy.init_scale]
    factors = policy.growth_factor, policy.backoff_factor, policy.growth_interval
    for i in range(steps):
        # To and fro between two scales, so that neither bound is met.
        chance = 0.3 if seen[-1] > 2.0**60 else 0.95 if seen[-1] < 2.0**-60 else chance
        finite = rng.random() < chance
        torch._amp_update_scale_(scale, tracker, torch.tensor(0.0 if finite else 1.0), *factors)
        state = policy.update(state, GradStats(finite=finite), xp)
        if (state.scale, state.good_steps) != (scale.item(), tracker.item()):
            return [f"step {i}: {state} instead of {scale.item()}, {tracker.item()}"]
        seen.append(scale.item())
    # Otherwise the bounds would have had a say, or little would have been compared.
    assert policy.min_scale < min(seen) < 2.0**-60
    assert 2.0**60 < max(seen) < policy.max_scale
    return []


def torch_like(up: float, down: float, interval: int, rule: type[Dynamic] = Dynamic) -> Dynamic:
    """A Dynamic that has torch's settings only: bounds out of reach, no patience."""
    return rule(
        init_scale=2.0**16,
        growth_factor=up,
        backoff_factor=down,
        growth_interval=interval,
        min_scale=BOTTOM,
        max_scale=TOP,
    )


@pytest.mark.parametrize(("up", "down", "interval"), [(2.0, 0.5, 2), (4.0, 0.5, 3), (8.0, 0.25, 3)])
def test_plain_python_equals_torchs_kernel(up: float, down: float, interval: int) -> None:
    assert torch_differences(torch_like(up, down, interval), scalars, steps=20_000) == []


def test_torch_arrays_equal_torchs_kernel() -> None:
    assert torch_differences(torch_like(2.0, 0.5, 2), torch, steps=20_000) == []


@pytest.mark.parametrize("wrong", [Late, Eager, Backward])
def test_oracle_finds_a_planted_fault(wrong: type[Dynamic]) -> None:
    assert torch_differences(torch_like(2.0, 0.5, 2, wrong), scalars, steps=1000)


# The laws. Each test below is a promise about any Dynamic; FAULTS names one that breaks it.


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


@pytest.mark.parametrize(
    "xp", [scalars, np, torch, jnp, keras.ops], ids=["plain", "numpy", "torch", "jax", "keras"]
)
def test_counter_at_the_end_of_int32_still_moves_the_scale(xp: Any) -> None:
    # A checkpoint may hold it: states.read takes every counter up to 2**31 - 1.
    policy = dynamic(8.0, 4.0, 0.25, 3, 2, 0.5, 64.0)
    first = policy.init(xp)
    full = xp.full_like(first.good_steps, INT32_MAX)
    state = DynamicState(first.scale, full, full)
    assert policy.update(state, GOOD, xp).scale == 32.0
    bad = policy.update(state, BAD, xp)
    assert bad.scale == 2.0
    assert bad.bad_steps > 0


# What update() does to its arguments, and where init() puts its arrays.


def changes(policy: Policy, xp: Any, copy_of: Callable[[Any], Any]) -> list[str]:
    """What `update` wrote into the state or the stats that it was given."""
    found, state = [], policy.init(xp)
    for stats in HISTORIES[0]:
        told = GradStats(*(copy_of(v) if isinstance(v, bool) else v for v in stats))
        before = type(state)(*(copy_of(value) for value in state))
        moved = policy.update(state, told, xp)
        found += [
            f"{n}: {a} to {b}"
            for n, a, b in zip(state._fields, before, state, strict=True)
            if a != b
        ]
        found += [f"{n} of stats" for n in FLAGS if getattr(told, n) != getattr(stats, n)]
        state = moved
    return found


@pytest.mark.parametrize(
    ("xp", "copy_of"), [(np, np.array), (torch, torch.clone)], ids=["numpy", "torch"]
)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_update_writes_into_nothing_it_is_given(
    policy: Policy, xp: Any, copy_of: Callable[[Any], Any]
) -> None:
    assert changes(policy, xp, lambda v: copy_of(xp.asarray(v))) == []


def test_write_into_the_state_is_found() -> None:
    policy = as_fault(POLICIES["Dynamic"], InPlace)
    assert changes(policy, np, np.array)
    assert changes(policy, torch, lambda v: torch.clone(torch.asarray(v)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool])
def test_torch_state_lies_where_like_does_and_stays_there(dtype: torch.dtype) -> None:
    like = torch.ones((), dtype=dtype, device="meta")
    for policy in POLICIES.values():
        state = policy.init(torch, like=like)
        for each in (state, policy.update(state, GOOD, torch)):
            assert {value.device.type for value in each} == {"meta"}
            assert each[0].dtype == torch.float32
            assert {value.dtype for value in each[1:]} <= {torch.int32}


def test_update_reads_no_value_back_to_the_host() -> None:
    # A meta tensor has no value, so a rule that asks for one raises.
    like = torch.empty((), device="meta")
    flag = torch.empty((), dtype=torch.bool, device="meta")
    stats = GradStats(finite=flag, loss_finite=flag, fits=flag)
    policy = POLICIES["Dynamic"]
    assert policy.update(policy.init(torch, like=like), stats, torch).scale.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        as_fault(policy, Reading).update(policy.init(torch, like=like), stats, torch)


@pytest.mark.parametrize("like", [3, 3.0, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_plain_state_is_the_same_whatever_like_is(policy: Policy, like: Any) -> None:
    state = policy.init(like=like)
    assert state == policy.init()
    assert [type(value) for value in state] == [float, int, int][: len(state)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("xp", [np, jnp, keras.ops], ids=["numpy", "jax", "keras"])
def test_state_takes_nothing_but_the_device_of_like(xp: Any, dtype: str) -> None:
    for policy in POLICIES.values():
        state = policy.init(xp, like=xp.ones((), dtype=dtype))
        assert differences([policy.init()], [state]) == []


TWO_DEVICES = """
import jax, jax.numpy as jnp, keras
from gradscale.policy import Dynamic, GradStats

policy, (first, second) = Dynamic(init_scale=8.0, growth_interval=3), jax.devices()
for xp in (jnp, keras.ops):
    for device in (first, second):
        state = policy.init(xp, like=jax.device_put(jnp.float16(3), device))
        for each in (state, policy.update(state, GradStats(finite=True), xp)):
            assert [v.devices() for v in each] == [{device}] * 3, each
            assert [v.dtype for v in each] == ["float32", "int32", "int32"], each
print("both devices")
"""


def test_jax_state_lies_where_like_does_and_stays_there() -> None:
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-c", TWO_DEVICES]
    env = {**os.environ, **two, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "both devices\n", done.stderr


# Settings.

NAN, INF = math.nan, math.inf
NO_NUMBER = ["2", b"2", None, [2.0], {}, 2j, object(), np.ones(2), torch.ones(2)]
NO_SCALE = [NAN, INF, -INF, 0, 0.0, -0.0, -1, -8.0, True, False, 10**400, -(10**400), *NO_NUMBER]
NO_COUNT = [*NO_SCALE, 1.0, 2.5, 2**31]
TOO_FAR = [2.0**128, FLOAT32.max * (1 + 2**-24), BOTTOM / 2, 5e-324]
WRONG: dict[str, list[Any]] = {
    "init_scale": [*NO_SCALE, *TOO_FAR],
    "min_scale": [*NO_SCALE, *TOO_FAR],
    "max_scale": [*NO_SCALE, *TOO_FAR],
    "growth_factor": [*NO_SCALE, 1, 1.0, 0.5, 1 + 2**-25, 2.0**128],
    # Below float32's normal numbers engines disagree: JAX takes 2**-149 for zero, numpy does not.
    "backoff_factor": [*NO_SCALE, 1, 1.0, 2.0, 1 - 2**-26, 2.0**-150, 2.0**-149, BOTTOM / 2],
    "growth_interval": NO_COUNT,
    "hysteresis": NO_COUNT,
    "exact": [NAN, INF, -INF, 0, 1, -1, *NO_NUMBER],
}
SETTINGS: dict[type[Policy], dict[str, Any]] = {Static: {"init_scale": 8.0}, Dynamic: {}}


def complaint(rule: type[Policy], **given: Any) -> str:
    """What the SettingError says that these settings raise; "" if they raise none."""
    try:
        rule(**given)
    except SettingError as error:
        return str(error)
    return ""


def objection(rule: type[Policy], name: str, value: Any, exact: bool = True) -> str:
    """What is wrong with the way in which `value` is refused; "" if nothing is."""
    shown = [repr(value)]
    if isinstance(value, (int, float)) and abs(value) < 2**1000:
        shown.append(str(float(value)))
    try:
        said = complaint(rule, **{**SETTINGS[rule], "exact": exact, name: value})
    except Exception as error:
        return f"{shown[0]:.40} raises {error!r}"
    named = said.startswith(f"{name} must ") and any(f"got {form}." in said for form in shown)
    return "" if named else f"{shown[0]:.40} is not refused by name and value: {said!r}"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize(
    ("rule", "name"),
    [(rule, field.name) for rule in SETTINGS for field in dataclasses.fields(rule)],
)
def test_wrong_setting_is_refused_by_name_and_value(
    rule: type[Policy], name: str, exact: bool
) -> None:
    found = [objection(rule, name, value, exact) for value in WRONG[name]]
    assert [each for each in found if each] == []


def test_wrong_values_are_known_for_every_setting() -> None:
    assert {field.name for rule in SETTINGS for field in dataclasses.fields(rule)} == set(WRONG)


def test_refusal_that_names_nothing_is_found() -> None:
    assert objection(Dynamic, "growth_factor", 4.0)  # accepted
    assert objection(Dynamic, "max_scale", 2.0)  # refused in the name of init_scale
    assert objection(Dynamic, "init_scale", 0) == ""


def test_right_settings_are_not_complained_about() -> None:
    for rule, given_settings in SETTINGS.items():
        assert complaint(rule, **given_settings) == ""


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("init_scale", 3.0),
        ("init_scale", 4 + 2**-20),
        ("growth_factor", 3.0),
        ("backoff_factor", 0.3),
        ("min_scale", 3.0),
        ("max_scale", 5.0),
    ],
)
def test_exact_refuses_what_is_no_power_of_two_and_says_the_way_out(
    name: str, number: float
) -> None:
    room = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 8.0, name: number}
    for exact in ({}, {"exact": True}):
        said = complaint(Dynamic, **room, **exact)
        assert said.startswith(f"{name} must be a power of two")
        assert f"got {number}." in said
        assert "exact=False" in said
    assert getattr(Dynamic(**room, exact=False), name) == number


def test_exact_holds_for_a_static_scale_too() -> None:
    assert "exact=False" in complaint(Static, init_scale=1000.0)
    assert Static(init_scale=1000.0, exact=False).init_scale == 1000.0


@pytest.mark.parametrize(
    ("start", "low", "high"),
    [
        (2.0**16, MIN_SCALE, MAX_SCALE),
        (2.0**100, MIN_SCALE, 2.0**100),
        (TOP, MIN_SCALE, TOP),
        (2.0**-20, 2.0**-20, MAX_SCALE),
        (BOTTOM, BOTTOM, MAX_SCALE),
    ],
)
def test_default_bound_gives_way_to_the_init_scale(start: float, low: float, high: float) -> None:
    policy = Dynamic(init_scale=start)
    assert (policy.min_scale, policy.init_scale, policy.max_scale) == (low, start, high)


def test_default_bounds_are_those_of_the_design() -> None:
    assert (Dynamic().min_scale, Dynamic().max_scale) == (2.0**-14, 2.0**64)


@pytest.mark.parametrize(
    "given_settings",
    [
        {"init_scale": 2.0**5, "min_scale": 2.0**6},
        {"init_scale": 2.0**7, "max_scale": 2.0**6},
        {"init_scale": 2.0**-20, "min_scale": 2.0**-14},  # the default's value, but given
        {"init_scale": 2.0**70, "max_scale": 2.0**64},
        {"min_scale": 2.0**17},
        {"max_scale": 2.0**15},
        {"init_scale": 2.0**4, "min_scale": 2.0**5, "max_scale": 2.0**3},
    ],
    ids=str,
)
def test_given_bound_that_excludes_the_init_scale_is_an_error(
    given_settings: dict[str, float],
) -> None:
    said = complaint(Dynamic, **given_settings)
    assert said.startswith("init_scale must lie within")
    assert all(
        f"{name} {value}" in said for name, value in given_settings.items() if "m" == name[0]
    )
    assert f"got {given_settings.get('init_scale', 2.0**16)}." in said


def test_given_bounds_may_lie_beyond_the_default_ones() -> None:
    low = Dynamic(init_scale=2.0**-30, max_scale=2.0**-20)
    assert (low.min_scale, low.max_scale) == (2.0**-30, 2.0**-20)
    high = Dynamic(init_scale=2.0**80, min_scale=2.0**70)
    assert (high.min_scale, high.max_scale) == (2.0**70, 2.0**80)


COPIES: dict[str, Callable[[Any], Any]] = {
    "replace": replace,
    "pickle": lambda policy: pickle.loads(pickle.dumps(policy)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "asdict": lambda policy: type(policy)(**dataclasses.asdict(policy)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_settings_survive_a_copy(policy: Policy, copied: Callable[[Any], Any]) -> None:
    twin = copied(policy)
    assert type(twin) is type(policy)
    for field in dataclasses.fields(policy):
        assert getattr(twin, field.name) == getattr(policy, field.name)
    assert plain(twin, HISTORIES[0]) == plain(policy, HISTORIES[0])


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_remembers_which_bounds_were_given(copied: Callable[[Any], Any]) -> None:
    chosen = copied(Dynamic())
    for start in (2.0**70, 2.0**80, 2.0**-20, 2.0**-30):  # what gave way once does so again
        chosen = copied(replace(chosen, init_scale=start))
        assert chosen.min_scale <= start <= chosen.max_scale
    assert (chosen.min_scale, chosen.max_scale) == (2.0**-30, 2.0**80)
    for told, beyond in ({"max_scale": 2.0**64}, 2.0**70), ({"min_scale": 2.0**-14}, 2.0**-20):
        with pytest.raises(SettingError, match="init_scale must lie within"):
            replace(copied(Dynamic(**told)), init_scale=beyond)


def test_replace_changes_one_setting_and_checks_it() -> None:
    policy = POLICIES["Dynamic"]
    changed = replace(policy, hysteresis=7)
    assert replace(changed, hysteresis=policy.hysteresis) == policy != changed
    with pytest.raises(SettingError, match="hysteresis must"):
        replace(policy, hysteresis=0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policy_is_frozen_hashable_and_keyword_only(policy: Policy) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.exact = False  # type: ignore[misc,union-attr]
    assert {policy: 1}[copy.deepcopy(policy)] == 1
    with pytest.raises(TypeError, match="positional"):
        type(policy)(2.0)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.asarray, torch.tensor, int])
def test_settings_are_plain_numbers_whatever_they_were_given_as(
    kind: Callable[[float], Any],
) -> None:
    numbers = {"init_scale": 32.0, "growth_factor": 4.0, "max_scale": 64.0}
    policy = Dynamic(**{name: kind(value) for name, value in numbers.items()})
    for name, value in numbers.items():
        assert type(getattr(policy, name)) is float
        assert getattr(policy, name) == value


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.asarray, torch.tensor])
def test_counts_are_plain_numbers_whatever_they_were_given_as(kind: Callable[[int], Any]) -> None:
    policy = Dynamic(growth_interval=kind(7), hysteresis=kind(3))
    assert (type(policy.growth_interval), policy.growth_interval) == (int, 7)
    assert (type(policy.hysteresis), policy.hysteresis) == (int, 3)
