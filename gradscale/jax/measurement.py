"""What one backward pass left in the gradients: `GradStats` from one reading of each of them.

The largest magnitude shows infinities, and the sum of squares shows NaN and is the norm as well.
Both are needed: XLA's maximum drops NaN on the CPU (jaxlib 0.10.2, float32 arrays of 64 elements
and more), and a sum of squares may be infinite where no element is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.formats import FLOAT32, Format, format_named
from gradscale.policy import GradStats, Policy

Axes = str | Sequence[str] | None
"""Names of mapped axes."""


def measure(
    grads: Any,
    scale: Any,
    policy: Policy | None = None,
    *,
    keep_dtype: bool = False,
    sharded_over: Axes = None,
) -> GradStats:
    """Returns the statistics of the scaled gradients `grads`, without `loss_finite`.

    Args:
        grads: A pytree; leaves without a floating-point type are ignored.
        scale: The scale of the gradients (float32).
        policy: The policy that will use them; `exponent` is measured if it needs it.
        keep_dtype: Whether unscaled gradients are stored in their own types, which `fits` refers
            to; otherwise in float32.
        sharded_over: The mapped axes over which each shard has gradients of its own.
    """
    inverse = 1.0 / jnp.asarray(scale, dtype=jnp.float32)
    leaves = [leaf for leaf in jax.tree.leaves(lax.stop_gradient(grads)) if is_float(leaf)]
    # So that squares are normal float32 numbers. Scaled gradients are below the ceiling, which in
    # float16 says enough; in wider formats they may be anything, and unscaled ones are near 1. Not
    # `inverse` itself: XLA would store the product, which the optimizer needs as well.
    factor = 2.0**-16 if format_of(policy).max < 2.0**64 else inverse * 0.5
    nothing = jnp.zeros_like(inverse)
    each = [_Found(nothing, nothing, nothing == 0.0)]
    each += [_found(leaf, inverse, factor, keep_dtype) for leaf in leaves]
    # One reduction to three numbers. Pairwise, XLA made 27 kernels of 40 numbers (H200). By three
    # reductions it computed them again in every loop of the optimizer (CPU, jaxlib 0.10.2: a
    # program of 7.5 MB for 40 tensors).
    found = _Found(
        *lax.reduce(
            tuple(jnp.stack(numbers) for numbers in zip(*each, strict=True)),
            (nothing, nothing, nothing == 0.0),
            lambda one, other: (
                jnp.maximum(one[0], other[0]),
                one[1] + other[1],
                one[2] & other[2],
            ),
            (0,),
        )
    )
    size = sum(leaf.size for leaf in leaves)
    if sharded_over is not None:
        amax, square = lax.pmax(found.amax, sharded_over), lax.psum(found.square, sharded_over)
        found = _Found(amax, square, all_of(found.fits, sharded_over))
        size *= lax.psum(1, sharded_over)
    nan = jnp.isnan(found.square)
    amax = jnp.where(nan, found.square, found.amax)  # no constant NaN, for jax_debug_nans
    finite = jnp.isfinite(amax)
    # If the squares vanish all the same, the largest is below the norm, and if they overflow, the
    # norm of as many of the largest is above it.
    norm = jnp.maximum(jnp.sqrt(found.square) / factor, amax)
    most = jnp.minimum(amax * math.sqrt(size), FLOAT32.max)  # clipping divides by it
    norm = jnp.where(jnp.isinf(norm) & finite, most, norm) * inverse
    exponent = None
    if policy is not None and "exponent" in policy.goes_by:
        exponent = jnp.frexp(jnp.where(finite, amax, jnp.zeros_like(amax)))[1].astype(jnp.int32)
    return GradStats(
        finite=finite,
        amax=amax,
        loss_finite=jnp.ones_like(finite),
        fits=found.fits | ~finite,
        exponent=exponent,
        norm=norm,
    )


def unscale(grads: Any, scale: Any, *, keep_dtype: bool = False) -> Any:
    """Returns `grads` divided by `scale`: in float32, or float64 where they are, or in their types.

    Leaves without a floating-point type are returned unchanged.
    """
    inverse = 1.0 / jnp.asarray(scale, dtype=jnp.float32)

    def one(leaf: Any) -> Any:
        if not is_float(leaf):
            return leaf
        wide = widened(leaf)
        small = wide * inverse.astype(wide.dtype)
        return small.astype(leaf.dtype) if keep_dtype else small

    return jax.tree.map(one, grads)


class _Found(NamedTuple):
    """What was found in one gradient, or in several."""

    amax: Array
    """float32: the largest magnitude, scaled; NaN may be missing from it."""
    square: Array
    """float32: the sum of squares of elements times a factor; NaN if an element is."""
    fits: Array
    """bool: no element is infinite once it is unscaled."""


def _found(leaf: Any, inverse: Array, factor: float | Array, keep_dtype: bool) -> _Found:
    """What is found in `leaf`."""
    wide = widened(leaf)
    real = jnp.abs(wide) if jnp.iscomplexobj(wide) else wide
    small = inverse.astype(real.dtype)
    reduce = functools.partial(lax.platform_dependent, cpu=_by_loops, default=_at_once)
    amax, square = reduce(real, jnp.asarray(factor, dtype=real.dtype))
    kept = leaf.real.dtype if keep_dtype else real.dtype
    fits = jnp.isfinite((amax * small).astype(kept))
    if real.dtype != jnp.float32:  # a finite float64 number must not become infinite
        amax = jnp.where(jnp.isfinite(amax), jnp.minimum(amax, FLOAT32.max), amax)
    return _Found(amax.astype(jnp.float32), square.astype(jnp.float32), fits)


def _by_loops(real: Array, factor: Array) -> tuple[Array, Array]:
    """The largest magnitude, and the sum of squares of elements times `factor`: for CPUs.

    Two loops that store nothing. With one reduction to two numbers a step of 1.3 million parameters
    took 1.29 times as long as with Flax, with these 1.03 times (jaxlib 0.10.2).
    """
    return jnp.max(jnp.abs(real), initial=0.0), jnp.sum(jnp.square(real * factor))


def _at_once(real: Array, factor: Array) -> tuple[Array, Array]:
    """The same by one reduction to two numbers: for devices on which a kernel is launched for each.

    Of several reductions of a matrix XLA makes as many kernels (jaxlib 0.11, H200).
    """
    zero = jnp.zeros((), dtype=real.dtype)
    amax, square = lax.reduce(
        (jnp.abs(real), jnp.square(real * factor)),
        (zero, zero),
        lambda one, other: (jnp.maximum(one[0], other[0]), one[1] + other[1]),
        tuple(range(real.ndim)),
    )
    return amax, square


def all_of(flag: Array, axes: Axes) -> Array:
    """bool: whether `flag` is true in all shards; in this one if `axes` is None."""
    return flag if axes is None else lax.pmin(flag.astype(jnp.int32), axes) > 0


def is_float(leaf: Any) -> bool:
    """Whether `leaf` is an array of real or complex floating-point numbers."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def widened(leaf: Any) -> Array:
    """`leaf` in float32, unless its type has at least as many bits."""
    large = leaf.dtype.itemsize >= 4
    return leaf if large else leaf.astype(jnp.float32)


def format_of(policy: Policy | None) -> Format:
    """The narrowest format of the backward pass."""
    return format_named(getattr(policy, "format", "float16"))
