"""What one backward pass left in the gradients, in operations of `keras.ops`.

The largest magnitude shows infinities. The sum of squares shows NaN, which a maximum may drop (XLA
on the CPU does), and is the norm as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops

from gradscale.formats import FLOAT32, FORMATS, Format, format_named
from gradscale.policy import GradStats, Policy

_FACTOR = 2.0**-16
"""Elements are multiplied by it, so that the squares of float16 numbers are far from overflow."""


class Found(NamedTuple):
    """What was found in the gradients of one replica, or of all of them."""

    amax: Any
    """float32: the largest magnitude; NaN may be missing from it."""
    nan: Any
    """bool: an element is NaN."""
    fits: Any
    """bool: no element is infinite once it is unscaled and stored."""
    norm: Any
    """float32: the 2-norm."""


class Gradient(NamedTuple):
    """One gradient as it is measured."""

    values: Any
    """The array; of a sparse gradient the sums of its rows."""
    format: Format | None
    """What it is stored in once it is unscaled; None: float64."""
    is_scaled: bool = True
    """False if the gradient overwrites its variable: it is checked for infinity and NaN, and not
    unscaled."""


def measured(gradients: Sequence[Gradient], scale: Any) -> Found:
    """What is found in `gradients`, which have the scale `scale` (float32)."""
    zero = ops.full_like(scale, 0.0)
    amaxes, squares, others, fits, size = [zero], [zero], [zero], [zero >= zero], 0.0
    for values, format, is_scaled in gradients:
        wide = values if _is_wide(values) else ops.cast(values, "float32")
        amax = ops.cast(_clamped(ops.max(ops.abs(wide), initial=0.0)), "float32")
        square = ops.cast(ops.sum(ops.square(wide * _FACTOR)), "float32")
        if not is_scaled:
            others += [amax - amax + (square - square)]  # NaN if an element is not finite
            continue
        amaxes, squares = [*amaxes, amax], [*squares, square]
        size = size + _size(wide)
        if format is not None:
            fits += [amax / scale <= ops.full_like(scale, format.max)]
    square, amax = ops.sum(ops.stack(squares)), ops.max(ops.stack(amaxes))
    other = ops.sum(ops.stack(others))
    nan = ops.isnan(square) | ops.isnan(other)
    # If the squares overflow all the same, the norm of as many of the largest is above it.
    norm = ops.sqrt(square) / ops.full_like(square, _FACTOR)
    most = amax * ops.sqrt(ops.full_like(amax, 1.0) * size)
    most = ops.minimum(most, ops.full_like(most, FLOAT32.max))  # clipping divides by it
    norm = ops.where(ops.isfinite(norm) | nan, norm, most)
    return Found(amax, nan, ops.all(ops.stack(fits)), norm)


def placed(found: Found, scale: Any, held: Any) -> Found:
    """`found` with `amax` as it is at `scale`, and the norm as it is without a scale.

    Args:
        found: What was found in gradients.
        scale: The scale that they were made with.
        held: The scale that they had when they were measured: `scale`, or 1 if they were unscaled.
    """
    amax = found.amax * (scale / held)
    most = ops.minimum(amax, ops.full_like(amax, FLOAT32.max))
    amax = ops.where(ops.isfinite(found.amax), most, found.amax)
    return found._replace(amax=amax, norm=found.norm / held)


def joined(unscaled: Found, scaled: Found) -> Found:
    """What was found in unscaled gradients and, before, in the scaled ones.

    What became infinite or NaN in between does not lower the scale.
    """
    fits = unscaled.fits & scaled.fits & is_finite(unscaled)
    return scaled._replace(fits=fits | ops.logical_not(is_finite(scaled)), norm=unscaled.norm)


def either(one: Found, other: Found) -> Found:
    """What was found in one of two sets of gradients; the norm is that of `other`."""
    amax = ops.maximum(one.amax, other.amax)
    return other._replace(amax=amax, nan=one.nan | other.nan, fits=one.fits & other.fits)


def is_finite(found: Found) -> Any:
    """bool: every element is finite."""
    return ops.isfinite(found.amax) & ops.logical_not(found.nan)


def stats_from(found: Found, loss_finite: Any) -> GradStats:
    """The statistics for a policy, of what was found and `placed`; `loss_finite` is a bool."""
    nan, finite = ops.full_like(found.amax, math.nan), is_finite(found)
    return GradStats(
        finite=finite,
        amax=ops.where(found.nan, nan, found.amax),
        loss_finite=loss_finite,
        fits=found.fits | ops.logical_not(finite),
        norm=found.norm,
    )


def applies(stats: GradStats) -> Any:
    """bool: whether a step with these `stats` is to be applied rather than skipped."""
    return stats.finite & stats.fits & stats.loss_finite


def divided(gradient: Any, divisor: Any) -> Any:
    """`gradient` divided by a float32 number: in float32, or float64 where it is."""
    # Multiplying would make a sparse gradient of TensorFlow's dense.
    return ops.divide(gradient, divisor)


def format_of(policy: Policy) -> Format:
    """The narrowest format of the backward pass."""
    return format_named(getattr(policy, "format", "float16"))


def stored_format(variable: Any) -> Format | None:
    """The format of a variable; None if it is float64."""
    return FORMATS.get(dtype_of(variable))


def dtype_of(tensor: Any) -> str:
    """The name of the type of a tensor or variable of any backend."""
    dtype = getattr(tensor, "dtype", "float32")
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _is_wide(tensor: Any) -> bool:
    return dtype_of(tensor) in ("float32", "float64")


def _clamped(amax: Any) -> Any:
    """A finite float64 number as one that float32 has; others as they are."""
    if dtype_of(amax) != "float64":
        return amax
    return ops.where(ops.isfinite(amax), ops.minimum(amax, ops.full_like(amax, FLOAT32.max)), amax)


def _size(tensor: Any) -> Any:
    """How many elements there are: a number, or a float32 tensor where the shape is not known."""
    if any(dim is None for dim in tensor.shape):
        return ops.cast(ops.size(tensor), "float32")
    return float(math.prod(tensor.shape))
