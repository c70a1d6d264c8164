"""Steps: the scale moves as in plain Python, and a skipped step leaves no trace."""

from __future__ import annotations

import math
import random
from typing import Any

import keras
import numpy as np
import pytest

import gradscale as gs
from gradscale.keras import LossScaleOptimizer
from gradscale.policy import Policy
from gradscale.policy.losses import LOSS_PERIOD, PATIENT_LOSSES
from keras_steps import (
    BACKEND,
    Steps,
    array,
    arrays,
    plain_stats,
    quick,
    same,
    scale_of,
    state_of,
)

# Keras 3.15's own `numpy()` meets a deprecation of NumPy's.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

POLICIES: list[Policy] = [
    gs.Dynamic(init_scale=2.0**10, growth_interval=3, hysteresis=2, min_scale=2.0**6),
    gs.Headroom(memory=5, forget=9, pause=2),
    gs.Dynamic(init_scale=1000.1, growth_factor=1.7, backoff_factor=0.3, growth_interval=2,
               exact=False),
    gs.Headroom(spikes="skip"),
    gs.Histogram(interval=2),
    gs.Static(2.0**11),
    gs.Off(),
]  # fmt: skip


def variables() -> list[Any]:
    """Two new variables."""
    return [keras.Variable(np.arange(4.0, dtype="float32")), keras.Variable(np.ones((2, 3), "f"))]


def history(seed: int, steps: int = 60) -> list[list[Any]]:
    """Gradients for `variables`, in phases of different sizes, some of which are not finite."""
    rng, numbers, level, found = random.Random(seed), np.random.default_rng(seed), 0, []
    for _ in range(steps):
        level = rng.choice((level, level, level, rng.randint(-30, 14)))
        grads = [np.ldexp(numbers.normal(size=n), level).astype("f") for n in ((4,), (2, 3))]
        if rng.random() < 0.2:
            grads[rng.randint(0, 1)].flat[rng.randint(0, 3)] = rng.choice(
                (math.inf, -math.inf, math.nan)
            )
        found.append(grads)
    return found


def finite_history(seed: int, steps: int) -> list[list[Any]]:
    """The finite ones of such gradients."""
    found = history(seed, 4 * steps)
    return [each for each in found if all(np.isfinite(g).all() for g in each)][:steps]


@pytest.mark.parametrize("policy", quick(POLICIES, 2), ids=repr)
def test_scale_moves_as_in_plain_python(policy: Policy) -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
    steps, state = Steps(optimizer, variables()), policy.init()
    skipped = 0
    for grads in history(1):
        before = state.scale
        state = policy.update(state, plain_stats(grads))
        steps(grads)
        assert state_of(optimizer) == state
        outcome = optimizer.outcome
        finite = all(np.isfinite(g).all() for g in grads)
        skipped += not finite
        assert (bool(array(outcome.applied)), float(array(outcome.scale))) == (finite, before)
    assert int(array(optimizer.num_skipped)) == skipped > 3
    assert int(array(optimizer.num_steps)) == 60


def test_operations_one_by_one_are_the_compiled_ones() -> None:
    found = []
    for compiled in (True, False):
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer = LossScaleOptimizer(inner, policy=gs.Dynamic(growth_interval=2))
        model = variables()
        steps = Steps(optimizer, model, compiled=compiled)
        for grads in history(2, 6):
            steps(grads)
        found.append((state_of(optimizer), arrays(model)))
    (state, one), (other_state, other) = found
    assert state == other_state
    assert all(
        np.allclose(a, b, rtol=1e-6, equal_nan=True) for a, b in zip(one, other, strict=True)
    )


INNER: dict[str, Any] = {
    "adam": lambda: keras.optimizers.Adam(0.1, weight_decay=0.1),
    "average": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "averages written": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "clipping": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
}


@pytest.mark.parametrize("name", quick(INNER, 2))
def test_skipped_step_leaves_no_trace(name: str) -> None:
    make = INNER[name]
    bad = [np.full(4, math.nan, "f"), np.ones((2, 3), "f")]
    good = finite_history(3, 5)
    wrapped, alone = make(), make()
    model, reference = variables(), variables()
    policy = gs.Static(2.0**8)
    steps = Steps(LossScaleOptimizer(wrapped, policy=policy), model)
    # The same gradients without a scale, and without the bad ones.
    plain = Steps(alone, reference, compiled=BACKEND == "jax")
    for grads in good:
        before = arrays(model), arrays(wrapped.variables)
        steps(bad)
        assert same(arrays(model), before[0])
        assert same(arrays(wrapped.variables), before[1])
        steps([g * np.float32(2.0**8) for g in grads])
        plain(grads)
        assert not same(arrays(wrapped.variables), before[1])
    pairs = zip(arrays(model), arrays(reference), strict=True)
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in pairs)
    assert int(array(steps.optimizer.iterations)) == int(array(alone.iterations))


def test_bad_part_of_a_batch_is_left_out_alone() -> None:
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    model = [keras.Variable(np.zeros(2, "f"))]
    steps = Steps(LossScaleOptimizer(inner, policy=gs.Static(4.0)), model)
    for number in (4.0, math.inf, 12.0):
        steps([np.full(2, number, "f")])
    assert arrays(model)[0].tolist() == [-2.0, -2.0]  # the mean of 1 and 3


def test_multi_optimizer_is_wrapped() -> None:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    first, second = variables()
    chosen = {first.path: keras.optimizers.SGD(1.0), second.path: keras.optimizers.SGD(0.5)}
    inner = keras.optimizers.MultiOptimizer(lambda variable: chosen[variable.path])
    optimizer = LossScaleOptimizer(inner, policy=gs.Dynamic(init_scale=4.0))
    steps = Steps(optimizer, [first, second])
    steps([np.full(4, 4.0, "f"), np.full((2, 3), math.inf, "f")])
    assert arrays([first])[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    steps([np.full(4, 4.0, "f"), np.full((2, 3), 4.0, "f")])
    assert arrays([first])[0].tolist() == [-2.0 + 0.0, -1.0, 0.0, 1.0]
    assert np.all(arrays([second])[0] == 0.0)
    assert scale_of(optimizer) == 2.0
    with pytest.raises(ValueError, match="LossScaleOptimizer cannot be used inside"):
        keras.optimizers.MultiOptimizer(lambda variable: optimizer).build([first])


@pytest.mark.parametrize("size", quick([1.0, 1e15, 1e-3], 2))
def test_gradients_longer_than_clip_norm_are_shortened_to_it(size: float) -> None:
    grads = [g * np.float32(size) for g in finite_history(4, 1)[0]]
    norm = math.sqrt(sum(float(np.sum(np.square(g.astype("float64")))) for g in grads))
    for factor in (0.5, 2.0):
        model = [keras.Variable(np.zeros_like(g)) for g in grads]
        sgd = keras.optimizers.SGD(1.0)
        optimizer = LossScaleOptimizer(sgd, policy=gs.Static(2.0**10), clip_norm=norm * factor)
        Steps(optimizer, model)([g * np.float32(2.0**10) for g in grads])
        for after, g in zip(arrays(model), grads, strict=True):
            expected = -g if factor > 1 else -g * np.float32(0.5)
            assert np.allclose(after, expected, rtol=1e-6)
            assert factor < 1 or np.array_equal(after, expected)
        assert math.isclose(float(array(optimizer.outcome.grad_norm)), norm, rel_tol=1e-6)


def test_loss_that_is_not_finite_skips_and_does_not_move_the_scale() -> None:
    policy = gs.Dynamic(init_scale=64.0)
    model = variables()
    steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=policy), model, loss=True)
    bad = [np.full(4, math.nan, "f"), np.ones((2, 3), "f")]
    before, state = arrays(model), state_of(steps.optimizer)
    for _ in range(PATIENT_LOSSES):
        steps(bad, loss=math.nan)
    assert state_of(steps.optimizer) == state
    assert same(arrays(model), before)
    for _ in range(LOSS_PERIOD):
        steps(bad, loss=math.inf)
    assert scale_of(steps.optimizer) == 32.0
    steps(bad)
    assert scale_of(steps.optimizer) == 16.0


def test_unscaled_gradient_that_is_too_large_skips_and_does_not_lower_the_scale() -> None:
    model = [keras.Variable(np.zeros(2, "float16"), dtype="float16")]
    policy = gs.Dynamic(init_scale=2.0**-4)
    steps = Steps(LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=policy), model)
    steps([np.array([8192.0, 1.0], "float16")])  # 131072 without the scale
    outcome = steps.optimizer.outcome
    flags = [bool(array(flag)) for flag in (outcome.applied, outcome.finite, outcome.fits)]
    assert flags == [False, True, False]
    assert arrays(model)[0].tolist() == [0.0, 0.0]
    assert scale_of(steps.optimizer) == 2.0**-4
    steps([np.array([16.0, 1.0], "float16")])
    assert arrays(model)[0].tolist() == [-256.0, -16.0]


def test_variable_that_its_gradient_overwrites_is_neither_unscaled_nor_measured() -> None:
    model = variables()
    model[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=gs.Static(4.0), clip_norm=1e3)
    steps = Steps(optimizer, model)
    steps([np.full(4, 4.0, "f"), np.full((2, 3), 1e6, "f")])
    assert arrays(model)[0].tolist() == [-1.0, 0.0, 1.0, 2.0]
    assert np.all(arrays(model)[1] == 1e6)
    assert float(array(optimizer.outcome.amax)) == 4.0
    steps([np.full(4, 4.0, "f"), np.full((2, 3), math.inf, "f")])
    assert np.all(arrays(model)[1] == 1e6)
    assert not bool(array(optimizer.outcome.applied))


def test_variables_without_gradients_are_left_alone() -> None:
    model = variables()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=gs.Static(2.0))
    optimizer.build(model)
    ones = keras.ops.ones(4)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([ones * 2.0, None], model)
    assert arrays(model)[0].tolist() == [-1.0, 0.0, 1.0, 2.0]
    optimizer.apply([], model)
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply([None, None], model)
    with pytest.raises(ValueError, match=r"optimizer\.build\(trainable_variables\)"):
        LossScaleOptimizer(keras.optimizers.SGD(1.0)).apply([ones])


def test_number_of_gradients_is_checked() -> None:
    model = variables()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=gs.Static(2.0))
    optimizer.build(model)
    with pytest.raises(gs.SettingError, match="one entry for each variable, got 1 for 2 variables"):
        optimizer.apply([keras.ops.ones(4)], model)
    if BACKEND != "tensorflow":  # There, Keras has no stateless_apply.
        values = [[variable.value for variable in each] for each in (optimizer.variables, model)]
        with pytest.raises(gs.SettingError, match="got 1 for 2 variables"):
            optimizer.stateless_apply(values[0], [keras.ops.ones(4)], values[1])
    assert int(array(optimizer.num_steps)) == 0


def test_loss_is_scaled_in_float32() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), policy=gs.Dynamic())
    loss = keras.ops.convert_to_tensor(3.0, "float16")
    assert float(array(optimizer.scale_loss(loss))) == 3.0 * 2.0**16
    optimizer.build(variables())
    assert float(array(optimizer.scale_loss(loss))) == 3.0 * 2.0**16


def test_values_of_an_outcome_stay_when_the_next_step_is_taken() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=gs.Dynamic(init_scale=8.0))
    steps = Steps(optimizer, variables())
    good, bad = finite_history(5, 1)[0], [np.full(4, math.inf, "f"), np.ones((2, 3), "f")]
    steps(good)
    first = optimizer.outcome
    steps(bad)
    assert bool(array(first.applied))
    assert not bool(array(optimizer.outcome.applied))
