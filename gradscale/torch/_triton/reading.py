"""One pass over gradients: are they finite, how large, what norm; who is to blame if not.

Every program reads one chunk and leaves what it found in a slot of its own; the slots of a tensor
are then gathered in order, and those of all tensors. Nothing is added with atomics, so the same
gradients give the same bits, always.

A square can overflow or vanish where its root does not. So a chunk whose largest magnitude is too
large or too small for that is read again, with a power of two taken out; that is rare, and so is
the second look that counts infinities and NaNs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch._triton.tables import CHUNK, Table

BLOCK = tl.constexpr(4096)
# Squares of magnitudes between these, and sums of them, stay within float32.
_LOW = tl.constexpr(2.0**-40)
_HIGH = tl.constexpr(2.0**50)
# Binades that are taken out of larger ones, and put into smaller ones.
_DOWN = tl.constexpr(80)
_UP = tl.constexpr(90)
_DOWNWARDS = tl.constexpr(2.0**-80)
_UPWARDS = tl.constexpr(2.0**90)
_INFINITY = tl.constexpr(float("inf"))
_NOWHERE = tl.constexpr(-100000)
"""The exponent of a norm of 0."""

ELEMENTS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""The formats that the kernels read."""


@triton.jit
def _power_of_two(exponent):
    """2**exponent for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load(pointer, offsets, left, WHOLE: tl.constexpr):
    """Elements as float32, 0 beyond the end. Unmasked where possible: masks forbid wide loads."""
    if WHOLE:
        return tl.load(pointer + offsets).to(tl.float32)
    return tl.load(pointer + offsets, mask=offsets < left, other=0.0).to(tl.float32)


@triton.jit
def _look(pointer, left, CHUNK: tl.constexpr, WHOLE: tl.constexpr):
    """The largest magnitude (infinite if something is not finite) and the sum of squares."""
    peak = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK):
        x = load(pointer, start + tl.arange(0, BLOCK), left, WHOLE)
        peak = tl.maximum(peak, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
        total += x * x
    return tl.max(tl.where(peak == peak, peak, _INFINITY), 0), tl.sum(total, 0)


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
        peak = tl.maximum(peak, tl.where(x < _INFINITY, x, 0.0))
        infs += (x == _INFINITY).to(tl.int32)
        nans += (x != x).to(tl.int32)
    return tl.max(peak, 0), tl.sum(infs, 0), tl.sum(nans, 0)


@triton.jit
def _underflow(pointer, left, smallest_normal, CHUNK: tl.constexpr):
    """How many elements are below `smallest_normal` and not 0, and how many are not 0."""
    small = tl.zeros((BLOCK,), dtype=tl.int32)
    nonzero = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, CHUNK, BLOCK):
        x = tl.abs(load(pointer, start + tl.arange(0, BLOCK), left, False))
        small += ((x < smallest_normal) & (x > 0)).to(tl.int32)
        nonzero += (x != 0).to(tl.int32)
    return tl.sum(small, 0), tl.sum(nonzero, 0)


@triton.jit
def _read_chunks(
    addresses,
    sizes,
    firsts,
    owners,
    amaxes,
    squares,
    exponents,
    counts,
    smallest_normal,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNDERFLOW: tl.constexpr,
):
    """What each chunk is like: amax of the finite elements, squares times 4**exponent, counts."""
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    start = (chunk - tl.load(firsts + owner)).to(tl.int64) * CHUNK
    left = tl.load(sizes + owner) - start
    pointer = tl.load(addresses + owner).to(tl.pointer_type(element))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    pointer += start
    if left >= CHUNK:
        amax, total = _look(pointer, left, CHUNK, True)
    else:
        amax, total = _look(pointer, left, CHUNK, False)
    exponent = 0
    infs = 0
    nans = 0
    if amax == _INFINITY:
        amax, infs, nans = _count(pointer, left, CHUNK)
    elif amax > _HIGH:
        exponent = _DOWN
        total = _squares(pointer, left, _DOWNWARDS, CHUNK)
    elif (amax < _LOW) & (amax > 0):
        exponent = -_UP
        total = _squares(pointer, left, _UPWARDS, CHUNK)
    tl.store(amaxes + chunk, amax)
    tl.store(squares + chunk, total)
    tl.store(exponents + chunk, exponent)
    tl.store(counts + 4 * chunk, infs)
    tl.store(counts + 4 * chunk + 1, nans)
    if UNDERFLOW:
        small, nonzero = _underflow(pointer, left, smallest_normal, CHUNK)
        tl.store(counts + 4 * chunk + 2, small)
        tl.store(counts + 4 * chunk + 3, nonzero)


@triton.jit
def _gather_tensors(
    firsts,
    amaxes,
    squares,
    exponents,
    counts,
    inv_scales,
    stride,
    reports,
    numbers,
    element: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What each tensor is like, from its chunks.

    `reports`: amax, whether it fits, and its unscaled norm as a fraction; `numbers`: the norm's
    exponent and the counts.
    """
    tensor = tl.program_id(0)
    begin = tl.load(firsts + tensor)
    end = tl.load(firsts + tensor + 1)
    peak = tl.zeros((WIDTH,), dtype=tl.float32)
    highest = tl.full((WIDTH,), _NOWHERE, dtype=tl.int32)
    infs = tl.zeros((WIDTH,), dtype=tl.int64)
    nans = tl.zeros((WIDTH,), dtype=tl.int64)
    small = tl.zeros((WIDTH,), dtype=tl.int64)
    nonzero = tl.zeros((WIDTH,), dtype=tl.int64)
    for start in range(begin, end, WIDTH):
        places = start + tl.arange(0, WIDTH)
        there = places < end
        peak = tl.maximum(peak, tl.load(amaxes + places, mask=there, other=0.0))
        some = tl.load(squares + places, mask=there, other=0.0) > 0
        exponent = tl.load(exponents + places, mask=there, other=0)
        highest = tl.maximum(highest, tl.where(some, exponent, _NOWHERE))
        infs += tl.load(counts + 4 * places, mask=there, other=0)
        nans += tl.load(counts + 4 * places + 1, mask=there, other=0)
        small += tl.load(counts + 4 * places + 2, mask=there, other=0)
        nonzero += tl.load(counts + 4 * places + 3, mask=there, other=0)
    top = tl.max(highest, 0)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(begin, end, WIDTH):
        places = start + tl.arange(0, WIDTH)
        there = places < end
        exponent = tl.load(exponents + places, mask=there, other=0)
        # In two steps, because the square of the factor can vanish where the product does not.
        factor = _power_of_two(tl.maximum(exponent - top, -126))
        total += tl.load(squares + places, mask=there, other=0.0) * factor * factor
    amax = tl.max(peak, 0)
    inv_scale = tl.load(inv_scales + tensor * stride)
    fraction, exponent = _split(tl.sqrt_rn(tl.sum(total, 0)))
    inv_fraction, inv_exponent = _split(inv_scale)
    fraction, more = _split(fraction * inv_fraction)
    fits = (amax * inv_scale).to(element).to(tl.float32) < _INFINITY
    tl.store(reports + 4 * tensor, amax)
    tl.store(reports + 4 * tensor + 1, fits.to(tl.float32))
    tl.store(reports + 4 * tensor + 2, fraction)
    exponent = tl.where(fraction > 0, top + exponent + inv_exponent + more, _NOWHERE)
    tl.store(numbers + 5 * tensor, exponent)
    tl.store(numbers + 5 * tensor + 1, tl.sum(infs, 0))
    tl.store(numbers + 5 * tensor + 2, tl.sum(nans, 0))
    tl.store(numbers + 5 * tensor + 3, tl.sum(small, 0))
    tl.store(numbers + 5 * tensor + 4, tl.sum(nonzero, 0))


@triton.jit
def _split(x):
    """A positive normal number as a fraction from 1 to 2 and an exponent; 0 stays 0."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x > 0, fraction, 0.0), tl.where(x > 0, (bits >> 23) - 127, 0)


@triton.jit
def summarize(reports, numbers, tensors, max_norm, WIDTH: tl.constexpr):
    """What all tensors together are like: the fields of `Summary`, in order."""
    bad = tl.zeros((WIDTH,), dtype=tl.int64)
    nans = tl.zeros((WIDTH,), dtype=tl.int64)
    small = tl.zeros((WIDTH,), dtype=tl.int64)
    nonzero = tl.zeros((WIDTH,), dtype=tl.int64)
    peak = tl.zeros((WIDTH,), dtype=tl.float32)
    misfits = tl.zeros((WIDTH,), dtype=tl.int32)
    highest = tl.full((WIDTH,), _NOWHERE, dtype=tl.int64)
    for start in range(0, tensors, WIDTH):
        places = start + tl.arange(0, WIDTH)
        there = places < tensors
        peak = tl.maximum(peak, tl.load(reports + 4 * places, mask=there, other=0.0))
        fits = tl.load(reports + 4 * places + 1, mask=there, other=1.0)
        misfits += (fits == 0).to(tl.int32)
        highest = tl.maximum(highest, tl.load(numbers + 5 * places, mask=there, other=_NOWHERE))
        nan = tl.load(numbers + 5 * places + 2, mask=there, other=0)
        bad += tl.load(numbers + 5 * places + 1, mask=there, other=0) + nan
        nans += nan
        small += tl.load(numbers + 5 * places + 3, mask=there, other=0)
        nonzero += tl.load(numbers + 5 * places + 4, mask=there, other=0)
    top = tl.max(highest, 0)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, tensors, WIDTH):
        places = start + tl.arange(0, WIDTH)
        there = places < tensors
        exponent = tl.load(numbers + 5 * places, mask=there, other=_NOWHERE)
        behind = tl.maximum(exponent - top, -126).to(tl.int32)
        fraction = tl.load(reports + 4 * places + 2, mask=there, other=0.0) * _power_of_two(behind)
        total += fraction * fraction
    root = tl.sqrt_rn(tl.sum(total, 0))
    found = tl.sum(bad, 0) > 0
    some_nan = tl.sum(nans, 0) > 0
    norm = _times_power(root, top)
    # A norm beyond float32 still has a quotient.
    wide = max_norm / (norm + 1e-6)
    narrow = _times_power(tl.div_rn(max_norm, root), -top)
    clip = tl.minimum(tl.where(norm < _INFINITY, wide, narrow), 1.0)
    amax = tl.where(some_nan, float("nan"), tl.where(found, _INFINITY, tl.max(peak, 0)))
    share = tl.sum(small, 0).to(tl.float32) / tl.maximum(tl.sum(nonzero, 0), 1).to(tl.float32)
    fits = tl.sum(misfits, 0) == 0
    return found, fits, amax, norm, clip, share, tl.max(peak, 0)


@triton.jit
def _gather_all(
    reports,
    numbers,
    tensors,
    max_norm,
    summary,
    WIDTH: tl.constexpr,
):
    """Writes what `summarize` says."""
    found, fits, amax, norm, clip, share, peak = summarize(
        reports, numbers, tensors, max_norm, WIDTH
    )
    tl.store(summary, found.to(tl.float32))
    tl.store(summary + 1, fits.to(tl.float32))
    tl.store(summary + 2, amax)
    tl.store(summary + 3, norm)
    tl.store(summary + 4, clip)
    tl.store(summary + 5, share)
    tl.store(summary + 6, peak)


@triton.jit
def _times_power(x, exponent):
    """`x` times 2**exponent, for any exponent; infinite or 0 where float32 ends."""
    held = tl.minimum(tl.maximum(exponent, -300), 300).to(tl.int32)
    first = held // 3
    return x * _power_of_two(first) * _power_of_two(first) * _power_of_two(held - 2 * first)


class Summary(NamedTuple):
    """What a list of gradients is like, as device values."""

    found_inf: Tensor
    """float32: 1 if a scaled element is not finite, else 0."""
    fits: Tensor
    """float32: 1 if every unscaled element is finite where it is stored."""
    amax: Tensor
    """float32: the largest scaled magnitude, infinite or NaN if there is one."""
    norm: Tensor
    """float32: the 2-norm of the unscaled elements, which means nothing if one is not finite."""
    clip: Tensor
    """float32: what clips that norm to `max_norm`, at most 1."""
    underflow: Tensor
    """float32: share of the nonzero scaled elements below the smallest normal number."""
    finite_amax: Tensor
    """float32: the largest scaled magnitude among the finite elements."""


class Gathered(NamedTuple):
    """What every tensor is like, on the device: what `summarize` takes."""

    reports: Tensor
    numbers: Tensor
    tensors: int

    @property
    def counts(self) -> Tensor:
        """int64: a row (infinities, NaNs) for every tensor."""
        return self.numbers[:, 1:3]


def gather(
    groups: Sequence[tuple[torch.dtype, Table]],
    inv_scale: Tensor,
    smallest_normal: float | None = None,
) -> Gathered:
    """What every tensor of `groups` is like: one pass over all of them.

    Args:
        groups: Formats, and where the tensors of each lie.
        inv_scale: float32: what they must be multiplied by, for all or, as a vector, for each.
        smallest_normal: Below it an element underflows; None does not measure that.
    """
    device = groups[0][1].device
    tensors = sum([len(table.chunks.sizes) for _, table in groups])
    reports = torch.empty(4 * tensors, dtype=torch.float32, device=device)
    numbers = torch.empty((tensors, 5), dtype=torch.int64, device=device)
    tensor = 0
    for dtype, table in groups:
        chunks, workspace = table.chunks, _workspace(table)
        members = len(chunks.sizes)
        if chunks.total:
            _read_chunks[(chunks.total,)](
                table.addresses,
                chunks.sizes,
                chunks.firsts,
                chunks.owners,
                *workspace,
                0.0 if smallest_normal is None else smallest_normal,
                element=ELEMENTS[dtype],
                CHUNK=CHUNK,
                ALIGNED=table.aligned,
                UNDERFLOW=smallest_normal is not None,
                num_warps=8,
            )
        _gather_tensors[(members,)](
            chunks.firsts,
            *workspace,
            inv_scale[tensor:] if inv_scale.dim() else inv_scale,
            inv_scale.dim(),
            reports[4 * tensor :] if tensor else reports,
            numbers[tensor:] if tensor else numbers,
            element=ELEMENTS[dtype],
            WIDTH=128,
        )
        tensor += members
    return Gathered(reports, numbers, tensors)


def _workspace(table: Table) -> tuple[Tensor, ...]:
    """Slots for every chunk: amax, squares, exponent, and four counts."""
    if not table.workspace:
        total, device = max(table.chunks.total, 1), table.device
        table.workspace = (
            torch.empty(total, dtype=torch.float32, device=device),
            torch.empty(total, dtype=torch.float32, device=device),
            torch.empty(total, dtype=torch.int32, device=device),
            torch.zeros(4 * total, dtype=torch.int32, device=device),
        )
    return table.workspace


def read(
    groups: Sequence[tuple[torch.dtype, Table]],
    inv_scale: Tensor,
    max_norm: float = float("inf"),
    smallest_normal: float | None = None,
) -> tuple[Summary, Tensor]:
    """What the tensors of `groups` are like together, and a row (infs, NaNs) for every tensor.

    `Summary.clip` clips to `max_norm`; the rest is as in `gather`.
    """
    gathered = gather(groups, inv_scale, smallest_normal)
    summary = torch.empty(7, dtype=torch.float32, device=inv_scale.device)
    _gather_all[(1,)](*gathered, max_norm, summary, WIDTH=512)
    return Summary(*summary), gathered.counts
