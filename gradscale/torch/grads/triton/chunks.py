"""Looking at one chunk of a gradient: what a program of a kernel finds in the part that it reads.

A square can overflow or vanish where its root does not. So a chunk whose largest magnitude is too
large or too small for that is read again, with a power of two taken out; that is rare, and so is
the second look that counts infinities and NaNs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(4096)
"""Elements that a program has in hand at a time."""
INFINITY = tl.constexpr(float("inf"))
# Squares of magnitudes between these, and sums of them, stay within float32.
_LOW = tl.constexpr(2.0**-40)
_HIGH = tl.constexpr(2.0**50)
# Binades that are taken out of larger ones, and put into smaller ones.
_DOWN = tl.constexpr(80)
_UP = tl.constexpr(90)
_DOWNWARDS = tl.constexpr(2.0**-80)
_UPWARDS = tl.constexpr(2.0**90)

ELEMENTS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""The formats that the kernels take."""


@triton.jit
def chunk_of(sizes, firsts, owners, chunk, CHUNK: tl.constexpr):
    """Whose chunk this is, where it begins, and how many elements are left from there."""
    owner = tl.load(owners + chunk)
    start = (chunk - tl.load(firsts + owner)).to(tl.int64) * CHUNK
    return owner, start, tl.load(sizes + owner) - start


@triton.jit
def pointer_to(addresses, place, start, element: tl.constexpr, ALIGNED: tl.constexpr):
    """To element `start` of the tensor whose address is at `place`."""
    pointer = tl.load(addresses + place).to(tl.pointer_type(element))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def power_of_two(exponent):
    """2**exponent for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """A positive normal number as a fraction from 1 to 2 and an exponent; 0 stays 0."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x > 0, fraction, 0.0), tl.where(x > 0, (bits >> 23) - 127, 0)


@triton.jit
def fetch(pointer, offsets, left, WHOLE: tl.constexpr):
    """Elements, 0 beyond the end. Unmasked where possible: masks forbid wide loads."""
    if WHOLE:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=offsets < left, other=0)


@triton.jit
def load(pointer, offsets, left, WHOLE: tl.constexpr):
    """Elements as float32, 0 beyond the end."""
    return fetch(pointer, offsets, left, WHOLE).to(tl.float32)


@triton.jit
def store(pointer, offsets, left, values, WHOLE: tl.constexpr):
    """Writes `values` in the format that is stored there."""
    rounded = values.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + offsets, rounded)
    else:
        tl.store(pointer + offsets, rounded, mask=offsets < left)


@triton.jit
def _look(pointer, left, factor, CHUNK: tl.constexpr, WHOLE: tl.constexpr, MULTIPLY: tl.constexpr):
    """The largest magnitude (infinite if something is not finite) and the sum of squares.

    `MULTIPLY` multiplies the elements by `factor` afterwards.
    """
    peak = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = load(pointer, offsets, left, WHOLE)
        peak = tl.maximum(peak, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        total += x * x
        if MULTIPLY:
            store(pointer, offsets, left, x * factor, WHOLE)
    # Infinite if there is a NaN.
    return tl.max(tl.where(peak == peak, peak, INFINITY), 0), tl.sum(total, 0)


@triton.jit
def look(pointer, left, CHUNK: tl.constexpr):
    """Amax of the finite elements, squares times 4**exponent, exponent, infinities, NaNs."""
    if left >= CHUNK:
        amax, total = _look(pointer, left, 1.0, CHUNK, True, False)
    else:
        amax, total = _look(pointer, left, 1.0, CHUNK, False, False)
    exponent = 0
    infs = 0
    nans = 0
    if amax == INFINITY:
        amax, infs, nans = _count(pointer, left, CHUNK)
    elif amax > _HIGH:
        exponent = _DOWN
        total = _squares(pointer, left, _DOWNWARDS, CHUNK)
    elif (amax < _LOW) & (amax > 0):
        exponent = -_UP
        total = _squares(pointer, left, _UPWARDS, CHUNK)
    return amax, total, exponent, infs, nans


@triton.jit
def _squares(pointer, left, factor, CHUNK: tl.constexpr):
    """The sum of squares of elements times `factor`."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        x = load(pointer, start + tl.arange(0, BLOCK), left, False) * factor
        total += x * x
    return tl.sum(total, 0)


@triton.jit
def _count(pointer, left, CHUNK: tl.constexpr):
    """The largest finite magnitude, and how many elements are infinite and NaN."""
    peak = tl.zeros((BLOCK,), dtype=tl.float32)
    infs = tl.zeros((BLOCK,), dtype=tl.int32)
    nans = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, CHUNK, BLOCK):
        x = tl.abs(load(pointer, start + tl.arange(0, BLOCK), left, False))
        peak = tl.maximum(peak, tl.where(x < INFINITY, x, 0.0))
        infs += (x == INFINITY).to(tl.int32)
        nans += (x != x).to(tl.int32)
    return tl.max(peak, 0), tl.sum(infs, 0), tl.sum(nans, 0)


@triton.jit
def underflow(pointer, left, smallest_normal, CHUNK: tl.constexpr):
    """How many elements are below `smallest_normal` and not 0, and how many are not 0."""
    small = tl.zeros((BLOCK,), dtype=tl.int32)
    nonzero = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, CHUNK, BLOCK):
        x = tl.abs(load(pointer, start + tl.arange(0, BLOCK), left, False))
        small += ((x < smallest_normal) & (x > 0)).to(tl.int32)
        nonzero += (x != 0).to(tl.int32)
    return tl.sum(small, 0), tl.sum(nonzero, 0)


@triton.jit
def multiply(pointer, left, factor, CHUNK: tl.constexpr):
    """Multiplies the chunk by `factor`, in float32, each product rounded once."""
    if left >= CHUNK:
        for start in range(0, CHUNK, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            store(pointer, offsets, left, load(pointer, offsets, left, True) * factor, True)
    else:
        for start in range(0, CHUNK, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            store(pointer, offsets, left, load(pointer, offsets, left, False) * factor, False)


@triton.jit
def look_and_multiply(pointer, left, factor, CHUNK: tl.constexpr):
    """As `look`, of the elements before they are multiplied by `factor`.

    Where the squares leave float32 they are those of the products, so rounded once more.
    """
    infs = 0
    nans = 0
    exponent = 0
    if factor <= 1.0:
        if left >= CHUNK:
            amax, total = _look(pointer, left, factor, CHUNK, True, True)
        else:
            amax, total = _look(pointer, left, factor, CHUNK, False, True)
        if amax == INFINITY:
            # What was finite has stayed so, and what was not has, too.
            amax, infs, nans = _count(pointer, left, CHUNK)
            amax = tl.div_rn(amax, factor)
        elif (amax > _HIGH) | ((amax < _LOW) & (amax > 0)):
            product = amax * factor
            exponent = tl.where(product > _HIGH, _DOWN, tl.where(product < _LOW, -_UP, 0))
            shift = tl.where(product > _HIGH, _DOWNWARDS, tl.where(product < _LOW, _UPWARDS, 1.0))
            fraction, binades = split(factor)
            total = tl.div_rn(_squares(pointer, left, shift, CHUNK), fraction * fraction)
            exponent -= binades
    else:
        amax, total, exponent, infs, nans = look(pointer, left, CHUNK)
        multiply(pointer, left, factor, CHUNK)
    return amax, total, exponent, infs, nans
