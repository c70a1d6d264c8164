"""A step on TensorFlow: what all replicas of `tf.distribute` agree on, and sparse gradients.

Only this module imports TensorFlow, and only where it is Keras' backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from keras import ops

from gradscale.keras.measurement import Found

T = TypeVar("T")


def check_context() -> None:
    """Raises Keras' error if this is no place to apply gradients."""
    import tensorflow as tf

    if tf.distribute.in_cross_replica_context():
        raise ValueError("apply() must be called in a replica context.")


def count() -> int:
    """How many replicas take the step together."""
    import tensorflow as tf

    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def summed(gradients: Sequence[Any]) -> list[Any]:
    """The gradients summed over all replicas."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return list(context.all_reduce(tf.distribute.ReduceOp.SUM, list(gradients)))


def agreed(found: Found, loss_finite: Any) -> tuple[Found, Any]:
    """What was found in any replica, and whether all losses were finite. The norm stays."""
    import tensorflow as tf

    bad = [found.nan, ops.logical_not(found.fits), ops.logical_not(loss_finite)]
    # No NaN in what is compared: a maximum may drop it.
    amax = tf.where(found.nan, tf.zeros_like(found.amax), found.amax)
    mine = tf.stack([amax, *(tf.cast(flag, amax.dtype) for flag in bad)])
    context = tf.distribute.get_replica_context()
    most = tf.reduce_max(context.all_gather(mine[None], axis=0), axis=0)
    nan, unfit, bad_loss = (most[place] > 0 for place in (1, 2, 3))
    return found._replace(amax=most[0], nan=nan, fits=tf.logical_not(unfit)), ~bad_loss


def values_of(gradient: Any) -> Any:
    """The elements of a gradient: of IndexedSlices the sums of the slices with the same index.

    Their number is that of the slices, since XLA needs shapes that are known: the last are zeros.
    """
    import tensorflow as tf

    if not isinstance(gradient, tf.IndexedSlices):
        return ops.convert_to_tensor(gradient, sparse=False)
    order = tf.argsort(gradient.indices)
    indices, values = tf.gather(gradient.indices, order), tf.gather(gradient.values, order)
    is_next = tf.cast(indices[1:] != indices[:-1], tf.int32)
    row = tf.concat([tf.zeros_like(is_next[:1]), tf.cumsum(is_next)], axis=0)
    row = row[: tf.shape(indices)[0]]
    wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    return tf.math.unsorted_segment_sum(wide, row, tf.shape(indices)[0])


def run(
    step: Callable[[list[Any], Any], None],
    assign: Callable[[Sequence[Any]], None],
    applied: Any,
    values: list[Any],
    gradients: list[Any],
    variables: Any,
) -> None:
    """Runs `step` on every replica if `applied`, then `assign` with `values`.

    A strategy may only be asked to merge calls outside of a condition, so the condition is in the
    context of all replicas, and each of them has the same `applied` and `values`.
    """
    import tensorflow as tf

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        ops.cond(applied, lambda: step(gradients, variables), lambda: None)
        assign(values)
        return

    def merged(strategy: Any, applied: Any, values: Any, gradients: Any, variables: Any) -> None:
        def one(value: Any) -> Any:
            return strategy.experimental_local_results(value)[0]

        def on_each() -> None:
            strategy.extended.call_for_each_replica(step, args=(gradients, variables))

        ops.cond(one(applied), on_each, lambda: None)
        assign([one(value) for value in values])

    context = tf.distribute.get_replica_context()
    context.merge_call(merged, args=(applied, values, gradients, variables))


def unconverted(function: Callable[[], T]) -> T:
    """What `function` returns, called as it is: `tf.function` would translate its source."""
    import tensorflow as tf

    result: T = tf.autograph.experimental.do_not_convert(function)()
    return result


def is_present(tensor: Any) -> bool:
    """Whether a tensor can be used here: it is a value, or of the function that is traced."""
    import tensorflow as tf

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return not tf.is_symbolic_tensor(tensor) or tensor.graph is graph
