"""`tf.distribute`: all replicas take the same decision. And sparse gradients of TensorFlow."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest

import gradscale as gs
from gradscale.keras import LossScaleOptimizer, Monitor
from keras_models import INPUTS, TARGETS, fit, model
from keras_steps import BACKEND, array, arrays, same, scale_of, state_of

if BACKEND != "tensorflow":
    pytest.skip("needs TensorFlow as the backend of Keras", allow_module_level=True)

import tensorflow as tf

# Keras 3.15's own `numpy()` meets a deprecation of NumPy's.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def strategy() -> Any:
    """Two replicas, on the logical devices that conftest.py makes of the CPU."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def copies(strategy: Any, variable: Any) -> list[Any]:
    """The value of a variable on every replica."""
    return [each.numpy() for each in strategy.experimental_local_results(variable.value)]


def step_function(strategy: Any, optimizer: Any, variable: Any, compiled: bool) -> Any:
    """A step with the gradients of the first and of the second replica."""

    def on_replica(gradients: Any) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply([tf.gather(gradients, replica)], [variable])

    def step(gradients: Any) -> None:
        strategy.run(on_replica, args=(gradients,))

    return tf.function(step) if compiled else step


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("compiled", [True, False])
def test_bad_gradient_of_one_replica_skips_the_step_on_all(
    strategy: Any, bad: float, replica: int, compiled: bool
) -> None:
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        inner = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer = LossScaleOptimizer(inner, policy=gs.Dynamic(init_scale=8.0))
        optimizer.build([variable])
    step = step_function(strategy, optimizer, variable, compiled)
    step(tf.constant([[8.0, 8.0], [16.0, 16.0]]))
    assert copies(strategy, variable)[0].tolist() == [-0.5, 0.5]  # 1 + 2, times 0.5
    gradients = np.full((2, 2), 8.0, "f")
    gradients[replica, 1] = bad
    before = arrays(inner.variables)
    step(tf.constant(gradients))
    for each in copies(strategy, variable):
        assert each.tolist() == [-0.5, 0.5]
    assert same(arrays(inner.variables), before)
    assert [float(each) for each in copies(strategy, optimizer.dynamic_scale)] == [4.0, 4.0]
    for name in optimizer._names:
        first, second = copies(strategy, getattr(optimizer, name))
        assert same([first], [second])
    assert not bool(array(optimizer.outcome.applied))


def test_keras_own_class_applies_what_is_infinite_on_the_second_replica(strategy: Any) -> None:
    # If this fails, Keras has mended it: then docs/move/keras.md should no longer say so.
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
        optimizer.build([variable])
    step = step_function(strategy, optimizer, variable, compiled=True)
    step(tf.constant([[8.0, 8.0], [math.inf, 8.0]]))
    assert array(variable)[0] == -math.inf


def test_norm_that_is_clipped_is_that_of_the_sum_of_replicas(strategy: Any) -> None:
    with strategy.scope():
        variable = keras.Variable([0.0, 0.0])
        optimizer = LossScaleOptimizer(
            keras.optimizers.SGD(1.0), policy=gs.Static(4.0), clip_norm=1.0
        )
        optimizer.build([variable])
    step = step_function(strategy, optimizer, variable, compiled=True)
    step(tf.constant([[4.0, 16.0], [8.0, 0.0]]))  # 3 and 4 without the scale: the norm is 5
    assert np.allclose(array(variable), [-0.6, -0.8], rtol=1e-6)
    assert float(array(optimizer.outcome.grad_norm)) == 5.0
    assert float(array(optimizer.outcome.amax)) == 16.0


def test_policy_gets_the_largest_gradient_of_any_replica(strategy: Any) -> None:
    policy = gs.Headroom()
    with strategy.scope():
        variable = keras.Variable([0.0, 0.0])
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
        optimizer.build([variable])
    step, state = step_function(strategy, optimizer, variable, compiled=True), policy.init()
    for small, large in ((1.0, 4096.0), (2.0, 64.0), (0.5, 30000.0), (1.0, 8.0)):
        step(tf.constant([[small, 1.0], [1.0, large]]))
        stats = gs.GradStats(finite=True, amax=large, exponent=math.frexp(large)[1])
        state = policy.update(state, stats)
        assert state_of(optimizer) == state


def test_fit_on_two_replicas_skips_and_learns(strategy: Any) -> None:
    inputs = INPUTS.copy()
    inputs[31] = 1e6  # the last of the first batch: on the second replica, infinite in float16
    with strategy.scope():
        made = model()
        made.compile(LossScaleOptimizer(keras.optimizers.Adam(1e-2)), loss="mse")
    history = fit(made, inputs=inputs, epochs=4, callbacks=[Monitor()]).history
    assert history["skipped"] == [1, 1, 1, 1]
    assert scale_of(made.optimizer) == 2.0**11
    for variable in made.trainable_variables:
        first, second = copies(strategy, variable)
        assert np.isfinite(first).all()
        assert same([first], [second])
    assert made.evaluate(INPUTS, TARGETS, verbose=0) < 0.9 * np.square(TARGETS).mean()


def test_bad_part_of_a_batch_on_one_replica_is_left_out_alone(strategy: Any) -> None:
    # Not compiled: there, Keras' optimizers cannot accumulate on replicas, whatever wraps them.
    with strategy.scope():
        variable = keras.Variable([0.0, 0.0])
        inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        optimizer = LossScaleOptimizer(inner, policy=gs.Static(4.0))
        optimizer.build([variable])
    step = step_function(strategy, optimizer, variable, compiled=False)
    for first, second in ((4.0, 4.0), (4.0, math.inf), (12.0, 12.0)):
        step(tf.constant([[first, first], [second, second]]))
    for each in copies(strategy, variable):
        assert each.tolist() == [-4.0, -4.0]  # the mean of 1 and 3, of two replicas


def test_gradients_are_applied_in_the_context_of_a_replica(strategy: Any) -> None:
    with strategy.scope():
        variable = keras.Variable([1.0])
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
        with pytest.raises(ValueError, match="must be called in a replica context"):
            optimizer.apply([tf.ones(1)], [variable])


@pytest.mark.parametrize("xla", [False, True])
def test_slices_with_the_same_index_are_summed_before_they_are_measured(xla: bool) -> None:
    variable = keras.Variable(np.zeros((4, 2), "f"))
    sgd = keras.optimizers.SGD(1.0)
    optimizer = LossScaleOptimizer(sgd, policy=gs.Static(2.0), clip_norm=2.5)
    optimizer.build([variable])

    @tf.function(jit_compile=xla)
    def step(values: Any) -> None:
        optimizer.apply([tf.IndexedSlices(values, tf.constant([3, 1, 3]), [4, 2])], [variable])

    step(tf.constant([[4.0, 0.0], [0.0, 8.0], [2.0, 0.0]]))  # norm 5 without the scale: 3 and 4
    assert np.allclose(array(variable), [[0, 0], [0, -2.0], [0, 0], [-1.5, 0]], rtol=1e-6)
    assert float(array(optimizer.outcome.grad_norm)) == 5.0
    assert float(array(optimizer.outcome.amax)) == 8.0
    step(tf.constant([[4.0, 0.0], [0.0, math.nan], [2.0, 0.0]]))
    assert not bool(array(optimizer.outcome.applied))


def test_function_that_is_traced_before_the_first_step_scales_by_the_present_scale() -> None:
    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=gs.Dynamic(init_scale=8.0))
    scaled = tf.function(optimizer.scale_loss)
    assert float(scaled(tf.constant(1.0))) == 8.0
    optimizer.apply([tf.constant([math.inf])], [variable])
    assert float(scaled(tf.constant(1.0))) == 4.0
