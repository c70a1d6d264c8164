"""`scaled`: steps as the optimizer does, leaves no trace when it skips, composes with optax."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradscale as gs
from gradscale.jax import ScaledState, outcome_of, scale_of, scaled
from gradscale.policy import GradStats, LogMax
from jax_trees import same
from policy_cases import HISTORIES, POLICIES, differences, plain

POLICY = gs.Dynamic(init_scale=2.0**8, growth_interval=2)


def params() -> dict[str, Any]:
    return {"w": jnp.array([[1.0, -2.0], [3.0, -0.0]]), "b": jnp.array([0.5, -0.0])}


def grads(scale: float, bad: float | None = None) -> dict[str, Any]:
    """Gradients of a loss that was multiplied by `scale`."""
    found = {"w": jnp.full((2, 2), 0.25 * scale), "b": jnp.array([-0.5, 1.0]) * scale}
    return found if bad is None else {**found, "b": found["b"].at[1].set(bad)}


def step_of(optimizer: Any) -> Any:
    """A compiled step: parameters, state, gradients and loss to parameters and state."""

    @jax.jit
    def step(p: Any, state: Any, g: Any, value: Any) -> Any:
        updates, state = optimizer.update(g, state, p, value=value)
        return optax.apply_updates(p, updates), state

    return step


OPTIMIZERS = {
    "adamw": optax.adamw(0.1),
    "sgd": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 4)),
    "chain": optax.chain(optax.clip(0.4), optax.trace(0.9), optax.scale(-0.1)),
    "hyperparams": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 4)),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "multi_transform": optax.multi_transform(
        {"fast": optax.adam(0.1), "slow": optax.sgd(0.01)}, {"w": "fast", "b": "slow"}
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_applied_steps_are_those_of_the_optimizer_and_skipped_ones_leave_no_trace(
    inner: Any,
) -> None:
    outer = scaled(inner, POLICY)
    step, alone = step_of(outer), step_of(optax.with_extra_args_support(inner))
    p = q = params()
    state, other = outer.init(p), inner.init(p)
    for bad in (None, math.nan, None, math.inf, -math.inf, None):
        scale = float(scale_of(state))
        before, kept = p, state
        p, state = step(p, state, grads(scale, bad), jnp.float32(1))
        if bad is None:
            q, other = alone(q, other, grads(1.0), jnp.float32(1))
            assert same(p, q)
        else:
            assert same(before, p)
            assert same(kept.inner_state, state.inner_state)
            assert float(scale_of(state)) == scale / 2
        assert same(state.inner_state, other)
        assert bool(outcome_of(state).applied) is (bad is None)
    assert int(state.counts.steps) == 6


def test_skipped_step_changes_no_sign_of_a_zero() -> None:
    optimizer = scaled(optax.sgd(0.1), POLICY)
    signs = [complex(0.0, -0.0), complex(-0.0, 0.0), complex(-0.0, -0.0)]
    p = {"w": jnp.array([0.0, -0.0]), "z": jnp.array(signs)}
    bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), p)
    updates, _ = optimizer.update(bad, optimizer.init(p), p)
    assert same(optax.apply_updates(p, updates), p)
    p = {"w": p["w"]}
    assert not same(optax.apply_updates(p, {"w": jnp.zeros(2)}), p)  # what zeros would do


# Composition: scaled inside of other transformations.

INSIDE = {
    "chain": lambda t: optax.chain(optax.identity(), t),
    "hyperparams": lambda t: optax.inject_hyperparams(lambda rate: t)(rate=0.1),
    "masked": lambda t: optax.masked(t, {"w": True, "b": True}),
    "multi_transform": lambda t: optax.multi_transform({"all": t}, {"w": "all", "b": "all"}),
}


@pytest.mark.parametrize("around", INSIDE.values(), ids=INSIDE)
def test_scale_is_found_however_deep_it_is(around: Any) -> None:
    optimizer = around(scaled(optax.adam(0.1), POLICY))
    state, p = optimizer.init(params()), params()
    assert float(scale_of(state)) == 2.0**8
    step = step_of(optax.with_extra_args_support(optimizer))
    p, state = step(p, state, grads(2.0**8, math.inf), jnp.float32(1))
    assert same(p, params())
    assert float(scale_of(state)) == 2.0**7
    assert int(outcome_of(state).skipped_in_a_row) == 1
    p, state = step(p, state, grads(2.0**7), jnp.float32(1))
    assert not same(p, params())
    assert bool(outcome_of(state).applied)


def test_bad_gradients_are_left_out_of_a_sum() -> None:
    optimizer = scaled(optax.MultiSteps(optax.sgd(1.0), 2), POLICY)
    state, p = optimizer.init(params()), params()
    step, found = step_of(optimizer), []
    for bad in (None, math.inf, None, math.nan, None, None):
        p, state = step(p, state, grads(float(scale_of(state)), bad), jnp.float32(1))
        found.append((p["b"].tolist(), float(scale_of(state))))
    assert found == [
        ([0.5, -0.0], 256.0), ([0.5, -0.0], 128.0), ([1.0, -1.0], 128.0),
        ([1.0, -1.0], 64.0), ([1.0, -1.0], 64.0), ([1.5, -2.0], 128.0),
    ]  # fmt: skip


def test_sum_around_the_optimizer_is_refused_because_one_overflow_would_be_the_end() -> None:
    optimizer = optax.MultiSteps(scaled(optax.sgd(1.0), POLICY), 2)
    state, p = optimizer.init(params()), params()
    for use in (scale_of, outcome_of):
        with pytest.raises(gs.SettingError, match=r"MultiSteps must be inside scaled\(\)"):
            use(state)
    # If this is no longer so, it need not be refused.
    step = step_of(optimizer)
    for bad in (None, math.inf, None, None):
        p, state = step(p, state, grads(1.0, bad), jnp.float32(1))
    assert not bool(outcome_of(state.inner_opt_state).applied)
    assert jnp.isnan(state.acc_grads["b"]).tolist() == [False, True]


def test_state_without_a_scale_or_with_two_is_refused() -> None:
    with pytest.raises(gs.SettingError, match="one scale, got 0"):
        scale_of(optax.adam(0.1).init(params()))
    both = optax.multi_transform(
        {"a": scaled(optax.sgd(0.1), POLICY), "b": scaled(optax.sgd(0.1), POLICY)},
        {"w": "a", "b": "b"},
    )
    with pytest.raises(gs.SettingError, match=r"one scale, got 2.*Wrap the whole"):
        outcome_of(both.init(params()))


def test_what_is_no_state_of_the_optimizer_and_what_is_no_loss_are_refused() -> None:
    optimizer, p = scaled(optax.sgd(0.1), POLICY), params()
    with pytest.raises(gs.SettingError, match=r"state must be one .*tuple.*inner_state="):
        optimizer.update(grads(1.0), optax.sgd(0.1).init(p), p)
    for value, got in ((jnp.ones(3), r"\(3,\)"), ([1.0], "list")):
        with pytest.raises(gs.SettingError, match=f"value must be the loss, one .*, got.*{got}"):
            optimizer.update(grads(1.0), optimizer.init(p), p, value=value)


@pytest.mark.parametrize("other", [gs.Off(), gs.Headroom(), gs.LogMax(), gs.Histogram()])
def test_state_of_another_policy_is_refused(other: Any) -> None:
    state = scaled(optax.sgd(0.1), POLICY).init(params())
    with pytest.raises(gs.SettingError, match="policy must be the one of the optimizer"):
        scaled(optax.sgd(0.1), other).update(grads(1.0), state, params())


# The step itself.


def test_outcome_says_what_happened() -> None:
    optimizer = scaled(optax.sgd(0.1), POLICY)
    step, state = step_of(optimizer), optimizer.init(params())
    first = outcome_of(state)
    assert (bool(first.applied), float(first.scale)) == (False, 2.0**8)
    _, state = step(params(), state, grads(2.0**8), jnp.float32(1))
    found = outcome_of(state)
    assert [bool(each) for each in found[:4]] == [True] * 4
    assert float(found.amax) == 2.0**8
    assert float(found.grad_norm) == pytest.approx(math.sqrt(4 / 16 + 0.25 + 1), rel=1e-6)
    assert float(found.headroom) == pytest.approx(math.log2(65504.0 / 2.0**8), rel=1e-6)
    for count in (1, 2):
        _, state = step(params(), state, grads(1.0, math.nan), jnp.float32(1))
        found = outcome_of(state)
        assert [bool(each) for each in found[:4]] == [False, False, True, True]
        assert int(found.skipped_in_a_row) == count
        assert math.isnan(float(found.grad_norm))


def test_long_gradients_are_shortened_and_short_ones_are_not() -> None:
    g = {"a": jnp.array([3.0, 4.0]) * 8}
    for longest, factor in ((1.0, 0.2), (10.0, 1.0)):
        optimizer = scaled(optax.identity(), gs.Static(8.0), clip_norm=longest)
        updates, _ = jax.jit(optimizer.update)(g, optimizer.init(g), g)
        np.testing.assert_allclose(updates["a"], jnp.array([3.0, 4.0]) * factor, rtol=1e-6)
    zero = {"a": jnp.zeros(2)}
    updates, state = jax.jit(optimizer.update)(zero, optimizer.init(zero), zero)
    assert updates["a"].tolist() == [0.0, 0.0]
    assert bool(outcome_of(state).applied)


@pytest.mark.parametrize("longest", [0.01, 10.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("derivative", [jax.jacrev, jax.jacfwd])
def test_clipped_step_has_the_derivatives_of_optax(longest: float, derivative: Any) -> None:
    ours = scaled(optax.identity(), gs.Static(8.0), clip_norm=longest)
    theirs = optax.clip_by_global_norm(longest)
    g = {"a": jnp.array([[0.3, -0.4]]), "z": jnp.array(0.1 - 0.2j)}

    def moved(optimizer: Any, scale: float) -> Any:
        def loss(a: Any) -> Any:
            given = jax.tree.map(lambda leaf: leaf * scale, {**g, "a": a})
            updates, _ = optimizer.update(given, optimizer.init(g))
            return {"a": updates["a"], "z": updates["z"].real}

        return derivative(loss)(g["a"])

    found, wanted = (jax.tree.leaves(moved(*given)) for given in ((ours, 8.0), (theirs, 1.0)))
    for one, other in zip(found, wanted, strict=True):  # some 8 roundings to float32 in each
        np.testing.assert_allclose(one, other, rtol=16 * 2.0**-24, atol=longest * 16 * 2.0**-24)
    zero = jax.tree.map(jnp.zeros_like, g)
    total = lambda a: jnp.sum(ours.update({**zero, "a": a}, ours.init(g))[0]["a"])  # noqa: E731
    assert jax.grad(total)(zero["a"]).tolist() == [[0.125, 0.125]]


def test_skipped_step_is_no_error_under_debug_nans() -> None:
    seen: list[float] = []
    see = lambda record: seen.append(float(record.outcome.grad_norm))  # noqa: E731
    optimizer = scaled(optax.adam(0.1), POLICY, clip_norm=1.0, on_step=see)
    with jax.debug_nans(True):
        state = jax.jit(optimizer.init)(params())
        assert math.isnan(float(outcome_of(state).grad_norm))
        for bad in (None, math.inf, math.nan, None):
            with jax.debug_nans(False):
                given = grads(1.0, bad)
            _, state = jax.jit(optimizer.update)(given, state, params())
            found = outcome_of(state)
            assert bool(found.applied) is not math.isnan(float(found.grad_norm))
            assert math.isnan(float(found.amax)) is (bad is math.nan)
            assert math.isnan(float(found.headroom)) is (bad is math.nan)
        eager = optimizer.update(grads(1.0), state, params())[1]  # one operation after the other
    jax.effects_barrier()
    assert [math.isnan(norm) for norm in seen] == [False, True, True, False, False]
    assert same(eager.outcome.amax, outcome_of(state).amax)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_clipping_is_as_exact_where_types_are_kept(dtype: Any) -> None:
    g = {"a": jnp.full((4096,), 60000.0, dtype)}  # the factor is subnormal in float16
    optimizer = scaled(optax.identity(), gs.Static(1.0), clip_norm=1.0, keep_dtype=True)
    updates, _ = jax.jit(optimizer.update)(g, optimizer.init(g), g)
    assert updates["a"].dtype == dtype
    assert updates["a"].tolist() == [2.0**-6] * 4096


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf, "1", True])
def test_wrong_clip_norm_is_refused(clip_norm: Any) -> None:
    with pytest.raises(gs.SettingError, match="clip_norm must be"):
        scaled(optax.sgd(0.1), POLICY, clip_norm)


def test_policy_may_be_named() -> None:
    optimizer = scaled(optax.sgd(0.1), "headroom")
    assert float(scale_of(optimizer.init(params()))) == gs.Headroom().init_scale
    with pytest.raises(gs.SettingError, match="policy must be"):
        scaled(optax.sgd(0.1), "heady")


@pytest.mark.parametrize("bad", [math.nan, None], ids=["bad gradients", "good gradients"])
def test_loss_that_is_not_finite_skips_and_moves_nothing_until_patience_ends(
    bad: float | None,
) -> None:
    optimizer = scaled(optax.sgd(0.1, momentum=0.9), POLICY)
    step, p = step_of(optimizer), params()
    state = start = optimizer.init(p)
    scales = []
    for _ in range(48):
        p, state = step(p, state, grads(1.0, bad), jnp.float32(jnp.nan))
        scales.append(float(scale_of(state)))
    assert same((p, state.inner_state), (params(), start.inner_state))
    assert not bool(outcome_of(state).loss_finite)
    # The 40th and the 48th count as overflows: perhaps the scale has made the loss infinite.
    assert scales == [2.0**8] * 39 + [2.0**7] * 8 + [2.0**6]
    _, state = step(p, state, grads(2.0**6), jnp.float32(1))
    assert int(state.counts.bad_losses) == 0


def test_gradients_reach_the_optimizer_in_float32_unless_they_are_kept() -> None:
    seen = []

    def spy(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(updates["a"].dtype)
        return updates, state

    inner = optax.GradientTransformation(lambda p: optax.EmptyState(), spy)
    g = {"a": jnp.ones(3, jnp.float16)}
    for keep in (False, True):
        optimizer = scaled(inner, POLICY, keep_dtype=keep)
        optimizer.update(g, optimizer.init(g), g)
    assert seen == [jnp.float32, jnp.float16]


def test_extra_arguments_reach_the_optimizer() -> None:
    optimizer = scaled(optax.polyak_sgd(), POLICY)  # which needs the loss
    p = params()
    updates, _ = optimizer.update(grads(2.0**8), optimizer.init(p), p, value=jnp.float32(2))
    wanted, _ = optax.polyak_sgd().update(
        grads(1.0), optax.polyak_sgd().init(p), p, value=jnp.float32(2)
    )
    assert same(updates, wanted)


def test_ensemble_has_a_scale_for_every_member() -> None:
    optimizer = scaled(optax.adam(0.1), POLICY)
    p = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params())
    state = jax.vmap(optimizer.init)(p)
    g = [grads(2.0**8), grads(2.0**8, math.nan), grads(2.0**8)]
    g = jax.tree.map(lambda *leaves: jnp.stack(leaves), *g)
    updates, state = jax.jit(jax.vmap(optimizer.update))(g, state, p)
    assert scale_of(state).tolist() == [2.0**8, 2.0**7, 2.0**8]
    assert outcome_of(state).applied.tolist() == [True, False, True]
    assert jnp.any(updates["w"] != 0, axis=(1, 2)).tolist() == [True, False, True]


# Conformance: the gradients of a history move the scale as plain Python does.


def gradients_of(stats: GradStats) -> tuple[Any, Any]:
    """Gradients and a loss of which the engine finds `stats`."""
    amax = stats.amax if stats.finite else math.inf
    g = {"a": jnp.array([0.0, -amax], jnp.float32), "b": jnp.float32(amax / 2)}
    return g, jnp.float32(1.0 if stats.loss_finite else math.nan)


def told(history: list[GradStats]) -> list[GradStats]:
    """`history` without what the engine does not measure."""
    return [stats._replace(upper=None, fits=True) for stats in history]


# Every setting of a policy is walked in tests/policy, in jit and scan too.
WALKED = ("Static", "Dynamic", "Headroom, skipping spikes", "Histogram")


@pytest.mark.parametrize("name", WALKED)
def test_scale_moves_as_in_plain_python(name: str) -> None:
    policy, history = POLICIES[name], told(HISTORIES[0])
    optimizer = scaled(optax.sgd(0.1), policy)
    inputs = [gradients_of(stats) for stats in history]
    first = optimizer.init(inputs[0][0])

    def step(state: ScaledState, given: Any) -> Any:
        g, value = given
        _, state = optimizer.update(g, state, value=value)
        return state, state.policy_state(policy)

    _, stacked = jax.lax.scan(step, first, jax.tree.map(lambda *x: jnp.stack(x), *inputs))
    states = [type(stacked)(*each) for each in zip(*map(np.asarray, stacked), strict=True)]
    assert differences(plain(policy, history), states) == []
    wrong = [stats._replace(finite=not stats.finite) for stats in history]
    assert name[0] in "OS" or differences(plain(policy, wrong), states)


def test_logmax_is_exempt_and_near() -> None:
    # Its state holds logarithms, which frameworks round differently.
    assert isinstance(POLICIES["LogMax"], LogMax)
    test_scale_moves_as_in_plain_python("LogMax")
