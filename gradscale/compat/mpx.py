"""mpx (mixed_precision_for_JAX) over gradscale's rules: `import gradscale.compat.mpx as mpx`.

    loss_scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, min_loss_scaling=jnp.ones(()))

    @eqx.filter_jit
    def make_step(model, optimizer_state, loss_scaling, batch):
        grad_fn = mpx.filter_value_and_grad(loss_fn, loss_scaling)
        loss, loss_scaling, grads_finite, grads = grad_fn(model, batch)
        model, optimizer_state = mpx.optimizer_update(
            model, optimizer, optimizer_state, grads, grads_finite
        )
        return model, optimizer_state, loss_scaling, loss

All public names of mpx are here. docs/move/jmp-flax-mpx.md has what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

try:
    import equinox as eqx
    import jax
except ImportError as error:
    raise ImportError(
        'gradscale.compat.mpx needs JAX and Equinox: pip install "gradscale[equinox]".',
        name=error.name,
    ) from error

import jax.numpy as jnp
import numpy as np

from gradscale.compat import jax_rule
from gradscale.compat.jax_trees import (
    STANDARD,
    all_finite,
    is_array,
    measured,
    select,
    widened,
)
from gradscale.errors import SettingError
from gradscale.formats import BFLOAT16, FLOAT16, FLOAT32
from gradscale.policy import GradStats

__all__ = [
    "BFLOAT16_MAX",
    "FLOAT16_MAX",
    "DynamicLossScaling",
    "all_finite",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "half_precision_datatype",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
]

FLOAT16_MAX = np.float32(FLOAT16.max)
"""The largest float16 number, 65504: the ceiling of a `DynamicLossScaling`."""
BFLOAT16_MAX = np.float32(BFLOAT16.max)
"""The largest bfloat16 number."""

_HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
_half: list[Any] = [jnp.float16]  # one for the whole process, as in mpx


def set_half_precision_datatype(datatype: Any) -> None:
    """Makes `datatype`, float16 or bfloat16, the half precision of everything traced from now on.

    Args:
        datatype: A dtype or its name.
    """
    try:
        name = jnp.dtype(datatype).name
    except TypeError:
        name = None
    if name not in _HALVES:
        raise SettingError(f"datatype must be float16 or bfloat16, got {datatype!r}.")
    _half[0] = _HALVES[name]


def half_precision_datatype() -> Any:
    """The dtype that `set_half_precision_datatype` set; float16 at first."""
    return _half[0]


def __getattr__(name: str) -> Any:
    if name == "HALF_PRECISION_DATATYPE":
        return half_precision_datatype()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def cast_tree(tree: Any, dtype: Any) -> Any:
    """`tree` with arrays of float16, bfloat16 and float32, NumPy's too, in `dtype`."""
    formats = (jnp.float16, jnp.bfloat16, jnp.float32)

    def cast(x: Any) -> Any:
        return x.astype(dtype) if is_array(x) and x.dtype in formats else x

    return jax.tree_util.tree_map(cast, tree)


def cast_to_float32(x: Any) -> Any:
    """The tree `x` in float32."""
    return cast_tree(x, jnp.float32)


def cast_to_float16(x: Any) -> Any:
    """The tree `x` in float16."""
    return cast_tree(x, jnp.float16)


def cast_to_bfloat16(x: Any) -> Any:
    """The tree `x` in bfloat16."""
    return cast_tree(x, jnp.bfloat16)


def cast_to_full_precision(x: Any) -> Any:
    """The tree `x` in float32."""
    return cast_tree(x, jnp.float32)


def cast_to_half_precision(x: Any) -> Any:
    """The tree `x` in `half_precision_datatype()`."""
    return cast_tree(x, half_precision_datatype())


def cast_function(
    func: Callable[..., Any], dtype: Any, return_dtype: Any = None
) -> Callable[..., Any]:
    """`func` with its arguments cast to `dtype`, and its result, a tree, to `return_dtype`.

    Args:
        func: Any function of trees.
        dtype: The dtype in which it computes.
        return_dtype: Its result's dtype, or a function that returns one; None: `dtype`.
    """

    @functools.wraps(func)
    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_tree((args, kwargs), dtype)
        wanted = dtype if return_dtype is None else return_dtype
        if wanted is half_precision_datatype:
            wanted = half_precision_datatype()
        return cast_tree(func(*args, **kwargs), wanted)

    return cast


def force_full_precision(
    func: Callable[..., Any], return_dtype: Any = half_precision_datatype
) -> Callable[..., Any]:
    """`func`, computed in float32, with its result in half precision or in `return_dtype`."""
    return cast_function(func, jnp.float32, return_dtype)


class DynamicLossScaling(eqx.Module):
    """A loss scaling that `gradscale.Dynamic` moves.

        if grads_finite:
            counter += 1
            if counter >= period:
                counter = 0
                loss_scaling *= factor
        else:
            counter = 0
            loss_scaling /= factor
        loss_scaling = clip(loss_scaling, min_loss_scaling, 65504)

    `factor` and `period` are static; the others are leaves.

    >>> loss_scaling = DynamicLossScaling(1024.0, 1.0, period=1)
    >>> float(loss_scaling.adjust(jnp.bool_(True)).loss_scaling)
    2048.0
    """

    loss_scaling: Any
    """The loss is multiplied by this (float32, or the format it is given in)."""
    min_loss_scaling: Any
    """The floor."""
    counter: Any
    """Consecutive finite steps since the scaling last grew (int32)."""
    factor: float = eqx.field(static=True)
    """What it is multiplied or divided by."""
    period: int = eqx.field(static=True)
    """It grows on the step that makes so many."""

    def __init__(
        self,
        loss_scaling: Any,
        min_loss_scaling: Any,
        factor: float = 2,
        period: int = 2000,
        counter: Any = None,
    ) -> None:
        self.loss_scaling = _scalar("loss_scaling", loss_scaling)
        self.min_loss_scaling = _scalar("min_loss_scaling", min_loss_scaling)
        # Infinity is clipped by the first `adjust`.
        if not jax_rule.is_traced(self.loss_scaling) and not self.loss_scaling > 0:
            raise SettingError(f"loss_scaling must be > 0, got {loss_scaling!r}.")
        if not jax_rule.is_traced(self.min_loss_scaling):
            jax_rule.lower_bound("min_loss_scaling", self.min_loss_scaling)
        self.factor = jax_rule.factor("factor", factor, 1.0, FLOAT32.max)
        self.period = jax_rule.whole("period", period)
        self.counter = jnp.asarray(0 if counter is None else counter, jnp.int32)

    def scale(self, tree: Any) -> Any:
        """`tree`, every leaf multiplied by `loss_scaling`, in float32 at least."""
        with STANDARD():
            return jax.tree_util.tree_map(lambda x: widened(x) * self._factor(), tree)

    def unscale(self, tree: Any) -> Any:
        """`tree`, every leaf divided by `loss_scaling`, in float32 at least."""
        with STANDARD():
            return jax.tree_util.tree_map(lambda x: widened(x) / self._factor(), tree)

    def adjust(self, grads_finite: Any) -> DynamicLossScaling:
        """The loss scaling after a step with gradients that were finite, or not."""
        return self._after(GradStats(jax_rule.boolean_scalar("grads_finite", grads_finite)))

    def _factor(self) -> jax.Array:
        return jnp.asarray(self.loss_scaling, jnp.float32)

    def _after(self, stats: GradStats) -> DynamicLossScaling:
        """The loss scaling after a step with these statistics."""
        rule = jax_rule.rule(self.factor, 1 / self.factor, self.period, FLOAT16.max)
        moved, counter = jax_rule.advance(rule, self.loss_scaling, self.counter, stats)
        dtype = self.loss_scaling.dtype
        floor = jnp.minimum(jnp.asarray(self.min_loss_scaling, jnp.float32), FLOAT16_MAX)
        floor = jnp.maximum(floor, jnp.asarray(jnp.finfo(dtype).smallest_normal, jnp.float32))
        scaling = jnp.clip(moved, floor, FLOAT16_MAX).astype(dtype)
        # Not by the constructor, which would wait for the device to check the new scale.
        places = lambda it: (it.loss_scaling, it.counter)  # noqa: E731
        moved_on: DynamicLossScaling = eqx.tree_at(places, self, (scaling, counter))
        return moved_on


def _scalar(name: str, value: Any) -> jax.Array:
    """`value` as an array: of float32 if it is a Python number or not floating."""
    array = jnp.asarray(value)
    if array.ndim:
        raise SettingError(f"{name} must be a scalar, got shape {array.shape}.")
    typed = not isinstance(value, int | float) and jnp.issubdtype(array.dtype, jnp.floating)
    return array if typed else array.astype(jnp.float32)


def scaled(
    func: Callable[..., Any], scaling: DynamicLossScaling, has_aux: bool = False
) -> Callable[..., Any]:
    """`func` with its result, or with `has_aux` the first of two, scaled by `scaling`."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if has_aux:
            value, aux = func(*args, **kwargs)
            return scaling.scale(value), aux
        return scaling.scale(func(*args, **kwargs))

    return wrapper


def select_tree(pred: Any, a: Any, b: Any) -> Any:
    """`a` where the boolean scalar `pred` is true, else `b`; leaves that are no arrays from `a`."""
    return select(pred, a, b, is_array)


def calculate_scaled_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., Any]:
    """`eqx.filter_value_and_grad` of `func` in half precision, scaled; nothing is unscaled.

    Without `use_mixed_precision` it is `eqx.filter_value_and_grad` itself.
    """
    if not use_mixed_precision:
        return _differentiated(func, has_aux)
    inner = _differentiated(scaled(func, scaling, has_aux), has_aux)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_to_half_precision((args, kwargs))
        return inner(*args, **kwargs)

    return wrapper


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., Any]:
    """`eqx.filter_value_and_grad` of `func` in half precision under `scaling`.

    Args:
        func: A function whose result is a scalar loss, or with `has_aux` a pair of it and more; it
            is differentiated by its first argument.
        scaling: The loss scaling of this step.
        has_aux: Whether `func` returns a pair.
        use_mixed_precision: If False, nothing is cast, scaled or checked.

    Returns:
        A function of the arguments of `func` that returns the loss (with `has_aux` a pair of it and
        the rest), the loss scaling of the next step, whether the gradients are finite, and the
        gradients, unscaled in float32.
    """

    def with_loss(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        loss, aux = func(*args, **kwargs) if has_aux else (func(*args, **kwargs), None)
        return loss, (loss, aux)

    differentiated = calculate_scaled_grad(with_loss, scaling, True, use_mixed_precision)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        (_, (loss, aux)), grads = differentiated(*args, **kwargs)
        moved, finite = scaling, jnp.asarray(True)
        if use_mixed_precision:
            grads = jax.tree_util.tree_map(widened, grads)
            # By the scale of this pass, not by the one that comes of it.
            grads, stats = measured(grads, scaling._factor(), jnp.isfinite(loss))
            moved, finite, loss = scaling._after(stats), stats.fits, widened(loss)
        return (loss, aux) if has_aux else loss, moved, finite, grads

    return wrapper


def filter_grad(
    func: Callable[..., Any],
    scaling: DynamicLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., Any]:
    """`filter_value_and_grad` without the loss, in another order.

    Returns:
        A function of the arguments of `func` that returns the loss scaling of the next step,
        whether the gradients are finite, the gradients, and with `has_aux` the rest.
    """
    differentiated = filter_value_and_grad(func, scaling, has_aux, use_mixed_precision)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        value, *found = differentiated(*args, **kwargs)
        return (*found, value[1]) if has_aux else tuple(found)

    return wrapper


def _differentiated(func: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    made: Callable[..., Any] = eqx.filter_value_and_grad(func, has_aux=has_aux)
    return made


def optimizer_update(
    model: Any, optimizer: Any, optimizer_state: Any, grads: Any, grads_finite: Any
) -> tuple[Any, Any]:
    """Model and optimizer state after a step of an optax optimizer, or as they were.

    Args:
        model: Any tree, such as an `eqx.Module`.
        optimizer: An `optax.GradientTransformation`.
        optimizer_state: Its state.
        grads: The unscaled gradients.
        grads_finite: Whether to step: a boolean scalar.
    """
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, stepped = optimizer.update(grads, optimizer_state, params)
    new_model = select_tree(grads_finite, eqx.apply_updates(model, updates), model)
    return new_model, select_tree(grads_finite, stepped, optimizer_state)
