"""mpx' names: its documented behaviour, and the defects that are mended."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("equinox")
pytest.importorskip("optax")

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import optax
from hypothesis import given, settings

import gradscale
from gradscale.compat import mpx
from scale_walks import Walk

HALF, FULL, BRAIN = jnp.float16, jnp.float32, jnp.bfloat16


@pytest.fixture(autouse=True)
def _float16() -> Iterator[None]:
    """Half precision is one setting for the process."""
    yield
    mpx.set_half_precision_datatype(HALF)


class Model(eqx.Module):
    """A line, with leaves that are no parameters."""

    weight: Any
    order: Any
    name: str
    nothing: None = None

    def __init__(self) -> None:
        self.weight, self.order, self.name = jnp.asarray([1.0, 2.0]), jnp.arange(2), "line"

    def __call__(self, inputs: Any) -> Any:
        return inputs @ self.weight[self.order]


def loss_fn(model: Any, inputs: Any, target: Any = 0.0) -> Any:
    """In half precision, as the model and the inputs are."""
    return jnp.mean((model(inputs) - target) ** 2)


def with_aux(model: Any, inputs: Any, target: Any = 0.0) -> Any:
    """The loss and more."""
    return loss_fn(model, inputs, target), {"dtype": model.weight.dtype.name}


INPUTS = jnp.asarray([[1.0, 0.5], [-0.5, 1.0]])


def scaling(scale: float = 2.0**10, **given: Any) -> Any:
    """A loss scaling as mpx' documentation makes them."""
    return mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(given.pop("floor", 1)), **given)


@eqx.filter_jit
def loop(start: Any, history: Any) -> Any:
    """Scales and counters after each step."""

    def step(carried: Any, finite: Any) -> Any:
        moved = carried.adjust(finite)
        return moved, (moved.loss_scaling, moved.counter)

    return jax.lax.scan(step, start, history)[1]


def scanned(start: Any, history: list[bool]) -> list[tuple[float, int]]:
    """Scale and counter after each step, in one compiled loop."""
    scales, counters = loop(start, jnp.asarray(history))
    return list(zip(scales.tolist(), counters.tolist(), strict=True))


def test_all_public_names_are_there() -> None:
    names = "cast_tree cast_to_float32 cast_to_float16 cast_to_bfloat16 cast_to_full_precision"
    names += " cast_to_half_precision force_full_precision cast_function half_precision_datatype"
    names += " set_half_precision_datatype DynamicLossScaling all_finite scaled select_tree"
    names += " filter_grad filter_value_and_grad optimizer_update calculate_scaled_grad"
    names += " FLOAT16_MAX BFLOAT16_MAX"
    assert sorted(mpx.__all__) == sorted(names.split())
    assert all(hasattr(mpx, name) for name in mpx.__all__)
    assert float(mpx.FLOAT16_MAX) == float(jnp.finfo(HALF).max)
    assert float(mpx.BFLOAT16_MAX) == float(jnp.finfo(BRAIN).max)
    assert hasattr(mpx, "HALF_PRECISION_DATATYPE")
    assert not hasattr(mpx, "HALF")


@settings(max_examples=30)
@given(st.lists(st.booleans(), max_size=40), st.sampled_from([1, 3]), st.integers(-6, 3))
def test_trajectory_is_that_of_the_documented_rule(
    history: list[bool], period: int, floor: int
) -> None:
    history += [True] * (40 - len(history))  # one shape, so that a few compilations do
    start = scaling(2.0**6, period=period, floor=2.0**floor)
    # Below the ceiling, which has a test of its own.
    walked = Walk(2.0**6, period, floor=2.0**floor).over(history)
    below = next((i for i, (scale, _) in enumerate(walked) if scale > 2.0**15), len(walked))
    assert scanned(start, history)[:below] == walked[:below]
    # The comparison can fail.
    assert scanned(start, [True] * 40)[:6] != Walk(2.0**6, period + 1).over([True] * 6)


def test_scale_stays_between_floor_and_ceiling() -> None:
    assert scanned(scaling(2.0**15, period=1), [True] * 2) == [(65504.0, 0)] * 2
    assert float(scaling(2.0**16).adjust(True).loss_scaling) == 65504.0
    assert float(scaling(jnp.inf).adjust(False).loss_scaling) == 65504.0
    assert float(scaling(2.0**-15, floor=2.0**-14).adjust(False).loss_scaling) == 2.0**-14
    half = mpx.DynamicLossScaling(HALF(2**14), jnp.float32(1), period=1)  # a TypeError in mpx
    for _ in range(3):
        half = jax.jit(lambda it: it.adjust(True))(half)
    assert (float(half.loss_scaling), half.loss_scaling.dtype) == (65504.0, HALF)
    low = mpx.DynamicLossScaling(HALF(2**-13), 0.0)
    for _ in range(3):
        low = low.adjust(False)
    assert float(low.loss_scaling) == 2.0**-14  # by half of which gradients would be NaN in the end


def test_counter_beyond_the_period_grows_at_the_next_step() -> None:
    moved = scaling(8.0, period=4, counter=jnp.int32(9)).adjust(jnp.bool_(True))
    assert (float(moved.loss_scaling), int(moved.counter)) == (16.0, 0)


@pytest.mark.parametrize("has_aux", [False, True])
def test_gradients_have_the_scale_of_their_own_pass(has_aux: bool) -> None:
    func = with_aux if has_aux else loss_fn
    wanted = jax.grad(lambda w: jnp.mean((INPUTS @ w) ** 2))(jnp.asarray([1.0, 2.0]))
    for period in (1, 100):  # in mpx, gradients and loss were half as large where the scale grows
        value, moved, finite, grads = mpx.filter_value_and_grad(
            func, scaling(period=period), has_aux
        )(Model(), INPUTS)
        loss = value[0] if has_aux else value
        assert (float(loss), loss.dtype) == (3.125, FULL)
        assert bool(finite)
        assert float(moved.loss_scaling) == (2.0**11 if period == 1 else 2.0**10)
        assert grads.weight.dtype == FULL
        assert grads.weight.tolist() == wanted.tolist()  # exact: small integers and halves
        found = mpx.filter_grad(func, scaling(period=period), has_aux)(Model(), INPUTS)
        assert len(found) == (4 if has_aux else 3)
        assert found[0].loss_scaling == moved.loss_scaling
        assert bool(found[1])
        assert found[2].weight.tolist() == wanted.tolist()
        if has_aux:
            assert value[1] == found[3] == {"dtype": "float16"}


def test_loss_is_what_the_function_returned() -> None:
    start = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, jnp.ones(()))
    value, _, finite, _ = mpx.filter_value_and_grad(loss_fn, start)(Model(), INPUTS)
    assert float(value) == 3.125  # inf in mpx: 3.125 * 65504 is, in float16
    assert not finite  # the gradients are too large for this scale


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_loss_that_is_not_finite_leaves_the_scale(value: float) -> None:
    start = scaling(counter=jnp.int32(3))
    grad_fn = mpx.filter_grad(lambda *args: loss_fn(*args) * value, start)
    moved, finite, grads = grad_fn(Model(), INPUTS)
    assert not finite
    assert eqx.tree_equal(moved, start)
    assert not jnp.isfinite(grads.weight).all()
    moved, finite, _ = mpx.filter_grad(loss_fn, scaling(2.0**15))(Model(), 100 * INPUTS)
    assert (bool(finite), float(moved.loss_scaling)) == (False, 2.0**14)


def test_half_precision_needs_no_promotion_in_jax() -> None:
    scaling, x = mpx.DynamicLossScaling(8.0, 1.0), jnp.full((3,), 0.5)
    with jax.numpy_dtype_promotion("strict"):
        loss, _, finite, grads = mpx.filter_value_and_grad(jnp.sum, scaling)(x)
        back = scaling.unscale(scaling.scale(x.astype(HALF)))
    assert (float(loss), bool(finite), grads.tolist()) == (1.5, True, [1.0] * 3)
    assert (back.dtype, back.tolist()) == (FULL, [0.5] * 3)


def test_without_mixed_precision_it_is_equinox() -> None:
    for func, has_aux in ((loss_fn, False), (with_aux, True)):
        start = scaling(jnp.inf)  # which must not be used
        wanted = eqx.filter_value_and_grad(func, has_aux=has_aux)(Model(), INPUTS)
        options = {"has_aux": has_aux, "use_mixed_precision": False}
        value, moved, finite, grads = mpx.filter_value_and_grad(func, start, **options)(
            Model(), INPUTS
        )
        assert eqx.tree_equal((value, grads), wanted)
        assert moved is start
        assert bool(finite)
        raw = mpx.calculate_scaled_grad(func, start, **options)(Model(), INPUTS)
        assert eqx.tree_equal(raw, wanted)


def test_scaled_gradients_are_left_scaled() -> None:
    value, grads = mpx.calculate_scaled_grad(loss_fn, scaling(16.0))(Model(), INPUTS, target=1.0)
    assert grads.weight.dtype == HALF
    plain = eqx.filter_grad(loss_fn)(Model(), INPUTS, 1.0)
    assert grads.weight.tolist() == (16 * plain.weight).tolist()
    assert float(value) == 16 * float(loss_fn(Model(), INPUTS, 1.0))
    tree = {"a": jnp.ones(2), "b": [HALF(3)]}
    doubled = mpx.scaled(lambda x: x, scaling(16.0))(tree)
    assert eqx.tree_equal(scaling(16.0).unscale(doubled), mpx.cast_to_float32(tree))
    assert float(scaling(2.0**15).scale(HALF(4))) == 2.0**17  # inf in mpx


def stepped(optimizer: Any, wrap: Any, steps: int) -> tuple[Any, Any, Any, list[float]]:
    """A training of mpx' documentation, whose fourth batch is infinite."""
    model, start = Model(), scaling(2.0**15, period=3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    before, losses = None, []

    @wrap
    def make_step(model: Any, state: Any, loss_scaling: Any, inputs: Any) -> Any:
        loss, loss_scaling, finite, grads = mpx.filter_value_and_grad(loss_fn, loss_scaling)(
            model, inputs, 1.0
        )
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, loss_scaling, loss

    for step in range(steps):
        if step == 3:
            before = (model, state)
        inputs = INPUTS * (jnp.inf if step == 3 else 1.0)
        model, state, start, loss = make_step(model, state, start, inputs)
        if step == 3:
            assert eqx.tree_equal((model, state), before), "a skipped step left a trace"
        losses.append(float(loss))
    return model, state, start, losses


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "filter_jit"])
def test_training_skips_the_bad_step_and_learns(wrap: Any) -> None:
    # Weight decay reads the parameters, of which the array of integers is none.
    optimizer = optax.adamw(0.1, weight_decay=1e-4)
    steps = 8 if wrap is not eqx.filter_jit else 60
    model, _, _, losses = stepped(optimizer, wrap, steps)
    assert losses[-1] < (losses[0] if steps == 8 else 1e-2)
    assert model.weight.dtype == FULL
    assert model.order.tolist() == [0, 1]


def test_step_is_traced_once_also_by_jit_itself() -> None:
    for compiled in (jax.jit, eqx.filter_jit):
        traced = []

        @compiled
        def step(start: Any, weight: Any, traced: Any = traced) -> Any:
            traced.append(start)
            return mpx.filter_grad(lambda w, x: jnp.sum(w * x), start)(weight, INPUTS)[0]

        start = scaling(period=2)
        for _ in range(4):
            start = step(start, jnp.ones(2))
        assert len(traced) == 1
        assert float(start.loss_scaling) == 2.0**12


def test_every_setting_survives() -> None:
    start = mpx.DynamicLossScaling(
        jnp.float32(64), jnp.float32(0.125), factor=4, period=7, counter=jnp.int32(3)
    )
    for passed in (
        jax.jit(lambda it: it)(start),
        pickle.loads(pickle.dumps(start)),
        start.adjust(True).adjust(False).adjust(True),
    ):
        assert (passed.factor, passed.period, float(passed.min_loss_scaling)) == (4, 7, 0.125)
    assert eqx.tree_equal(jax.jit(lambda it: it)(start), start)


def test_half_precision_is_set_by_dtype_and_by_name() -> None:
    for given_, wanted in (("bfloat16", BRAIN), (HALF, HALF), (BRAIN, BRAIN), ("float16", HALF)):
        mpx.set_half_precision_datatype(given_)  # in mpx names were taken and had no effect
        assert mpx.half_precision_datatype() == mpx.HALF_PRECISION_DATATYPE == wanted
        assert mpx.cast_to_half_precision(jnp.ones(1)).dtype == wanted
        assert mpx.force_full_precision(jnp.exp)(jnp.ones(1, BRAIN)).dtype == wanted
    for wrong in (FULL, "float32", "f17", None, 3):
        with pytest.raises(gradscale.SettingError, match="datatype must be float16 or bfloat16"):
            mpx.set_half_precision_datatype(wrong)
    mpx.set_half_precision_datatype("bfloat16")
    _, _, finite, grads = mpx.filter_value_and_grad(loss_fn, scaling())(Model(), INPUTS)
    assert bool(finite)
    assert grads.weight.dtype == FULL


def test_casts_leave_what_is_not_floating() -> None:
    tree = {"j": jnp.ones(2), "n": np.ones(2, np.float32), "h": HALF(1), "text": "x"}
    tree |= {"i": jnp.arange(2), "none": None, "f": 1.0}
    for cast, dtype in (
        (mpx.cast_to_float16, HALF),
        (mpx.cast_to_bfloat16, BRAIN),
        (mpx.cast_to_float32, FULL),
        (mpx.cast_to_full_precision, FULL),
        (lambda tree: mpx.cast_tree(tree, HALF), HALF),
    ):
        found = cast(tree)
        assert [found[name].dtype for name in "jnh"] == [dtype] * 3
        assert (found["text"], found["none"], found["f"]) == ("x", None, 1.0)
        assert found["i"].dtype == jnp.int32


def test_cast_function_casts_arguments_and_whole_results() -> None:
    seen = []

    def func(x: Any, *, y: Any) -> Any:
        seen.extend([x.dtype, y["y"].dtype])
        return {"sum": x + y["y"], "rest": [x, 3]}

    cast = mpx.cast_function(func, FULL, return_dtype=BRAIN)
    found = cast(jnp.ones(2, HALF), y={"y": jnp.ones(2, HALF)})
    assert seen == [FULL, FULL]
    assert found["sum"].dtype == found["rest"][0].dtype == BRAIN  # mpx left dicts and lists
    assert found["rest"][1] == 3
    assert cast.__name__ == "func"
    assert mpx.cast_function(func, HALF)(jnp.ones(2), y={"y": HALF(1)})["sum"].dtype == HALF


def test_select_tree_takes_other_leaves_from_the_first() -> None:
    a, b = {"x": jnp.ones(2), "n": np.ones(2), "s": "a"}, {"x": jnp.zeros(2), "n": np.zeros(2)}
    b["s"] = "b"
    for chosen, wanted in ((jnp.bool_(True), 1.0), (jnp.bool_(False), 0.0)):
        found = mpx.select_tree(chosen, a, b)
        assert found["x"].tolist() == found["n"].tolist() == [wanted] * 2
        assert found["s"] == "a"
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        mpx.select_tree(jnp.ones([1], bool), a, b)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: scaling(period=0), "period must be a whole number from 1"),
        (lambda: scaling(factor=1), "factor must be > 1"),
        (lambda: scaling(0.0), "loss_scaling must be > 0, got"),
        (lambda: scaling(-8.0), "loss_scaling must be > 0, got"),
        (lambda: scaling(jnp.nan), "loss_scaling must be > 0, got"),
        (lambda: scaling(floor=-1.0), "min_loss_scaling must be >= 0"),
        (lambda: scaling(floor=jnp.nan), "min_loss_scaling must be >= 0"),
        (
            lambda: mpx.DynamicLossScaling(jnp.ones(1), 1.0),
            r"loss_scaling must be a scalar.*\(1,\)",
        ),
        (lambda: mpx.DynamicLossScaling(1.0, jnp.ones(2)), "min_loss_scaling must be a scalar"),
        (lambda: scaling().adjust(jnp.ones(2, bool)), "grads_finite: expected boolean scalar"),
    ],
)
def test_wrong_settings_are_named(made: Any, message: str) -> None:
    with pytest.raises(gradscale.SettingError, match=message):
        made()
