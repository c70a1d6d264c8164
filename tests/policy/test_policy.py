"""Every rule in every framework, step by step as in plain Python; and against torch's own kernel.

Adding an engine is one line in ENGINES, adding a policy one in support/policy_cases.py. Each helper
that compares is also run on a planted fault, to show that it can fail. The laws of the rules are in
test_policy_laws.py, what they do with arrays in test_policy_arrays.py, and their settings in
test_policy_settings.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch

from gradscale import policy as rules
from gradscale.policy import Dynamic, GradStats, Policy, State, Static, scalars
from policy_cases import (
    BOTTOM,
    FLAGS,
    HISTORIES,
    NUMBERS,
    POLICIES,
    STEPS,
    TOP,
    History,
    Walk,
    differences,
    eager,
    plain,
)
from policy_faults import (
    Backward,
    Blaming,
    Eager,
    Fitting,
    Grudging,
    Impatient,
    Late,
    Long,
    Shaped,
    Sloppy,
    Wide,
    as_fault,
)

# The jax of Python 3.10 has it under its older name alone.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

# The engines.


@functools.cache
def compiled(policy: Policy, **options: Any) -> Callable[[State, GradStats], State]:
    """The step of a policy, compiled. State and stats cross the border as pytrees."""
    return jax.jit(functools.partial(policy.update, xp=jnp), **options)


def jitted(policy: Policy, history: History, **options: Any) -> list[State]:
    """A walk of compiled steps."""
    step = compiled(policy, **options)
    return list(itertools.accumulate(history, step, initial=policy.init(jnp)))[1:]


@functools.cache
def scan(policy: Policy) -> Callable[[State, GradStats], State]:
    """The states of a walk inside one lax.scan, compiled once for all histories of a length."""

    def step(state: State, stats: GradStats) -> tuple[State, State]:
        state = compiled(policy)(state, stats)
        return state, state

    return jax.jit(lambda first, history: jax.lax.scan(step, first, history)[1])


def scanned(policy: Policy, history: History) -> list[State]:
    """A walk inside one lax.scan."""
    columns = {name: jnp.array([getattr(stats, name) for stats in history]) for name in FLAGS}
    for name, kind in NUMBERS.items():
        values = [getattr(stats, name) for stats in history]
        columns[name] = None if values[0] is None else jnp.array(values, dtype=kind)
    stacked = scan(policy)(policy.init(jnp), GradStats(**columns))
    return [type(stacked)(*values) for values in zip(*map(np.asarray, stacked), strict=True)]


@contextmanager
def strict_jax(x64: bool = False) -> Iterator[None]:
    """No promotion in JAX; with `x64` also the 64-bit types that it does without otherwise."""
    with jax.numpy_dtype_promotion("strict"), enable_x64(x64):
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
    steps: int = STEPS
    histories: int = len(HISTORIES)


FEW = 20
"""Steps where the framework walks through all of them in another way: Keras runs on JAX."""
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
    "jax, plain flags": Engine(eager(jnp, bool), strict_jax, FEW),
    "jax, x64": Engine(eager(jnp, jnp.asarray), x64, FEW),
    "jax.jit": Engine(jitted, strict_jax),
    "jax.jit, plain flags": Engine(
        functools.partial(jitted, static_argnums=1),
        strict_jax,
        steps=4,  # it compiles each of them
        histories=1,
    ),
    "jax.jit, x64": Engine(jitted, x64),
    "lax.scan": Engine(scanned, strict_jax),
    "lax.scan, x64": Engine(scanned, x64),
    "keras": Engine(eager(keras.ops, to_keras), strict_jax, FEW),
    "keras, plain flags": Engine(eager(keras.ops, bool), strict_jax, FEW),
    "keras, float16": Engine(
        eager(keras.ops, to_keras), functools.partial(keras_floatx, "float16"), FEW
    ),
}


# Conformance.


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_engine_walks_as_plain_python_does(engine: Engine, policy: Policy) -> None:
    for history in (each[: engine.steps] for each in HISTORIES[: engine.histories]):
        with engine.context():
            walked = engine.walk(policy, history)
            assert differences(plain(policy, history), walked) == []


@pytest.mark.soak
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", [name for name, each in ENGINES.items() if each.steps < STEPS])
def test_engine_walks_further_as_plain_python_does(name: str, policy: Policy) -> None:
    walk, context, steps, _ = ENGINES[name]
    # Two compiled steps for one in make test, else all of them.
    more = Engine(walk, context, STEPS if steps >= FEW else 2 * steps)
    test_engine_walks_as_plain_python_does(more, policy)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_engine_walks_as_plain_python_does_where_upper_is_not_measured(engine: Engine) -> None:
    policy = POLICIES["Histogram"]
    history = [stats._replace(upper=None) for stats in HISTORIES[0][: engine.steps]]
    with engine.context():
        assert differences(plain(policy, history), engine.walk(policy, history)) == []


def test_conformance_covers_every_policy_and_no_default_value() -> None:
    assert {type(policy) for policy in POLICIES.values()} == set(rules.POLICIES.values())
    for policy in POLICIES.values():
        for field in dataclasses.fields(policy):
            chosen = getattr(policy, field.name) != field.default
            assert chosen or field.name in ("exact", "slow_growth_above", "spikes")
    assert any(isinstance(p, rules.Dynamic) and not p.is_plain for p in POLICIES.values())
    assert any(isinstance(p, rules.Headroom) and p.spikes == "skip" for p in POLICIES.values())


@pytest.mark.parametrize("name", [name for name in POLICIES if name[0] not in "OS"])
def test_histories_move_the_scale_both_ways(name: str) -> None:
    policy = POLICIES[name]
    for history in HISTORIES:
        scales = [policy.init_scale, *(state.scale for state in plain(policy, history))]
        moves = {math.copysign(1, b - a) for a, b in itertools.pairwise(scales) if a != b}
        assert moves == {-1, 1}


def test_keras_runs_on_jax() -> None:
    # With the torch or numpy backend keras.ops would prove nothing that is not proved already.
    assert keras.backend.backend() == "jax"


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
