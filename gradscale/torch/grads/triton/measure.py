"""One pass over gradients: are they finite, how large, what norm, and what becomes of the step.

Every program reads one chunk and leaves what it found in a place of its own. The last one of a
tensor combines what its chunks found, and the last one of all what the tensors found and, if asked,
decides: one launch for each format. The last one is found by counting arrivals; the result does not
depend on which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.packed import CONSTANT, LOSS_OFF
from gradscale.torch.grads.triton.chunks import (
    ELEMENTS,
    chunk_of,
    look,
    look_and_multiply,
    pointer_to,
    underflow,
)
from gradscale.torch.grads.triton.decide import loss_is_finite, write_decision
from gradscale.torch.grads.triton.launch import Kernel, formats_of
from gradscale.torch.grads.triton.offsets import SUMMARY
from gradscale.torch.grads.triton.reduce import (
    COUNTS,
    FLOATS,
    INTS,
    NUMBERS,
    REPORTS,
    gather,
    leave,
    summarize,
)
from gradscale.torch.grads.triton.tables import CHUNK, Table
from gradscale.torch.grads.upload import capturing


@Kernel
def _measure(
    addresses,
    sizes,
    firsts,
    owners,
    floats,
    ints,
    arrivals,
    reports,
    numbers,
    counts,
    scale_at,
    result,
    row_at,
    loss_at,
    state_at,
    settings_at,
    record_at,
    copy_at,
    before,
    tensors,
    smallest_normal,
    max_norm,
    element: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNDERFLOW: tl.constexpr,
    UNSCALE: tl.constexpr,
    DECIDE: tl.constexpr,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Reads a chunk; `before` tensors came in launches before, of `tensors` in all.

    At `scale_at` is the inverse scale or, with `DECIDE`, the scale. `UNSCALE` multiplies by the
    inverse scale on the way. Writes `SUMMARY` or, with `DECIDE`, `DECISION` to `result`; with 2 the
    step is counted and the state is moved, too.
    """
    chunk = tl.program_id(0)
    owner, start, left = chunk_of(sizes, firsts, owners, chunk, CHUNK)
    pointer = pointer_to(addresses, owner, start, element, ALIGNED)
    scale = tl.load(scale_at)
    inv_scale = scale
    if DECIDE:
        inv_scale = tl.div_rn(1.0, scale)
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
        count = counts + COUNTS * (before + owner)
        gather(floats, ints, begin, end, inv_scale, report, number, count, element)
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == tensors - 1:
            tl.store(arrivals, 0)
            found = summarize(reports, numbers, counts, tensors, max_norm)
            if DECIDE:
                loss_finite = loss_is_finite(loss_at, LOSS)
                places = (row_at, state_at, settings_at, record_at, copy_at)
                write_decision(
                    found, True, loss_finite, scale, places, result, LOSS, RULE, DECIDE == 2
                )
            else:
                non_finite, fits, amax, norm, clip, share, peak = found
                tl.store(result + SUMMARY.non_finite, non_finite.to(tl.float32))
                tl.store(result + SUMMARY.fits, fits.to(tl.float32))
                tl.store(result + SUMMARY.amax, amax)
                tl.store(result + SUMMARY.norm, norm)
                tl.store(result + SUMMARY.clip, clip)
                tl.store(result + SUMMARY.underflow, share)
                tl.store(result + SUMMARY.finite_amax, peak)


Tables = Sequence[tuple[torch.dtype, Table]]
"""Formats, and where the tensors of each are: `dispatch.TensorTable.groups`."""


def measure(
    tables: Tables,
    inv_scale: Tensor,
    *,
    max_norm: float = float("inf"),
    smallest_normal: float | None = None,
    unscale: bool = False,
) -> tuple[Tensor, Tensor]:
    """The `SUMMARY` of all tensors together, and a row (infinities, NaNs) for each, int64.

    Args:
        tables: The tensors.
        inv_scale: float32: the inverse of their scale.
        max_norm: What `clip` in the summary clips the norm to.
        smallest_normal: Below it an element underflows; None does not measure that.
        unscale: Whether to multiply the tensors by `inv_scale` in place, in the same pass.
    """
    summary = torch.empty(len(SUMMARY.value), dtype=torch.float32, device=inv_scale.device)
    constants = (smallest_normal is not None, unscale, 0, LOSS_OFF, CONSTANT)
    numbers = (0.0 if smallest_normal is None else smallest_normal, float(max_norm))
    rest = (summary, *[inv_scale] * 6)  # pointers that are not used
    return summary, _launch(tables, inv_scale, numbers, rest, constants, (), capturing())


def measure_and_decide(
    tables: Tables,
    scale: Tensor,
    *,
    row: Tensor,
    loss: Tensor | None,
    loss_kind: int,
    state: Tensor,
    settings: Tensor,
    rule: int,
    record: Tensor,
    copy: Tensor,
    max_norm: float = float("inf"),
    smallest_normal: float | None = None,
    unscale: bool = False,
    advance: bool = True,
) -> tuple[Tensor, Tensor]:
    """The `DECISION` about a step with these gradients, and the rows of counts, as in `measure`.

    Args:
        scale: float32: the scale of the gradients.
        row, loss, loss_kind, state, settings, rule, record, copy: As in `decide`.
        unscale: Whether to divide the tensors by the scale in place, in the same pass.
        advance: Whether to count the step and to move the state; else `decide.advance` does.
    """
    captured = capturing()
    decision = tables[0][1].decisions.take(scale.device, captured)
    constants = (smallest_normal is not None, unscale, 2 if advance else 1, loss_kind, rule)
    numbers = (0.0 if smallest_normal is None else smallest_normal, float(max_norm))
    rest = (decision, row, state if loss is None else loss, state, settings, record, copy)
    return decision, _launch(tables, scale, numbers, rest, constants, formats_of(loss), captured)


def _launch(
    tables: Tables,
    scale: Tensor,
    numbers: tuple[float, float],
    rest: tuple[Tensor, ...],
    constants: tuple[Any, ...],
    formats: tuple[Any, ...],
    captured: bool,
) -> Tensor:
    """Launches the kernel for every format; the infinities and NaNs of every tensor."""
    tensors = tables[0][1].tensors
    for _, table in tables[1:]:
        tensors += table.tensors
    shared = _shared(tables[0][1], tensors)
    if len(tables) == 1:
        counts = tables[0][1].counts.take(scale.device, captured)
    else:
        counts = torch.empty((tensors, COUNTS.value), dtype=torch.int64, device=scale.device)
    before = 0
    try:
        for dtype, table in tables:
            read = (table.addresses, *_workspace(table), *shared, counts, scale, *rest)
            form = (ELEMENTS[dtype], CHUNK, table.aligned, *constants)
            total = table.chunks.total
            _measure(total, read, (before, tensors, *numbers), form, formats, num_warps=8)
            before += table.tensors
    except BaseException:
        # Some programs have arrived, and those that they wait for never will.
        del tables[0][1].workspace["tensors"]
        raise
    return counts


def _workspace(table: Table) -> list[Tensor]:
    """How the tensors are cut, and places for what every chunk found."""
    if "chunks" not in table.workspace:
        total, device = table.chunks.total, table.device
        table.workspace["chunks"] = [
            *table.chunks[:3],
            torch.empty(FLOATS.value * total, dtype=torch.float32, device=device),
            torch.empty(INTS.value * total, dtype=torch.int32, device=device),
        ]
    return table.workspace["chunks"]


def _shared(table: Table, tensors: int) -> list[Tensor]:
    """Counters of arrivals, at 0 between launches, and places for what every tensor found."""
    kept = table.workspace.get("tensors")
    if kept is None or kept[0].numel() != 1 + tensors:
        kept = table.workspace["tensors"] = [
            torch.zeros(1 + tensors, dtype=torch.int32, device=table.device),
            torch.empty(REPORTS.value * tensors, dtype=torch.float32, device=table.device),
            torch.empty(NUMBERS.value * tensors, dtype=torch.int64, device=table.device),
        ]
    return kept
