"""Gradients of a scaled loss: the numbers of an unscaled one, and what is wrong is seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradscale as gs
from gradscale.jax import (
    applies,
    grad,
    init,
    measure,
    scaled_value_and_grad,
    select,
    unscale,
    update,
    value_and_grad,
)
from jax_trees import same

POLICY = gs.Dynamic(init_scale=2.0**10)
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """No promotion of types in JAX."""
    with jax.numpy_dtype_promotion("strict"):
        yield


def test_comparison_finds_a_sign_a_type_and_a_leaf() -> None:
    one = {"a": jnp.zeros(2), "b": jnp.ones(3)}
    assert same(one, dict(one))
    assert not same(one, {**one, "a": -jnp.zeros(2)})
    assert not same(one, {**one, "a": jnp.zeros(2, jnp.float16)})
    assert not same(one, {"a": one["a"]})


def params() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (8, 4)), "b": jax.random.normal(keys[1], (4,))}


X = jax.random.normal(jax.random.key(1), (16, 8))


def loss_fn(p: Any, x: Any = X) -> Any:
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


# The numbers.


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
def test_gradients_are_those_without_a_scale_to_the_bit(wrap: Callable[..., Any]) -> None:
    # A power of two changes no mantissa, and in float32 nothing is near either end.
    wanted = wrap(jax.value_and_grad(loss_fn))(params())
    found, stats = wrap(value_and_grad(loss_fn, POLICY))(init(POLICY), params())
    assert same(wanted, found)
    assert bool(applies(stats))
    biggest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(wanted[1]))
    assert float(stats.amax) == 2.0**10 * biggest


def test_aux_argnums_and_keywords_are_those_of_jax() -> None:
    def fun(a: Any, b: Any, *, c: Any) -> Any:
        return jnp.sum(a * b) * c, {"b": b}

    args = jnp.arange(1.0, 4.0), jnp.arange(2.0, 5.0)
    options = {"argnums": (0, 1), "has_aux": True}
    wanted = jax.value_and_grad(fun, **options)(*args, c=jnp.float32(2))
    found, _ = value_and_grad(fun, POLICY, **options)(init(POLICY), *args, c=jnp.float32(2))
    assert same(wanted, found)
    (grads, aux), _ = grad(fun, POLICY, 1, has_aux=True)(init(POLICY), *args, c=jnp.float32(2))
    assert same((wanted[1][1], wanted[0][1]), (grads, aux))


def test_gradients_of_float16_come_back_in_float32_or_are_kept() -> None:
    p = {"h": jnp.full((3,), 2.0**-8, jnp.float16), "f": jnp.ones((), jnp.float32)}

    def fun(p: Any) -> Any:
        return jnp.sum(p["h"].astype(jnp.float32)) * 2.0**-20 * p["f"]

    grads, stats = grad(fun, gs.Static(2.0**16))(init(gs.Static(2.0**16)), p)
    assert grads["h"].dtype == jnp.float32
    assert grads["h"].tolist() == [2.0**-20] * 3
    assert float(stats.amax) == 2.0**-4
    kept, _ = grad(fun, gs.Static(2.0**16), keep_dtype=True)(init(gs.Static(2.0**16)), p)
    assert kept["h"].dtype == jnp.float16
    lost = jax.grad(lambda p: fun(p) * 2.0**-6)(p)["h"]
    assert lost.tolist() == [0.0] * 3  # what a scale is for


def test_value_does_not_overflow_through_the_scale() -> None:
    policy = gs.Static(2.0**120)
    (value, _), stats = value_and_grad(lambda w: w * 2.0**20, policy)(init(policy), jnp.float32(1))
    assert float(value) == 2.0**20
    assert (bool(stats.finite), bool(stats.loss_finite)) == (False, True)


def test_float16_loss_overflows_at_its_seed_and_the_policy_cures_it() -> None:
    policy = gs.Dynamic(init_scale=2.0**17)
    state = init(policy)
    for finite in (False, False, True):
        (value, _), stats = value_and_grad(lambda w: w * w, policy)(state, jnp.float16(0.25))
        assert value.dtype == jnp.float16
        assert bool(stats.finite) is finite
        state = update(policy, state, stats)
    assert float(state.scale) == 2.0**15


@pytest.mark.parametrize("fun", [lambda w: w, lambda w: jnp.sum(w).astype(jnp.int32)])
def test_what_is_no_loss_is_refused(fun: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="must return a floating-point loss"):
        scaled_value_and_grad(fun)(8.0, jnp.ones(3))


@pytest.mark.parametrize("rest", [(), (1, 2)], ids=["alone", "two more"])
def test_aux_is_one_thing_or_refused(rest: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match="must return a pair of a loss and anything else"):
        scaled_value_and_grad(lambda w: (w, *rest), has_aux=True)(8.0, jnp.float32(1))
    with pytest.raises(TypeError, match="must return a pair"):
        scaled_value_and_grad(lambda w: jnp.stack([w, w]), has_aux=True)(8.0, jnp.float32(1))


@pytest.mark.parametrize(
    "policy", [gs.Static(2.0**127), gs.Headroom(max_scale=2.0**127)], ids=["static", "headroom"]
)
def test_scale_whose_reciprocal_xla_flushes_to_zero_is_refused(policy: Any) -> None:
    assert float(jax.jit(lambda scale: 1.0 / scale)(jnp.float32(2.0**127))) == 0.0
    with pytest.raises(gs.SettingError, match=r"at most 2\*\*126 in JAX"):
        init(policy)


def test_forgotten_state_or_scale_is_named() -> None:
    p, state = {"w": jnp.ones(2)}, init("dynamic")
    total = lambda p: jnp.sum(p["w"])  # noqa: E731
    with pytest.raises(gs.SettingError, match=r"state of the policy, such as init\(.*got.*dict"):
        value_and_grad(total, "dynamic")(p)
    with pytest.raises(gs.SettingError, match=r"state of the policy.*array of shape \(2,\)"):
        grad(jnp.sum, "dynamic")(p["w"])
    for wrong in (p, jnp.ones(2), state):
        with pytest.raises(gs.SettingError, match=r"the scale, such as scale_of\(opt_state\)"):
            scaled_value_and_grad(total)(wrong, p)
    _, stats = value_and_grad(total, "dynamic")(state, p)
    with pytest.raises(gs.SettingError, match="policy must be that of the DynamicState"):
        update("headroom", state, stats)


def test_gradient_of_a_gradient_is_that_without_a_scale() -> None:
    def penalty(differentiate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda p: loss_fn(p) + jnp.sum(jnp.square(differentiate(p)["w"]))

    inner = grad(loss_fn, POLICY)
    wanted = jax.grad(penalty(jax.grad(loss_fn)))(params())
    outside, _ = grad(penalty(jax.grad(loss_fn)), POLICY)(init(POLICY), params())
    inside = jax.grad(penalty(lambda p: inner(init(POLICY), p)[0]))(params())
    assert same(wanted, outside)
    assert same(wanted, inside)


def test_members_of_an_ensemble_have_scales_of_their_own() -> None:
    policy = gs.Dynamic(init_scale=8.0, growth_interval=1)
    states = jax.vmap(lambda _: init(policy))(jnp.arange(3))
    weights = jnp.array([1.0, jnp.inf, 2.0])

    @jax.jit
    @jax.vmap
    def step(state: Any, w: Any) -> Any:
        (_, grads), stats = value_and_grad(lambda w: w * w, policy)(state, w)
        # The loss of the second is infinite as well: that the gradient is must count here.
        state = update(policy, state, stats._replace(loss_finite=True))
        return state, select(applies(stats), w - 0.25 * grads, w)

    states, weights = step(states, weights)
    assert states.scale.tolist() == [16.0, 4.0, 16.0]
    assert weights.tolist() == [0.5, math.inf, 1.0]


def test_scan_walks_as_a_loop_does() -> None:
    policy = gs.Headroom(init_scale=4.0)

    def step(carry: Any, x: Any) -> Any:
        state, p = carry
        (loss, grads), stats = value_and_grad(loss_fn, policy)(state, p, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)
        return (update(policy, state, stats), select(applies(stats), new, p)), loss

    batches = jnp.stack([X, X * 2, X.at[0, 0].set(jnp.nan), X])
    carry: Any = (init(policy), params())
    scanned, losses = jax.lax.scan(step, carry, batches)
    compiled, single = jax.jit(step), []
    for x in batches:
        carry, loss = compiled(carry, x)
        single.append(loss)
    assert same(scanned[0], carry[0])
    assert np.isnan(losses.tolist()).tolist() == [False, False, True, False]
    np.testing.assert_allclose(losses, jnp.stack(single), rtol=1e-6)


# What is wrong is seen.


def leaves(dtype: Any) -> dict[str, Any]:
    """Arrays of several sizes: XLA compiles reductions of few elements in another way."""
    sizes = {"few": (2,), "some": (10, 10), "many": (5000,), "none": (0,)}
    return {name: jnp.full(shape, 0.5, dtype) for name, shape in sizes.items()}


compiled_measure = jax.jit(measure)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "complex64"])
def test_one_element_that_is_not_finite_is_found(dtype: str) -> None:
    good = leaves(jnp.dtype(dtype))
    stats = compiled_measure(good, 2.0)
    assert (bool(stats.finite), float(stats.amax)) == (True, 0.5)
    for name in ("few", "some", "many"):
        for bad in (math.inf, -math.inf, math.nan):
            wrong = np.array(good[name])
            wrong.flat[wrong.size // 2] = bad
            stats = compiled_measure({**good, name: jnp.asarray(wrong)}, 2.0)
            assert not bool(stats.finite), (name, bad)
            assert math.isnan(float(stats.amax)) == math.isnan(bad)


def test_maximum_alone_would_not_do() -> None:
    # XLA's maximum drops NaN in some programs. Where it does not, this finds a NaN all the same.
    array = jnp.full((5000,), 0.5).at[77].set(jnp.nan)
    assert not bool(compiled_measure({"a": array}, 2.0).finite)
    # And a sum of squares alone takes a large gradient for an infinite one: the norm is a bound.
    stats = compiled_measure({"a": jnp.full((4096,), 2.0**100)}, 1.0)
    assert (bool(stats.finite), float(stats.norm)) == (True, 2.0**106)


def test_float64_is_measured_as_it_is() -> None:
    with enable_x64(True):
        stats = measure({"a": jnp.array([1e300, 1.0])}, 8.0)
        assert bool(stats.finite)
        assert float(stats.amax) == float(np.finfo(np.float32).max)
        assert not bool(measure({"a": jnp.array([np.nan, 1.0])}, 8.0).finite)
        assert unscale(jnp.array([8e300]), 8.0).dtype == jnp.float64
        assert measure({"a": jnp.ones(3)}, 8.0).amax.dtype == jnp.float32


def test_norm_is_of_unscaled_gradients() -> None:
    grads = {"a": jnp.full((9,), 4.0, jnp.float16), "b": jnp.full((7,), -4.0)}
    assert float(measure(grads, 8.0).norm) == 2.0
    # The squares of the scaled ones would be infinite.
    assert float(measure({"a": jnp.full((4,), 2.0**100)}, 2.0**100).norm) == 2.0


@pytest.mark.parametrize("format", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**64])
def test_norm_does_not_vanish_in_any_format_or_scale(format: str, scale: float) -> None:
    policy = gs.Headroom(format=format)
    measured = jax.jit(lambda g: measure(g, scale, policy))
    assert float(measured({"a": jnp.full((4,), 0.5 * scale)}).norm) == 1.0
    largest = measured({"a": jnp.array([2.0**-70 * scale])})  # whose square is 0 in float32
    assert float(largest.norm) == 2.0**-70


def test_no_gradient_at_all_is_finite() -> None:
    stats = measure({"count": jnp.arange(3)}, 8.0, gs.Headroom())
    assert (bool(stats.finite), float(stats.amax), float(stats.norm)) == (True, 0.0, 0.0)
    assert same(unscale({"count": jnp.arange(3)}, 8.0), {"count": jnp.arange(3)})


def test_unscaled_gradient_that_does_not_fit_is_found_and_lowers_nothing() -> None:
    large = {"a": jnp.full((100,), 2.0**15, jnp.float16)}
    stats = measure(large, 0.25, keep_dtype=True)
    assert (bool(stats.finite), bool(stats.fits)) == (True, False)
    assert not bool(applies(stats))
    assert bool(measure(large, 0.25).fits)
    assert not bool(measure({"a": jnp.full((100,), 2.0**127)}, 0.25).fits)
    overflow = measure({"a": jnp.array([jnp.inf])}, 0.25)  # which says nothing of a low scale
    assert (bool(overflow.finite), bool(overflow.fits)) == (False, True)
    assert math.isfinite(float(measure({"a": jnp.full((4,), 3e38)}, 1.0).norm))
    state = init(gs.Headroom())
    assert same(
        update(gs.Headroom(), state, measure(large, 0.25, gs.Headroom(), keep_dtype=True)), state
    )


@pytest.mark.parametrize("policy", [gs.Dynamic(), gs.Headroom(), gs.LogMax(), gs.Histogram()])
def test_loss_that_is_not_finite_skips_and_leaves_the_state(policy: Any) -> None:
    state = init(policy)
    (_, _), stats = value_and_grad(lambda w: w / 0.0, policy)(state, jnp.float32(1))
    assert not bool(stats.loss_finite)
    assert not bool(applies(stats))
    assert same(update(policy, state, stats), state)


@pytest.mark.parametrize("number", [1.0, 0.75, 2.0**-20, 65504.0, 2.0**-126, 0.0])
def test_exponent_is_that_of_frexp(number: float) -> None:
    stats = measure({"a": jnp.array([number, 0.0])}, 1.0, gs.Headroom())
    assert int(stats.exponent) == math.frexp(number)[1]
    assert measure({"a": jnp.array([number])}, 1.0, gs.Dynamic()).exponent is None


def test_selection_takes_all_or_nothing_and_keeps_types() -> None:
    key = jax.random.key(3)
    old = {"a": jnp.zeros(2, jnp.float16), "n": jnp.int32(3), "f": math.sin, "none": None, "k": key}
    new = {
        "a": jnp.full(2, jnp.nan),
        "n": jnp.int32(4),
        "f": math.sin,
        "none": None,
        "k": jax.random.key(4),
    }
    kept, taken = select(jnp.bool_(False), new, old), select(True, new, old)
    assert (kept["a"].tolist(), int(kept["n"]), kept["f"]) == ([0.0, 0.0], 3, math.sin)
    assert (taken["a"].dtype, int(taken["n"])) == (jnp.float16, 4)
    assert bool(jnp.all(jax.random.key_data(kept["k"]) == jax.random.key_data(key)))
    with pytest.raises(ValueError, match=r"structure|arity|keys"):
        select(True, {"a": new["a"]}, old)
