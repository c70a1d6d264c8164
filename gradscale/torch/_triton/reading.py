"""One pass over gradients: are they finite, how large, what norm, and what becomes of the step.

Every program reads one chunk and leaves what it found in a place of its own. The last one of a
tensor gathers what the tensor is like, and the last one of all says what all of them are like and,
if asked, decides: one launch for each format. Who comes last is found by counting arrivals; what
they add up does not depend on who it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gradscale.torch._triton.chunks import (
    ELEMENTS,
    chunk_of,
    look,
    look_and_multiply,
    pointer_to,
    underflow,
)
from gradscale.torch._triton.deciding import VALUES, Question, decide
from gradscale.torch._triton.gathering import (
    FLOATS,
    INTS,
    NUMBERS,
    REPORTS,
    gather,
    leave,
    summarize,
)
from gradscale.torch._triton.launching import Kernel
from gradscale.torch._triton.tables import CHUNK, Table


@Kernel
def _read(
    addresses,
    sizes,
    firsts,
    owners,
    floats,
    ints,
    arrivals,
    inv_scales,
    stride,
    before,
    tensors,
    smallest_normal,
    max_norm,
    reports,
    numbers,
    summary,
    window_scale_at,
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
    values,
    told,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNDERFLOW: tl.constexpr,
    UNSCALE: tl.constexpr,
    DECIDE: tl.constexpr,
    LOSSES: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Reads a chunk; `before` tensors came in launches before, of `tensors` in all.

    `UNSCALE` multiplies by the inverse scales on the way. With `DECIDE` they are the scales.
    """
    chunk = tl.program_id(0)
    owner, start, left = chunk_of(sizes, firsts, owners, chunk, CHUNK)
    pointer = pointer_to(addresses, owner, start, element, ALIGNED)
    inv_scale = tl.load(inv_scales + (before + owner) * stride)
    if DECIDE:
        inv_scale = tl.div_rn(1.0, inv_scale)
    small = 0
    nonzero = 0
    if UNDERFLOW:
        small, nonzero = underflow(pointer, left, smallest_normal, CHUNK)
    if UNSCALE:
        amax, squares, exponent, infs, nans = look_and_multiply(pointer, left, inv_scale, CHUNK)
    else:
        amax, squares, exponent, infs, nans = look(pointer, left, CHUNK)
    leave(floats, ints, chunk, amax, squares, exponent, infs, nans, small, nonzero)
    begin = tl.load(firsts + owner)
    end = tl.load(firsts + owner + 1)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + 1 + before + owner, 1, sem="acq_rel") == end - begin - 1:
        tl.store(arrivals + 1 + before + owner, 0)
        report = reports + REPORTS * (before + owner)
        number = numbers + NUMBERS * (before + owner)
        gather(floats, ints, begin, end, inv_scale, report, number, element)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == tensors - 1:
            tl.store(arrivals, 0)
            found, fits, amax, norm, clip, share, peak = summarize(
                reports, numbers, tensors, max_norm
            )
            if DECIDE:
                decide(
                    found,
                    fits,
                    amax,
                    norm,
                    clip,
                    share,
                    peak,
                    found & (found == 0),
                    window_scale_at,
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
                    values,
                    told,
                    LOSSES,
                    MOVES,
                )
            else:
                tl.store(summary, found.to(tl.float32))
                tl.store(summary + 1, fits.to(tl.float32))
                tl.store(summary + 2, amax)
                tl.store(summary + 3, norm)
                tl.store(summary + 4, clip)
                tl.store(summary + 5, share)
                tl.store(summary + 6, peak)


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


Groups = Sequence[tuple[torch.dtype, Table]]
"""Formats, and where the tensors of each lie."""


def summarized(
    groups: Groups,
    inv_scale: Tensor,
    max_norm: float = float("inf"),
    smallest_normal: float | None = None,
    unscale: bool = False,
) -> tuple[Tensor, Tensor]:
    """What the tensors of `groups` are like together (`Summary`), and the numbers of every tensor.

    As in `read`, which takes these apart.
    """
    summary = torch.empty(7, dtype=torch.float32, device=inv_scale.device)
    nothing = (*[inv_scale] * 8, *[0.0] * 2, *[0] * 2, *[0.0] * 3, *[0] * 2, *[inv_scale] * 2)
    end = (False, False, False)
    numbers = _launch(groups, inv_scale, max_norm, smallest_normal, unscale, summary, nothing, end)
    return summary, numbers


def read(
    groups: Groups,
    inv_scale: Tensor,
    max_norm: float = float("inf"),
    smallest_normal: float | None = None,
    unscale: bool = False,
) -> tuple[Summary, Tensor]:
    """What the tensors of `groups` are like together, and a row (infs, NaNs) for every tensor.

    Args:
        groups: The tensors.
        inv_scale: float32: what they must be multiplied by, for all or, as a vector, for each.
        max_norm: What `Summary.clip` clips to.
        smallest_normal: Below it an element underflows; None does not measure that.
        unscale: Whether to multiply them by `inv_scale` in place, as they are looked at.
    """
    summary, numbers = summarized(groups, inv_scale, max_norm, smallest_normal, unscale)
    return Summary(*summary.unbind()), numbers[:, 1:3]


def read_and_decide(
    groups: Groups,
    scale: Tensor,
    max_norm: float,
    smallest_normal: float | None,
    unscale: bool,
    row: Tensor,
    question: Question,
    told: Tensor,
) -> tuple[Tensor, Tensor]:
    """What becomes of a step with these gradients (`VALUES`), and the numbers of every tensor.

    Those are int64, a row for each: the second and the third are how many infinities and NaNs it
    has. `scale` is float32, the one that is in the gradients, and `row` int32, how many steps in a
    row were skipped. Moves the scale and counts on, in place, as `question` says, and
    writes to the int32 `told` what the host is told (see `events.Record`); the rest is as in
    `read`.
    """
    values = torch.empty(VALUES, dtype=torch.float32, device=scale.device)
    decision = (scale, row, *question.arguments(), values, told)
    end = (True, *question.constants())
    numbers = _launch(groups, scale, max_norm, smallest_normal, unscale, values, decision, end)
    return values, numbers


def _launch(
    groups: Groups,
    scale: Tensor,
    max_norm: float,
    smallest_normal: float | None,
    unscale: bool,
    summary: Tensor,
    decision: tuple[Any, ...],
    end: tuple[bool, bool, bool],
) -> Tensor:
    """Launches the kernel for every format; what every tensor's numbers are.

    `scale` is the inverse one, unless the kernel decides.
    """
    tensors = groups[0][1].tensors
    for _, table in groups[1:]:
        tensors += table.tensors
    reports, arrivals = _shared(groups[0][1], tensors)
    numbers = torch.empty((tensors, NUMBERS.value), dtype=torch.int64, device=scale.device)
    before = 0
    try:
        for dtype, table in groups:
            _read(
                table.chunks.total,
                (
                    table.addresses,
                    *_workspace(table),
                    arrivals,
                    scale,
                    scale.dim(),
                    before,
                    tensors,
                    0.0 if smallest_normal is None else smallest_normal,
                    float(max_norm),
                    reports,
                    numbers,
                    summary,
                    *decision,
                ),
                (
                    ELEMENTS[dtype],
                    CHUNK,
                    table.aligned,
                    smallest_normal is not None,
                    unscale,
                    *end,
                ),
                num_warps=8,
            )
            before += table.tensors
    except BaseException:
        # Some have arrived, and those that they wait for never will.
        del groups[0][1].workspace["tensors"]
        raise
    return numbers


def _workspace(table: Table) -> list[Tensor]:
    """How the tensors are cut, and places for what every chunk is like."""
    if "chunks" not in table.workspace:
        total, device = table.chunks.total, table.device
        table.workspace["chunks"] = [
            *table.chunks[:3],
            torch.empty(FLOATS.value * total, dtype=torch.float32, device=device),
            torch.empty(INTS.value * total, dtype=torch.int32, device=device),
        ]
    return table.workspace["chunks"]


def _shared(table: Table, tensors: int) -> list[Tensor]:
    """Places for what every tensor is like, and counters, at 0 between launches, of arrivals."""
    kept = table.workspace.get("tensors")
    if kept is None or len(kept[1]) != 1 + tensors:
        kept = table.workspace["tensors"] = [
            torch.empty(REPORTS.value * tensors, dtype=torch.float32, device=table.device),
            torch.zeros(1 + tensors, dtype=torch.int32, device=table.device),
        ]
    return kept
