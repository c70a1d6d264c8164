"""Passes that only write: gradients times a factor, or set to 0."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.chunks import ELEMENTS, chunk_of, clear, pointer_to
from gradscale.torch.grads.triton.chunks import multiply as multiply_chunk
from gradscale.torch.grads.triton.launch import Kernel, formats_of
from gradscale.torch.grads.triton.measure import Tables
from gradscale.torch.grads.triton.tables import CHUNK


@Kernel
def _multiply(
    addresses,
    sizes,
    firsts,
    owners,
    factor_at,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Multiplies a chunk by the factor."""
    owner, start, left = chunk_of(sizes, firsts, owners, tl.program_id(0), CHUNK)
    pointer = pointer_to(addresses, owner, start, element, ALIGNED)
    multiply_chunk(pointer, left, tl.load(factor_at), CHUNK)


def multiply(tables: Tables, factor: Tensor) -> None:
    """Multiplies the tensors of `tables` in place by the float32 `factor`, each rounded once."""
    for dtype, table in tables:
        _multiply(
            table.chunks.total,
            (table.addresses, *table.chunks[:3], factor),
            (ELEMENTS[dtype], CHUNK, table.aligned),
            num_warps=8,
        )


@Kernel
def _zero(
    addresses,
    sizes,
    firsts,
    owners,
    where_at,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sets a chunk to 0 if the flag is not 0."""
    if tl.load(where_at) != 0:
        owner, start, left = chunk_of(sizes, firsts, owners, tl.program_id(0), CHUNK)
        pointer = pointer_to(addresses, owner, start, element, ALIGNED)
        clear(pointer, left, CHUNK)


def zero(tables: Tables, where: Tensor) -> None:
    """Sets the tensors of `tables` to 0 if the flag `where`, a bool or a number, is not 0.

    By selection, because infinity times 0 is NaN. The host does not wait for the flag.
    """
    for dtype, table in tables:
        _zero(
            table.chunks.total,
            (table.addresses, *table.chunks[:3], where),
            (ELEMENTS[dtype], CHUNK, table.aligned),
            formats_of(where),
            num_warps=8,
        )
