"""Flax' DynamicScale: its documented behaviour, and the defects that are mended."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import gradscale
from gradscale.compat import flax as ours
from gradscale.compat.flax import DynamicScale, DynamicScaleResult
from scale_walks import Walk

HALF, FULL = jnp.float16, jnp.float32


def planted(x: Any, limit: Any) -> Any:
    """A loss of 1 whose scaled gradient is infinite from the scale `limit` on."""

    @jax.custom_vjp
    def passed(x: Any, limit: Any) -> Any:
        return x

    def backward(limit: Any, seed: Any) -> Any:
        return jnp.where(seed >= limit, jnp.inf, seed), jnp.zeros_like(limit)

    passed.defvjp(lambda x, limit: (x, limit), backward)
    return passed(x, limit)


@jax.jit
def loop(start: Any, history: Any) -> Any:
    """What each step gave: scale, counter, flag, loss and gradient."""

    def step(carried: Any, finite: Any) -> Any:
        limit = jnp.where(finite, jnp.inf, 0.0)
        moved, found, loss, grad = carried.value_and_grad(planted)(jnp.float32(1), limit)
        return moved, (moved.scale, moved.fin_steps, found, loss, grad)

    return jax.lax.scan(step, start, history)[1]


def scanned(start: Any, history: list[bool]) -> list[tuple[float, int]]:
    """Scale and counter after each step, in one compiled loop."""
    scales, counters, found, losses, grads = loop(start, jnp.asarray(history))
    assert found.tolist() == history
    assert set(losses.tolist()) == {1.0}
    assert set(grads[found].tolist()) <= {1.0}
    return list(zip(scales.tolist(), counters.tolist(), strict=True))


def test_all_public_names_are_there() -> None:
    assert ours.__all__ == ["DynamicScale", "DynamicScaleResult"]
    assert DynamicScaleResult._fields == ("dynamic_scale", "finite", "aux", "grad")
    defaults = DynamicScale()
    assert (defaults.growth_factor, defaults.backoff_factor) == (2.0, 0.5)
    assert (defaults.growth_interval, defaults.fin_steps, defaults.scale) == (2000, 0, 65536.0)
    assert defaults.minimum_scale == float(np.finfo(np.float32).tiny)


def test_example_of_the_class_runs() -> None:
    def loss_fn(p: Any) -> Any:
        return jnp.asarray(p, HALF) ** 2

    p = jnp.array(1.0, FULL)
    dyn_scale = DynamicScale(growth_interval=10)
    compute_grad = jax.jit(lambda ds, p: ds.value_and_grad(loss_fn)(p))
    losses = []
    for _ in range(100):
        dyn_scale, is_fin, loss, grad = compute_grad(dyn_scale, p)
        p -= jnp.where(is_fin, 0.01 * grad, 0.0)
        losses.append(float(loss))
    assert losses[-1] < 0.1
    assert loss.dtype == grad.dtype == FULL
    # A seed of 2**16 is infinite in float16, so that the scale settles below.
    assert float(dyn_scale.scale) <= 2.0**15


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=40), st.sampled_from([(1, 3), (3, -6)]))
def test_trajectory_is_that_of_the_documented_rule(
    history: list[bool], chosen: tuple[int, int]
) -> None:
    interval, floor = chosen
    history += [True] * (40 - len(history))  # one shape, so that a few compilations do
    start = DynamicScale(growth_interval=interval, scale=2.0**6, minimum_scale=2.0**floor)
    walk = Walk(2.0**6, interval, floor=2.0**floor)
    assert scanned(start, history) == walk.over(history)
    # The comparison can fail.
    assert scanned(start, [True] * 40) != walk._replace(interval=interval + 1).over([True] * 40)


def test_trajectory_is_that_of_flax_with_an_interval_less_by_one() -> None:
    theirs = pytest.importorskip("flax.training.dynamic_scale")
    history = [bool(bit) for bit in np.random.default_rng(0).integers(0, 12, 300)]
    start = {"scale": jnp.float32(2**10), "fin_steps": jnp.int32(0), "minimum_scale": 4.0}
    flax = scanned(theirs.DynamicScale(growth_interval=3, **start), history)
    assert scanned(DynamicScale(growth_interval=4, **start), history) == flax
    assert scanned(DynamicScale(growth_interval=3, **start), history) != flax


def test_loss_is_what_the_function_returned() -> None:
    dynamic_scale = DynamicScale(scale=2.0**100)
    found = dynamic_scale.value_and_grad(lambda x: x + 1e10)(jnp.float32(1))
    assert float(found.aux) == float(jnp.float32(1e10))  # inf in Flax, whose scaled loss overflows
    assert float(found.grad) == 1.0
    assert bool(found.finite)
    half = dynamic_scale.replace(scale=2.0**6).value_and_grad(lambda x: x * HALF(300))(HALF(2))
    assert (float(half.aux), half.aux.dtype, float(half.grad)) == (600.0, FULL, 300.0)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_loss_that_is_not_finite_leaves_the_scale(value: float) -> None:
    start = DynamicScale(fin_steps=3)
    found = start.value_and_grad(lambda x: x * value)(jnp.float32(1))
    assert not found.finite
    assert found.dynamic_scale == start  # lowered in Flax, though no scale can cure it
    lowered = start.value_and_grad(planted)(jnp.float32(1), jnp.float32(0)).dynamic_scale
    assert (float(lowered.scale), int(lowered.fin_steps)) == (2.0**15, 0)


def test_gradient_that_overflows_by_unscaling_does_not_lower_the_scale() -> None:
    start = DynamicScale(scale=2.0**-4)
    found = start.value_and_grad(lambda x: x * 2.0**126)(jnp.float32(1))
    assert found.finite
    assert found.grad == 2.0**126
    # The loss is finite, and the scaled gradient: only the unscaled gradient is not.
    found = start.value_and_grad(lambda x: jnp.sum(x[0] * 2.0**126 * x[1]))(
        jnp.asarray([[1e-20], [2.0]], FULL)
    )
    assert found.finite
    steep = start.value_and_grad(lambda x: jnp.tanh(x * 2.0**127) * 4.0)(jnp.float32(0))
    assert not steep.finite
    assert float(steep.dynamic_scale.scale) == 2.0**-4  # 2**-5 in Flax, where it only gets worse


def test_floor_that_is_none_is_the_smallest_normal_number() -> None:
    for floor in (None, 0.0, 1e-40):
        dynamic_scale = DynamicScale(scale=2.0**-125, minimum_scale=floor)
        for _ in range(3):
            found = dynamic_scale.value_and_grad(planted)(jnp.float32(1), jnp.float32(0))
            dynamic_scale = found.dynamic_scale
        assert float(dynamic_scale.scale) == 2.0**-126


def test_counter_beyond_the_interval_grows_at_the_next_step() -> None:
    restored = DynamicScale(growth_interval=4, fin_steps=9, scale=8.0)
    assert scanned(restored, [True, True]) == [(16.0, 0), (16.0, 1)]  # never in Flax


def test_arguments_of_value_and_grad() -> None:
    def loss_fn(x: Any, y: Any, *, power: int = 1) -> Any:
        return jnp.sum(x * y["y"] ** power), {"seen": power}

    x, y = jnp.asarray([1.0, 2.0]), {"y": jnp.asarray([3.0, 4.0], HALF)}
    grad_fn = DynamicScale(scale=8.0).value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
    _, finite, (loss, aux), (dx, dy) = grad_fn(x, y, power=2)
    assert (bool(finite), float(loss), aux) == (True, 41.0, {"seen": 2})
    assert dx.tolist() == [9.0, 16.0]
    assert dy["y"].tolist() == [6.0, 16.0]
    assert dy["y"].dtype == FULL
    plain = DynamicScale(scale=8.0).value_and_grad(lambda x: jnp.sum(x**2), 0)(x)
    assert plain.grad.tolist() == [2.0, 4.0]


def test_imaginary_parts_are_kept() -> None:
    point = jnp.asarray(1 + 2j)
    grad = DynamicScale().value_and_grad(lambda z: jnp.abs(z) ** 2)(point).grad
    np.testing.assert_allclose(grad, 2 - 4j, rtol=4 * 2.0**-23)  # 2 in Flax


def test_step_is_traced_once() -> None:
    traced = []

    @jax.jit
    def step(dynamic_scale: Any) -> Any:
        traced.append(dynamic_scale)
        return dynamic_scale.value_and_grad(lambda x: x**2)(jnp.float32(1)).dynamic_scale

    dynamic_scale = DynamicScale(growth_interval=2)
    for _ in range(4):
        dynamic_scale = step(dynamic_scale)
    assert len(traced) == 1  # 2 in Flax, whose Python numbers are weakly typed


def with_own_settings() -> DynamicScale:
    """A scale none of whose fields has its default."""
    return DynamicScale(4.0, 0.25, 7, jnp.int32(3), jnp.float32(64), 0.125)


@pytest.mark.parametrize(
    "passed",
    [
        lambda it: jax.tree_util.tree_map(lambda leaf: leaf, it),
        jax.jit(lambda it: it),
        lambda it: pickle.loads(pickle.dumps(it)),
        lambda it: it.replace(),
    ],
    ids=["tree_map", "jit", "pickle", "replace"],
)
def test_every_setting_survives(passed: Any) -> None:
    start = with_own_settings()
    assert passed(start) == start


def test_leaves_have_the_names_that_flax_gives_them() -> None:
    theirs = pytest.importorskip("flax.training.dynamic_scale")
    found = [
        jax.tree_util.tree_leaves_with_path(made()) for made in (DynamicScale, theirs.DynamicScale)
    ]
    assert found[0] == found[1]


def test_checkpoints_of_flax_go_both_ways() -> None:
    serialization = pytest.importorskip("flax.serialization")
    theirs = pytest.importorskip("flax.training.dynamic_scale")
    flax = theirs.DynamicScale(fin_steps=jnp.int32(5), scale=jnp.float32(2**12))
    read = serialization.from_bytes(with_own_settings(), serialization.to_bytes(flax))
    assert (int(read.fin_steps), float(read.scale), read.growth_interval) == (5, 2.0**12, 7)
    back = serialization.from_bytes(theirs.DynamicScale(), serialization.to_bytes(read))
    assert (int(back.fin_steps), float(back.scale)) == (5, 2.0**12)
    for wrong in ({"scale": 1.0}, {"scale": 1.0, "fin_steps": 0, "more": 1}):
        with pytest.raises(gradscale.StateError, match="must have fin_steps and scale, got"):
            serialization.from_state_dict(DynamicScale(), wrong)


def test_orbax_restores_into_a_new_object(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    saved = DynamicScale(fin_steps=jnp.int32(5), scale=jnp.float32(2**12))
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scale", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "scale", DynamicScale())
    assert (int(restored.fin_steps), float(restored.scale)) == (5, 2.0**12)


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16, FULL, jnp.complex64])
def test_any_type_may_be_scaled_without_promotion_in_jax(dtype: Any) -> None:
    def loss_fn(x: Any) -> Any:
        return jnp.sum((x * x.conj()).real) * jnp.asarray(0.5, x.real.dtype)

    x = jnp.full((3,), 0.5, dtype)
    with jax.numpy_dtype_promotion("strict"):
        _, finite, loss, grad = DynamicScale(scale=8.0).value_and_grad(loss_fn)(x)
    assert (bool(finite), float(loss), grad.tolist()) == (True, 0.375, [0.5] * 3)


def test_train_state_with_a_scale_learns_in_float16() -> None:
    linen = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    from flax.training import train_state

    class TrainState(train_state.TrainState):  # as in Flax' ImageNet example
        dynamic_scale: DynamicScale

    model = linen.Dense(1, dtype=HALF)
    inputs = jax.random.normal(jax.random.key(0), (32, 3))
    targets = inputs @ jnp.asarray([[1.0], [-2.0], [0.5]])
    params = model.init(jax.random.key(1), inputs)["params"]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(0.1), dynamic_scale=DynamicScale()
    )

    @jax.jit
    def train_step(state: Any, inputs: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((state.apply_fn({"params": params}, inputs) - targets) ** 2)

        grad_fn = state.dynamic_scale.value_and_grad(loss_fn)
        dynamic_scale, finite, loss, grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads)
        chosen = functools.partial(jnp.where, finite)
        new = new.replace(
            opt_state=jax.tree_util.tree_map(chosen, new.opt_state, state.opt_state),
            params=jax.tree_util.tree_map(chosen, new.params, state.params),
            dynamic_scale=dynamic_scale,
        )
        return new, loss

    for _ in range(100):
        state, loss = train_step(state, inputs)
    assert float(loss) < 0.01
    before = jax.device_get((state.params, state.opt_state))
    state, _ = train_step(state, inputs * jnp.inf)
    jax.tree_util.tree_map(
        np.testing.assert_array_equal, before, jax.device_get((state.params, state.opt_state))
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"growth_factor": 1.0}, "growth_factor must be > 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be > 0 and < 1"),
        ({"growth_interval": 0}, "growth_interval must be a whole number from 1"),
        ({"scale": 0.0}, "scale must be finite, > 0"),
        ({"scale": jnp.float32(jnp.inf)}, "scale must be finite, > 0"),
        ({"minimum_scale": -1.0}, "minimum_scale must be >= 0"),
        ({"scale": None}, "scale must be a number"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(gradscale.SettingError, match=message):
        DynamicScale(**settings)
