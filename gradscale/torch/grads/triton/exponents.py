"""Counting elements by their exponent, in one read of a tensor."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.launch import Kernel

_BLOCK = 4096
_MOST_PROGRAMS = 1024
"""Each program adds its counts once, by 258 atomic operations: a few hundred thousand at most."""


@Kernel
def _count(values, row, numel, step, BLOCK: tl.constexpr):
    """Adds the exponents of every `step`-th of `numel` * `step` values to `row`.

    Elements past the end count as exponent 0; the reader subtracts what is too many.
    """
    found = tl.zeros([256], dtype=tl.int32)
    zeros = tl.zeros([BLOCK], dtype=tl.int32)
    nans = tl.zeros([BLOCK], dtype=tl.int32)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    while start < numel:
        places = start + tl.arange(0, BLOCK)
        inside = places < numel
        value = tl.load(values + places * step, mask=inside, other=0.0).to(tl.float32)
        size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        found += tl.histogram(size >> 23, 256)
        zeros += ((size == 0) & inside).to(tl.int32)
        nans += (size > 0x7F800000).to(tl.int32)
        start += stride
    tl.atomic_add(row + tl.arange(0, 256), found.to(tl.int64))
    tl.atomic_add(row + 256, tl.sum(zeros, axis=0).to(tl.int64))
    tl.atomic_add(row + 257, tl.sum(nans, axis=0).to(tl.int64))


def count(values: Tensor, row: Tensor, numel: int, step: int) -> None:
    """Adds the exponents of `numel` values, `step` places apart, to the int64 `row` of 258."""
    programs = min(-(-numel // _BLOCK), _MOST_PROGRAMS)
    _count(programs, (values, row), (numel, step), (_BLOCK,), (values.dtype,), num_warps=8)
