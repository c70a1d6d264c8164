"""jmp's names: its documented behaviour, and the defects that are mended."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import gradscale
import gradscale.compat.jmp as jmp
from scale_walks import Walk

HALF, FULL = jnp.float16, jnp.float32
GOOD, BAD = jnp.bool_(True), jnp.bool_(False)


@jax.jit
def loop(loss_scale: Any, history: Any) -> Any:
    """Scales and counters after each step."""

    def step(carried: Any, finite: Any) -> Any:
        moved = carried.adjust(finite)
        return moved, (moved.loss_scale, moved.counter)

    return jax.lax.scan(step, loss_scale, history)[1]


def scanned(loss_scale: Any, history: list[bool]) -> list[tuple[float, int]]:
    """Scale and counter after each step, in one compiled loop."""
    scales, counters = loop(loss_scale, jnp.asarray(history))
    return list(zip(scales.tolist(), counters.tolist(), strict=True))


def test_all_public_names_are_there() -> None:
    names = "all_finite DynamicLossScale LossScale NoOpLossScale select_tree StaticLossScale"
    names += " cast_to_full cast_to_half get_policy half_dtype Policy"
    assert sorted(jmp.__all__) == sorted(names.split())
    assert all(hasattr(jmp, name) for name in jmp.__all__)


def loop_of_the_readme(loss_scale: Any, steps: int = 60) -> tuple[float, Any]:
    """The training step that jmp documents: the last loss, and the loss scale."""
    inputs = jnp.linspace(-1.0, 1.0, 16, dtype=HALF)
    targets = 2 * inputs

    def loss_fn(weight: Any, loss_scale: Any) -> Any:
        error = (inputs * weight.astype(HALF) - targets).astype(FULL)
        # As small as gradients of large models are: unscaled, they are 0 in float16.
        return loss_scale.scale(jnp.mean(error**2) * 1e-7)

    @jax.jit
    def train_step(weight: Any, loss_scale: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(weight, loss_scale)
        grads = loss_scale.unscale(grads)
        if isinstance(loss_scale, jmp.DynamicLossScale):
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            weight = jmp.select_tree(finite, weight - 1e7 * grads, weight)
        else:
            weight = weight - 1e7 * grads
        return weight, loss_scale, loss

    weight = jnp.float32(0)
    for _ in range(steps):
        weight, loss_scale, _ = train_step(weight, loss_scale)
    return float(abs(weight - 2)), loss_scale


@pytest.mark.parametrize(
    "loss_scale",
    [
        jmp.StaticLossScale(2**15),
        jmp.DynamicLossScale(jmp.half_dtype()(2**15)),  # a TypeError in jmp
        jmp.DynamicLossScale(jnp.asarray(2.0**15)),
    ],
    ids=["static", "dynamic, float16", "dynamic, float32"],
)
def test_loop_of_the_readme_learns(loss_scale: Any) -> None:
    distance, end = loop_of_the_readme(loss_scale)
    assert distance < 0.01
    assert type(end) is type(loss_scale)
    assert loop_of_the_readme(jmp.NoOpLossScale())[0] > 1.9


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=40), st.sampled_from([(1, 3), (3, -6)]))
def test_trajectory_is_that_of_the_documented_rule(
    history: list[bool], chosen: tuple[int, int]
) -> None:
    period, floor = chosen
    history += [True] * (40 - len(history))  # one shape, so that a few compilations do
    start = jmp.DynamicLossScale(jnp.float32(2.0**6), period=period, min_loss_scale=2.0**floor)
    walk = Walk(2.0**6, period, floor=2.0**floor)
    assert scanned(start, history) == walk.over(history)
    # The comparison can fail: Flax' rule grows a step later.
    assert scanned(start, [True] * 40) != walk._replace(interval=period + 1).over([True] * 40)


def test_trajectory_is_that_of_our_policy() -> None:
    history = [bool(bit) for bit in np.random.default_rng(0).integers(0, 8, 300)]
    policy = gradscale.Dynamic(init_scale=2.0**10, growth_interval=4, min_scale=1.0)
    state, walked = policy.init(), []
    for finite in history:
        state = policy.update(state, gradscale.GradStats(finite))
        walked.append((state.scale, state.good_steps))
    assert scanned(jmp.DynamicLossScale(jnp.float32(2.0**10), period=4), history) == walked


def with_own_settings() -> Any:
    """A loss scale none of whose fields has its default."""
    return jmp.DynamicLossScale(
        jnp.float32(64), jnp.int32(3), period=7, factor=4, min_loss_scale=jnp.float32(0.125)
    )


@pytest.mark.parametrize(
    "passed",
    [
        lambda it: jax.tree_util.tree_map(lambda leaf: leaf, it),
        jax.jit(lambda it: it),
        lambda it: jax.lax.scan(lambda carried, _: (carried, None), it, None, 2)[0],
        lambda it: pickle.loads(pickle.dumps(it)),
        dataclasses.replace,
        lambda it: it.adjust(GOOD).tree_unflatten(*reversed(it.tree_flatten())),
    ],
    ids=["tree_map", "jit", "scan", "pickle", "replace", "unflatten"],
)
def test_every_setting_survives(passed: Any) -> None:
    start = with_own_settings()
    assert passed(start) == start
    assert float(passed(start).min_loss_scale) == 0.125  # 1 in jmp


def test_floor_that_is_computed_in_jit_survives_too() -> None:
    made = jax.jit(lambda low: jmp.DynamicLossScale(jnp.float32(1), min_loss_scale=low * 0.5))(1.0)
    lowered = jax.jit(lambda it: it.adjust(BAD).adjust(BAD))(made)
    assert float(lowered.loss_scale) == float(lowered.min_loss_scale) == 0.5


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_float16_scale_stays_in_its_format_and_range(wrap: Any) -> None:
    step = wrap(lambda it, finite: it.adjust(finite))
    loss_scale = jmp.DynamicLossScale(HALF(2**14), period=1, min_loss_scale=0.0)
    for expected in (2.0**15, 2.0**15):  # 2**16 is infinite in float16
        loss_scale = step(loss_scale, GOOD)
        assert (float(loss_scale.loss_scale), loss_scale.loss_scale.dtype) == (expected, HALF)
    for _ in range(40):
        loss_scale = step(loss_scale, BAD)
    assert float(loss_scale.loss_scale) == 2.0**-14


def test_factor_that_is_no_power_of_two() -> None:
    loss_scale = jmp.DynamicLossScale(jnp.float32(3e38), period=1, factor=3)
    assert float(loss_scale.adjust(GOOD).loss_scale) == float(jnp.float32(3e38))
    lowered = float(loss_scale.adjust(BAD).loss_scale)
    # One rounding of the factor, one of the product.
    assert abs(lowered / 1e38 - 1) <= 2 * 2.0**-24


def test_counter_beyond_the_period_grows_at_the_next_step() -> None:
    restored = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(9), period=4)
    moved = restored.adjust(GOOD)
    assert (float(moved.loss_scale), int(moved.counter)) == (16.0, 0)


def test_step_is_traced_once() -> None:
    traced = []

    @jax.jit
    def step(loss_scale: Any) -> Any:
        traced.append(loss_scale)
        return loss_scale.adjust(GOOD)

    loss_scale: Any = jmp.DynamicLossScale(2.0**15, period=2)
    for _ in range(4):
        loss_scale = step(loss_scale)
    assert len(traced) == 1  # 2 in jmp, whose Python numbers are weakly typed


def test_ensemble_has_a_scale_for_each_member() -> None:
    starts = jax.vmap(jmp.DynamicLossScale)(jnp.asarray([2.0, 8.0]))
    moved = jax.vmap(lambda it, finite: it.adjust(finite))(starts, jnp.asarray([True, False]))
    assert moved.loss_scale.tolist() == [2.0, 4.0]
    assert moved.counter.tolist() == [1, 0]


def test_unscaling_undoes_scaling_in_float16() -> None:
    for loss_scale in (jmp.DynamicLossScale(HALF(40000)), jmp.StaticLossScale(HALF(40000))):
        tree = {"a": HALF(1), "b": [HALF(-0.5)]}
        back = loss_scale.unscale(loss_scale.scale(tree))
        assert back == tree  # 0.999 in jmp: 1 / 40000 is subnormal in float16
        assert back["a"].dtype == HALF


def test_static_scale_is_a_constant_of_a_compiled_function() -> None:
    scale = jax.jit(lambda it, x: it.scale(x))
    for number in (2**15, jnp.float32(2**15), np.float32(2**15)):
        loss_scale = jmp.StaticLossScale(number)
        assert jax.tree_util.tree_leaves(loss_scale) == []
        assert {loss_scale: 1}[jmp.StaticLossScale(number)] == 1
        assert float(scale(loss_scale, jnp.float32(2))) == 2.0**16
        assert loss_scale.adjust(BAD) is loss_scale


def test_no_op_does_nothing() -> None:
    loss_scale, tree = jmp.NoOpLossScale(), {"a": jnp.ones(2)}
    assert loss_scale.scale(tree) is tree
    assert loss_scale.unscale(tree) is tree
    assert loss_scale.adjust(BAD) is loss_scale
    assert loss_scale.loss_scale == 1
    assert isinstance(loss_scale, jmp.LossScale)
    assert jax.jit(lambda it: it)(loss_scale) == loss_scale


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 64, 1000])
def test_all_finite_finds_one_element(bad: float, size: int) -> None:
    values = np.ones(size, np.float32)
    assert jmp.all_finite({"a": values, "b": None})
    values[-1] = bad
    assert not jmp.all_finite([np.ones(2), {"a": values}])
    assert jmp.all_finite(None)


def test_select_tree() -> None:
    a, b = {"a": jnp.ones(2), "b": jnp.zeros([])}, {"a": jnp.zeros(2), "b": jnp.ones([])}
    for chosen, wanted in ((GOOD, a), (BAD, b), (True, a), (np.bool_(False), b)):
        jax.tree_util.tree_map(np.testing.assert_array_equal, jmp.select_tree(chosen, a, b), wanted)
    assert jmp.select_tree(GOOD, None, None) is None
    for wrong in (jnp.ones([1], bool), jnp.float32(1)):
        with pytest.raises(AssertionError, match="pred: expected boolean scalar, got"):
            jmp.select_tree(wrong, a, b)
        with pytest.raises(gradscale.SettingError, match="grads_finite: expected boolean scalar"):
            with_own_settings().adjust(wrong)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: jmp.DynamicLossScale(0.0), "loss_scale must be finite, > 0"),
        (lambda: jmp.DynamicLossScale(jnp.float32(jnp.nan)), "loss_scale must be finite"),
        (lambda: jmp.DynamicLossScale(1.0, period=0), "period must be a whole number from 1"),
        (lambda: jmp.DynamicLossScale(1.0, period=2.5), "period must be a whole number, got 2.5"),
        (lambda: jmp.DynamicLossScale(1.0, factor=1), "factor must be > 1 and < .*, got 1"),
        (lambda: jmp.DynamicLossScale(1.0, min_loss_scale=-1.0), "min_loss_scale must be >= 0"),
        (lambda: jmp.StaticLossScale(0).scale(jnp.ones(1)), "loss_scale must be finite, > 0"),
        (lambda: jmp.StaticLossScale(jnp.inf).unscale(jnp.ones(1)), "loss_scale must be finite"),
        (lambda: jmp.get_policy("c=f17"), "Unknown dtype 'f17'.*half, full, f32"),
        (lambda: jmp.get_policy("x=f16"), "Unknown key 'x' in 'x=f16'"),
        (lambda: jmp.get_policy("c=f16,"), "Unknown key ''"),
    ],
)
def test_wrong_settings_are_named(made: Any, message: str) -> None:
    with pytest.raises(gradscale.SettingError, match=message):
        made()


@pytest.mark.parametrize("name", ["loss_scale", "min_loss_scale"])
def test_integer_scale_is_warned_of_and_taken(name: str) -> None:
    with pytest.warns(UserWarning, match=f"Expected floating type for {name}, got int32") as seen:
        made = jmp.DynamicLossScale(**{"loss_scale": 1.0, name: jnp.int32(4)})
    assert seen[0].filename == __file__
    assert getattr(made, name).dtype == FULL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.DynamicLossScale(2.0**15)


@pytest.mark.parametrize(
    ("name", "formats", "short"),
    [
        ("half", (HALF, HALF, HALF), "p=f16,c=f16,o=f16"),
        ("float32", (FULL, FULL, FULL), "p=full,c=full,o=full"),
        ("c=f16", (FULL, HALF, HALF), "p=full,c=f16,o=f16"),
        ("p=f16,c=bf16", (HALF, jnp.bfloat16, jnp.bfloat16), "p=f16,c=bf16,o=bf16"),
        ("params=f32, compute=f16, output=full", (FULL, HALF, FULL), "p=full,c=f16,o=full"),
        ("o=f64", (FULL, FULL, jnp.float64), "p=full,c=full,o=f64"),
    ],
)
def test_policy_by_name(name: str, formats: Any, short: str) -> None:
    policy = jmp.get_policy(name)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == formats
    assert str(policy) == short
    assert str(jmp.get_policy(short)) == short
    by_dtype = jmp.Policy(*(jnp.dtype(dtype) for dtype in formats))
    assert str(by_dtype) == short  # a KeyError in jmp
    assert str(policy.with_output_dtype(HALF)).endswith("o=f16")


def test_casts_leave_what_is_not_floating() -> None:
    marker = object()
    tree = {"x": jnp.ones(2), "n": np.ones(2, np.float32), "s": np.float32(1), "o": marker}
    tree |= {"i": jnp.ones(2, jnp.int16), "none": None}
    policy = jmp.get_policy("p=full,c=f16,o=bf16")
    for cast, dtype in (
        (jmp.cast_to_half, HALF),
        (policy.cast_to_compute, HALF),
        (policy.cast_to_output, jnp.bfloat16),
    ):
        found = cast(tree)
        assert [found[name].dtype for name in "xns"] == [dtype] * 3  # "s" is not cast by jmp
        assert found["o"] is marker
        assert found["i"].dtype == jnp.int16
        assert jmp.cast_to_full(found)["x"].dtype == FULL
        assert policy.cast_to_param(found)["n"].dtype == FULL
