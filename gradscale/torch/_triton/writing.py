"""Passes that write: gradients times a factor, and the state of a policy."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gradscale.policy import Dynamic, DynamicState
from gradscale.torch._triton.chunks import ELEMENTS, chunk_of, pointer_to
from gradscale.torch._triton.chunks import multiply as multiply_chunk
from gradscale.torch._triton.deciding import Question, moved_dynamic, settings_of
from gradscale.torch._triton.deciding import advance as advance_
from gradscale.torch._triton.launching import Kernel
from gradscale.torch._triton.tables import CHUNK, Table


@Kernel
def _multiply(
    addresses,
    sizes,
    firsts,
    owners,
    factors,
    stride,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Multiplies a chunk by the factor of its tensor."""
    owner, start, left = chunk_of(sizes, firsts, owners, tl.program_id(0), CHUNK)
    pointer = pointer_to(addresses, owner, start, element, ALIGNED)
    multiply_chunk(pointer, left, tl.load(factors + owner * stride), CHUNK)


def multiply(dtype: torch.dtype, table: Table, factor: Tensor) -> None:
    """Multiplies the tensors of `table` in place by the float32 `factor`, one or one for each."""
    chunks = table.chunks
    _multiply(
        chunks.total,
        (table.addresses, chunks.sizes, chunks.firsts, chunks.owners, factor, factor.dim()),
        (ELEMENTS[dtype], CHUNK, table.aligned),
        num_warps=8,
    )


@Kernel
def _advance(
    found_at,
    applied_at,
    row_at,
    loss_finite_at,
    bad_losses_at,
    steps_at,
    scale_at,
    good_at,
    bad_at,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    min_scale,
    max_scale,
    room,
    patience,
    period,
    told,
    LOSSES: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Moves the scale after a step that is over."""
    advance_(
        tl.load(found_at) == 0,
        tl.load(applied_at) != 0,
        tl.load(row_at),
        loss_finite_at,
        bad_losses_at,
        steps_at,
        scale_at,
        good_at,
        bad_at,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        room,
        patience,
        period,
        told,
        LOSSES,
        MOVES,
    )


def advance(found: Tensor, applied: Tensor, row: Tensor, question: Question, told: Tensor) -> None:
    """Moves the scale and counts, as `question` says, and writes what the host is told.

    Of the step: float32, not 0 if something was not finite; bool, whether it was applied; int32,
    how many were skipped in a row.
    """
    arguments = (found, applied, row, *question.arguments(), told)
    _advance(1, arguments, question.constants(), num_warps=1)


@Kernel
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
    scale = tl.load(scale_at + which)
    good = tl.load(good_at + which)
    bad = tl.load(bad_at + which)
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
    tl.store(scale_at + which, tl.where(loss_finite, moved, scale))
    tl.store(good_at + which, tl.where(loss_finite, new_good, good))
    tl.store(bad_at + which, tl.where(loss_finite, new_bad, bad))


def update(
    policy: Dynamic, state: DynamicState, finite: Tensor, loss_finite: Tensor | None
) -> None:
    """Moves `state`, one or a vector of them, in place, as `policy.update` would.

    The flags are bool, on its device; None stands for a loss that was finite.
    """
    _update_dynamic(
        state.scale.numel(),
        (*state, finite, finite if loss_finite is None else loss_finite, *settings_of(policy)),
        (loss_finite is not None,),
        num_warps=1,
    )
