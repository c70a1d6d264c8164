"""A pass that multiplies gradients by a factor."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.chunks import ELEMENTS, chunk_of, pointer_to
from gradscale.torch.grads.triton.chunks import multiply as multiply_chunk
from gradscale.torch.grads.triton.launch import Kernel
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
            (),
            (ELEMENTS[dtype], CHUNK, table.aligned),
            num_warps=8,
        )
