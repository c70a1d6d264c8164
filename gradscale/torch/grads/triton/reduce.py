"""From what chunks are like to what a tensor is like, and all tensors together.

Everything is gathered in a fixed order and nothing is added with float atomics, so the same
gradients give the same bits, always. A norm travels as a fraction and an exponent, because it may
be beyond float32 while every element is within.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscale.torch.grads.triton.chunks import INFINITY, power_of_two, split

FLOATS = tl.constexpr(2)
"""Of a chunk: the largest finite magnitude, and the sum of squares."""
INTS = tl.constexpr(5)
"""Of a chunk: the exponent of that sum; infinities, NaNs, small and nonzero elements."""
REPORTS = tl.constexpr(3)
"""Of a tensor: the largest finite magnitude, whether it fits, and the norm as a fraction."""
NUMBERS = tl.constexpr(3)
"""Of a tensor: the exponent of that norm; small and nonzero elements."""
COUNTS = tl.constexpr(2)
"""Of a tensor: infinities and NaNs."""
_NOWHERE = tl.constexpr(-100000)
"""The exponent of a norm of 0."""
_WIDTH = tl.constexpr(128)


@triton.jit
def _times_power(x, exponent):
    """`x` times 2**exponent, for any exponent; infinite or 0 where float32 ends."""
    held = tl.minimum(tl.maximum(exponent, -300), 300).to(tl.int32)
    first = held // 3
    return x * power_of_two(first) * power_of_two(first) * power_of_two(held - 2 * first)


@triton.jit
def _fetch(pointer, there, other):
    """What programs on other processors have just written: past the nearest cache."""
    return tl.load(pointer, mask=there, other=other, cache_modifier=".cg")


@triton.jit
def leave(floats, ints, chunk, amax, squares, exponent, infs, nans, small, nonzero):
    """Writes what a chunk is like."""
    tl.store(floats + FLOATS * chunk, amax)
    tl.store(floats + FLOATS * chunk + 1, squares)
    tl.store(ints + INTS * chunk, exponent)
    tl.store(ints + INTS * chunk + 1, infs)
    tl.store(ints + INTS * chunk + 2, nans)
    tl.store(ints + INTS * chunk + 3, small)
    tl.store(ints + INTS * chunk + 4, nonzero)


@triton.jit
def gather(floats, ints, begin, end, inv_scale, report, number, count, element: tl.constexpr):
    """Writes what the chunks `begin` to `end` of a tensor found to `report`, `number`, `count`."""
    peak = tl.zeros((_WIDTH,), dtype=tl.float32)
    highest = tl.full((_WIDTH,), _NOWHERE, dtype=tl.int32)
    infs = tl.zeros((_WIDTH,), dtype=tl.int64)
    nans = tl.zeros((_WIDTH,), dtype=tl.int64)
    small = tl.zeros((_WIDTH,), dtype=tl.int64)
    nonzero = tl.zeros((_WIDTH,), dtype=tl.int64)
    for start in range(begin, end, _WIDTH):
        places = start + tl.arange(0, _WIDTH)
        there = places < end
        peak = tl.maximum(peak, _fetch(floats + FLOATS * places, there, 0.0))
        some = _fetch(floats + FLOATS * places + 1, there, 0.0) > 0
        exponent = _fetch(ints + INTS * places, there, 0)
        highest = tl.maximum(highest, tl.where(some, exponent, _NOWHERE))
        infs += _fetch(ints + INTS * places + 1, there, 0)
        nans += _fetch(ints + INTS * places + 2, there, 0)
        small += _fetch(ints + INTS * places + 3, there, 0)
        nonzero += _fetch(ints + INTS * places + 4, there, 0)
    top = tl.max(highest, 0)
    total = tl.zeros((_WIDTH,), dtype=tl.float32)
    for start in range(begin, end, _WIDTH):
        places = start + tl.arange(0, _WIDTH)
        there = places < end
        exponent = _fetch(ints + INTS * places, there, 0)
        # In two steps, because the square of the factor can vanish where the product does not.
        factor = power_of_two(tl.maximum(exponent - top, -126))
        total += _fetch(floats + FLOATS * places + 1, there, 0.0) * factor * factor
    amax = tl.max(peak, 0)
    fraction, exponent = split(tl.sqrt_rn(tl.sum(total, 0)))
    inv_fraction, inv_exponent = split(inv_scale)
    fraction, more = split(fraction * inv_fraction)
    fits = (amax * inv_scale).to(element).to(tl.float32) < INFINITY
    tl.store(report, amax)
    tl.store(report + 1, fits.to(tl.float32))
    tl.store(report + 2, fraction)
    exponent = tl.where(fraction > 0, top + exponent + inv_exponent + more, _NOWHERE)
    tl.store(number, exponent)
    tl.store(number + 1, tl.sum(small, 0))
    tl.store(number + 2, tl.sum(nonzero, 0))
    tl.store(count, tl.sum(infs, 0))
    tl.store(count + 1, tl.sum(nans, 0))


@triton.jit
def summarize(reports, numbers, counts, tensors, max_norm):
    """What all tensors together are like: the values of `fields.SUMMARY`.

    They are non_finite, fits, amax, norm, clip, underflow and finite_amax, in this order.
    """
    bad = tl.zeros((_WIDTH,), dtype=tl.int64)
    nans = tl.zeros((_WIDTH,), dtype=tl.int64)
    small = tl.zeros((_WIDTH,), dtype=tl.int64)
    nonzero = tl.zeros((_WIDTH,), dtype=tl.int64)
    peak = tl.zeros((_WIDTH,), dtype=tl.float32)
    misfits = tl.zeros((_WIDTH,), dtype=tl.int32)
    highest = tl.full((_WIDTH,), _NOWHERE, dtype=tl.int64)
    for start in range(0, tensors, _WIDTH):
        places = start + tl.arange(0, _WIDTH)
        there = places < tensors
        peak = tl.maximum(peak, _fetch(reports + REPORTS * places, there, 0.0))
        misfits += (_fetch(reports + REPORTS * places + 1, there, 1.0) == 0).to(tl.int32)
        highest = tl.maximum(highest, _fetch(numbers + NUMBERS * places, there, _NOWHERE))
        nan = _fetch(counts + COUNTS * places + 1, there, 0)
        bad += _fetch(counts + COUNTS * places, there, 0) + nan
        nans += nan
        small += _fetch(numbers + NUMBERS * places + 1, there, 0)
        nonzero += _fetch(numbers + NUMBERS * places + 2, there, 0)
    top = tl.max(highest, 0)
    total = tl.zeros((_WIDTH,), dtype=tl.float32)
    for start in range(0, tensors, _WIDTH):
        places = start + tl.arange(0, _WIDTH)
        there = places < tensors
        exponent = _fetch(numbers + NUMBERS * places, there, _NOWHERE)
        behind = tl.maximum(exponent - top, -126).to(tl.int32)
        fraction = _fetch(reports + REPORTS * places + 2, there, 0.0) * power_of_two(behind)
        total += fraction * fraction
    root = tl.sqrt_rn(tl.sum(total, 0))
    found = tl.sum(bad, 0) > 0
    some_nan = tl.sum(nans, 0) > 0
    norm = _times_power(root, top)
    # A norm beyond float32 still has a quotient.
    wide = max_norm / (norm + 1e-6)
    narrow = _times_power(tl.div_rn(max_norm, root), -top)
    clip = tl.minimum(tl.where(norm < INFINITY, wide, narrow), 1.0)
    amax = tl.where(some_nan, float("nan"), tl.where(found, INFINITY, tl.max(peak, 0)))
    share = tl.sum(small, 0).to(tl.float32) / tl.maximum(tl.sum(nonzero, 0), 1).to(tl.float32)
    fits = (tl.sum(misfits, 0) == 0) | found
    return found, fits, amax, norm, clip, share, tl.max(peak, 0)
