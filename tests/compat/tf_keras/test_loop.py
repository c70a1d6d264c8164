"""Code in the style of TensorFlow 2: get_scaled_loss, get_unscaled_gradients, apply_gradients."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

import gradscale as gs
from gradscale.compat import tf_keras as mixed_precision
from gradscale.compat.tf_keras import LossScaleOptimizer
from keras_models import BATCH, INPUTS, TARGETS, fit, model
from keras_steps import BACKEND, array, arrays, same, scale_of, state_of

# Keras 3.15's own `numpy()` meets a deprecation of NumPy's.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="needs TensorFlow below Keras")


def sgd(rate: float = 1.0) -> Any:
    return keras.optimizers.SGD(rate)


@on_tensorflow
@pytest.mark.parametrize("traced", ["nothing", "the step", "gradients alone"])
def test_loop_of_tensorflow_2_skips_and_learns(traced: str) -> None:
    import tensorflow as tf

    before = mixed_precision.global_policy()
    mixed_precision.set_global_policy("mixed_float16")
    try:
        made = model("mixed_float16")
    finally:
        mixed_precision.set_global_policy(before)
    policy = gs.Dynamic(init_scale=2.0**24)
    optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(1e-2), policy=policy)

    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            error = tf.cast(made(x, training=True), tf.float32) - y
            loss = tf.reduce_mean(tf.square(error))
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, made.trainable_variables)
        return optimizer.get_unscaled_gradients(scaled_gradients), loss

    if traced == "gradients alone":
        gradients = tf.function(gradients)

    def step(x: Any, y: Any) -> Any:
        grads, loss = gradients(x, y)
        optimizer.apply_gradients(zip(grads, made.trainable_variables, strict=True))
        return loss

    if traced == "the step":
        step = tf.function(step)
    state, losses = policy.init(), []
    for number in range(40):
        part = slice(number % 8 * BATCH, (number % 8 + 1) * BATCH)
        losses.append(float(step(tf.constant(INPUTS[part]), tf.constant(TARGETS[part]))))
        finite = bool(array(optimizer.outcome.finite))
        state = policy.update(state, gs.GradStats(finite=finite))
        assert float(optimizer.loss_scale) == state.scale
        assert int(optimizer.dynamic_counter) == state.good_steps
    skipped = int(array(optimizer.num_skipped))
    assert 5 <= skipped <= 12
    assert int(array(optimizer.iterations)) == 40 - skipped
    assert losses[-1] < 0.6 * losses[0]


def test_unscaled_gradients_are_applied_as_they_are() -> None:
    variable = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    assert float(array(optimizer.get_scaled_loss(3.0))) == 24.0
    assert float(array(optimizer.get_scaled_loss(lambda: 3.0)())) == 24.0
    small = optimizer.get_unscaled_gradients([keras.ops.array([8.0, 16.0]), None])
    assert array(small[0]).tolist() == [1.0, 2.0]
    assert small[1] is None
    optimizer.apply_gradients([(small[0], variable)])
    assert array(variable).tolist() == [0.0, 0.0]
    assert float(array(optimizer.outcome.amax)) == 16.0


def test_overflow_that_clipping_by_value_hides_is_noticed() -> None:
    variable = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    (small,) = optimizer.get_unscaled_gradients([keras.ops.array([math.inf, 16.0])])
    optimizer.apply_gradients([(keras.ops.clip(small, -1.0, 1.0), variable)])
    assert array(variable).tolist() == [1.0, 2.0]
    assert scale_of(optimizer) == 4.0


def test_what_goes_wrong_after_unscaling_skips_and_does_not_lower_the_scale() -> None:
    variable = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    (small,) = optimizer.get_unscaled_gradients([keras.ops.array([8.0, 16.0])])
    optimizer.apply_gradients([(small * math.nan, variable)])
    assert array(variable).tolist() == [1.0, 2.0]
    assert scale_of(optimizer) == 8.0


def test_gradients_that_were_not_unscaled_are_warned_of() -> None:
    variable = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    optimizer.get_scaled_loss(1.0)
    with pytest.warns(UserWarning, match=r"get_unscaled_gradients\(\) was not called"):
        optimizer.apply_gradients([(keras.ops.array([1.0, 1.0]), variable)])


def test_step_without_variables_does_nothing() -> None:
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0)
    optimizer.get_scaled_loss(1.0)
    grads = optimizer.get_unscaled_gradients([])  # all layers are frozen
    assert int(array(optimizer.apply_gradients(zip(grads, [], strict=True)))) == 0
    assert int(array(optimizer.num_steps)) == 0


@pytest.mark.parametrize("kind", ["micro-batches", "groups of variables"])
def test_overflow_in_any_call_before_a_step_lowers_the_scale(kind: str) -> None:
    first, second = keras.Variable([1.0]), keras.Variable([2.0])
    optimizer = LossScaleOptimizer(sgd(), initial_scale=8.0, dynamic_growth_steps=2)
    good, bad = keras.ops.array([8.0]), keras.ops.array([math.inf])
    for expected in (4.0, 2.0, 1.0):
        optimizer.get_scaled_loss(1.0)
        (one,) = optimizer.get_unscaled_gradients([bad])
        if kind == "micro-batches":
            optimizer.get_scaled_loss(1.0)
        (other,) = optimizer.get_unscaled_gradients([good])
        if kind == "micro-batches":
            optimizer.apply_gradients([(one + other, first)])
        else:
            optimizer.apply_gradients([(one, first), (other, second)])
        assert scale_of(optimizer) == expected
        assert not bool(array(optimizer.outcome.finite))
    assert (array(first).tolist(), array(second).tolist()) == ([1.0], [2.0])
    grads = optimizer.get_unscaled_gradients([good])  # nothing is left of the steps before
    optimizer.apply_gradients(zip(grads, [first], strict=True))
    assert bool(array(optimizer.outcome.applied))


def test_fit_works_with_it() -> None:
    losses = []
    for kind in (gs_keras(), LossScaleOptimizer):
        made = model()
        made.compile(kind(keras.optimizers.Adam(1e-2)), loss="mse")
        losses.append(fit(made, epochs=2).history["loss"])
    assert losses[0] == losses[1]


def gs_keras() -> Any:
    """The class of Keras 3, ours."""
    from gradscale.keras import LossScaleOptimizer as ours

    return ours


@on_tensorflow
def test_minimize_scales_unscales_and_applies() -> None:
    import tensorflow as tf

    variable = keras.Variable([3.0])
    optimizer = LossScaleOptimizer(sgd(0.5), initial_scale=8.0)
    optimizer.minimize(lambda: tf.square(variable.value), [variable.value])
    assert array(variable).tolist() == [0.0]
    with pytest.raises(ValueError, match="`tape` is required"):
        optimizer.minimize(tf.constant(1.0), [variable.value])


def test_scale_that_does_not_move() -> None:
    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(sgd(), dynamic=False, initial_scale=100.0)
    assert (optimizer.dynamic, optimizer.dynamic_counter) == (False, None)
    optimizer.apply_gradients([(keras.ops.array([math.inf]), variable)])
    assert array(variable).tolist() == [1.0]
    assert float(array(optimizer.loss_scale)) == 100.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dynamic": False}, "dynamic=False requires initial_scale"),
        ({"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 2}, "does not allow"),
        ({"dynamic": 3}, "dynamic must be True or False, got 3"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(gs.SettingError, match=message):
        LossScaleOptimizer(sgd(), **given)
    with pytest.raises(gs.SettingError, match="experimental_aggregate_gradients"):
        LossScaleOptimizer(sgd()).apply_gradients([], experimental_aggregate_gradients=False)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"initial_scale": 4.0, "dynamic_growth_steps": 7},
        {"dynamic": False, "initial_scale": 100.0},
        {"policy": gs.Headroom(margin=3), "clip_norm": 0.5},
        {"policy": gs.Static(8.0)},
        {"policy": gs.Off()},
    ],
    ids=str,
)
def test_configuration_builds_the_same_optimizer(given: dict[str, Any]) -> None:
    optimizer = LossScaleOptimizer(sgd(), **given)
    other = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(other) is LossScaleOptimizer
    assert (other.policy, other.clip_norm) == (optimizer.policy, optimizer.clip_norm)
    assert state_of(other) == state_of(optimizer)
    assert same(arrays(other.variables), arrays(optimizer.variables))
    assert np.isfinite(scale_of(other))
