"""Passes that write: gradients times a factor, and the state of a policy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradscale.policy import Dynamic, DynamicState, room_below
from gradscale.torch._triton.deciding import moved_dynamic
from gradscale.torch._triton.reading import BLOCK, ELEMENTS, load
from gradscale.torch._triton.tables import CHUNK, Table


@triton.jit
def _multiply_chunks(
    addresses,
    sizes,
    firsts,
    owners,
    factor,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Multiplies every element by `factor`, in float32, rounded once to where it is stored."""
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    start = (chunk - tl.load(firsts + owner)).to(tl.int64) * CHUNK
    left = tl.load(sizes + owner) - start
    pointer = tl.load(addresses + owner).to(tl.pointer_type(element))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    pointer += start
    by = tl.load(factor)
    if left >= CHUNK:
        for begin in range(0, CHUNK, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            x = load(pointer, offsets, left, True) * by
            tl.store(pointer + offsets, x.to(element))
    else:
        for begin in range(0, CHUNK, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            x = load(pointer, offsets, left, False) * by
            tl.store(pointer + offsets, x.to(element), mask=offsets < left)


def multiply(dtype: object, table: Table, factor: Tensor) -> None:
    """Multiplies the tensors of `table` by the float32 `factor` in place."""
    if table.chunks.total:
        _multiply_chunks[(table.chunks.total,)](
            table.addresses,
            table.chunks.sizes,
            table.chunks.firsts,
            table.chunks.owners,
            factor,
            element=ELEMENTS[dtype],  # type: ignore[index]
            CHUNK=CHUNK,
            ALIGNED=table.aligned,
            num_warps=8,
        )


@triton.jit
def _update_dynamic(
    scale_at,
    good_at,
    bad_at,
    finite_at,
    loss_finite_at,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    min_scale,
    max_scale,
    room,
    LOSSES: tl.constexpr,
):
    """`Dynamic.update`, one program for each state."""
    which = tl.program_id(0)
    scale_at += which
    good_at += which
    bad_at += which
    scale = tl.load(scale_at)
    good = tl.load(good_at)
    bad = tl.load(bad_at)
    finite = tl.load(finite_at + which) != 0
    loss_finite = finite == finite
    if LOSSES:
        loss_finite = tl.load(loss_finite_at + which) != 0
    moved, new_good, new_bad = moved_dynamic(
        scale,
        good,
        bad,
        finite,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        room,
    )
    tl.store(scale_at, tl.where(loss_finite, moved, scale))
    tl.store(good_at, tl.where(loss_finite, new_good, good))
    tl.store(bad_at, tl.where(loss_finite, new_bad, bad))


def update(
    policy: Dynamic, state: DynamicState, finite: Tensor, loss_finite: Tensor | None
) -> None:
    """Moves `state`, one or a vector of them, in place, as `policy.update` would.

    The flags are bool, on its device; None stands for a loss that was finite.
    """
    _update_dynamic[(state.scale.numel(),)](
        *state,
        finite,
        finite if loss_finite is None else loss_finite,
        policy.growth_factor,
        policy.backoff_factor,
        policy.growth_interval,
        policy.hysteresis,
        policy.min_scale,
        policy.max_scale,
        room_below(policy.growth_factor),
        LOSSES=loss_finite is not None,
        num_warps=1,
    )
