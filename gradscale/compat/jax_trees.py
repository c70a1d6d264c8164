"""Functions of whole pytrees that jmp, Flax and mpx have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.compat.jax_rule import boolean_scalar
from gradscale.policy import GradStats

STANDARD = functools.partial(jax.numpy_dtype_promotion, "standard")
"""Promotion of types in our own arithmetic, whatever `jax_numpy_dtype_promotion` is."""


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of every leaf is finite, as a boolean scalar; True without leaves."""
    flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree_util.tree_leaves(tree)]
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, or a scalar, of JAX or NumPy."""
    return isinstance(leaf, np.ndarray | np.generic | jax.Array)


def select(pred: Any, a: Any, b: Any, is_selected: Callable[[Any], bool]) -> Any:
    """`a` where the boolean scalar `pred` is true, else `b`; of other leaves those of `a`."""
    chosen = boolean_scalar("pred", pred)

    def leaf(x: Any, y: Any) -> Any:
        return jax.lax.select(chosen, x, y) if is_selected(x) else x

    return jax.tree_util.tree_map(leaf, a, b)


def widened(x: Any) -> jax.Array:
    """`x` in float32, or in its own format if that is wider."""
    array = jnp.asarray(x)
    with STANDARD():
        return array.astype(jnp.result_type(array.dtype, jnp.float32))


def measured(grads: Any, scale: jax.Array, loss_finite: jax.Array) -> tuple[Any, GradStats]:
    """The scaled gradients `grads` divided by `scale` (float32), and their statistics.

    One reduction, of what is unscaled, in almost every step: only a scale below 1 can make an
    infinity of a finite number, and only then the scaled gradients are read as well.
    """
    with STANDARD():
        unscaled = jax.tree_util.tree_map(lambda grad: grad / scale, grads)
    fits = all_finite(unscaled)
    # `| fits` adds nothing but what shard_map knows of it: both branches must vary over one mesh.
    finite = jax.lax.cond(
        jnp.logical_not(fits) & (scale < 1.0), lambda: all_finite(grads) | fits, lambda: fits
    )
    return unscaled, GradStats(finite=finite, loss_finite=loss_finite, fits=fits)
