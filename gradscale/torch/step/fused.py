"""Steps that the host only launches: one kernel reads the gradients and decides, one steps.

For one rule that the kernels have, gradients that they can take, and an iteration in which nothing
unusual has happened. Everything else takes the ordinary stages, with the same result.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from gradscale.torch.distributed.consensus import all_reports
from gradscale.torch.distributed.groups import part_of_norm
from gradscale.torch.grads import dispatch
from gradscale.torch.grads.fields import REPORT, SUMMARY, value_at
from gradscale.torch.grads.packed import (
    LOSS_FLAG,
    LOSS_OFF,
    LOSS_RAW,
)
from gradscale.torch.grads.reference import Measurement
from gradscale.torch.step.agreement import groups_of
from gradscale.torch.step.contract import fused_plan, is_capable, step_on_device
from gradscale.torch.step.entries import READY, STEPPED
from gradscale.torch.step.passes import Iteration
from gradscale.torch.step.result import Step
from gradscale.torch.telemetry.blame import BlameLater
from gradscale.torch.telemetry.transport import Mark, Record, Sent

if TYPE_CHECKING:
    from gradscale.torch.step.pipeline import Pipeline

_FEW = 4
"""Up to so many tables of an optimizer are used as they are; beyond that, one table is built."""


def is_plain(pipeline: Pipeline, iteration: Iteration) -> bool:
    """Whether the gradients of an iteration alone decide about the step and the scale."""
    odd = iteration.losses or iteration.blank is not None or iteration.penalty_finite is not None
    if pipeline.state.losses:
        odd = odd or any(entry.lacking is not None for entry in pipeline.entries.all)
    return not (odd or pipeline.passes.droppable) and iteration.finite is None


def can_decide(pipeline: Pipeline, step: Step) -> bool:
    """Whether a kernel can decide about a step as it is."""
    state, passes = pipeline.state, pipeline.passes
    if state.on_host or state.kernel() is None or passes.unscaled or step.masters:
        return False
    iteration = passes.last
    if iteration is None or not is_plain(pipeline, iteration):
        return False
    for entry in step.entries:
        if entry.stage is not READY or entry.left is not None:
            return False
    return dispatch.uses_triton(state.device)  # type: ignore[arg-type]


def step_fused(pipeline: Pipeline, step: Step, max_norm: float) -> Record | None:
    """Steps all optimizers of `step` or none, and moves the scale; None, changing nothing, if not.

    For `apply()`.
    """
    if not can_decide(pipeline, step) or not all(is_capable(e.held) for e in step.entries):
        return None
    groups = groups_of(step.entries)
    if groups and pipeline.state.losses:
        return None
    plan = fused_plan(step.entries[0].held) if len(step.entries) == 1 else None
    tables: Any = None if plan is None else plan.tables()
    if plan is not None and (len(tables) > _FEW or len({dtype for dtype, _ in tables}) > 1):
        plan = None
    if plan is None:
        table = step.grads.table
        if table is None or table.keys[0][0] != pipeline.state.device:
            return None
        tables, rows = table.groups, table.rows
    else:
        step.grads.params = plan.params
        rows = partial(_one_format, (plan.params[0].device, tables[0][0]))
    captured = dispatch.capturing()
    record = pipeline.monitor.slots.take(pipeline.state.device, captured)  # type: ignore[arg-type]
    copy = pipeline.state.next_copy(captured)
    _decide(pipeline, step, tables, rows, record, copy, max_norm, groups)
    divisor, skip = (value_at(step.decision, name) for name in ("divisor", "skip"))  # type: ignore[arg-type]
    step.skip = skip
    mark = None if captured else pipeline.monitor.mark_on(pipeline.state.device)
    if mark is not None and pipeline.monitor.prompt:
        mark.put()
    try:
        if plan is not None:
            plan.step(divisor, skip)
        else:
            for entry in step.entries:
                step_on_device(entry.held, divisor, skip, (), {})
                entry.stage = STEPPED
    except BaseException:
        _undo(pipeline, step)
        step.clip = step.scale.tensor / divisor
        pipeline.unfinished = step  # for the next try: those that have stepped do not again
        raise
    finally:
        pipeline.passes.last.finite = step.decision  # type: ignore[union-attr]
    first = pipeline.row_of(step.entries[0])
    for entry in step.entries[1:]:
        pipeline.row_of(entry).copy_(first)
    step.refs = [entry.ref for entry in step.entries]
    return _record_of(pipeline, record, step, mark)


def _one_format(key: Any, counts: Tensor) -> dict[Any, Tensor]:
    """Rows of counts, all of one format."""
    return {key: counts}


def _decide(
    pipeline: Pipeline,
    step: Step,
    tables: Any,
    rows: Any,
    record: Tensor,
    copy: Tensor,
    max_norm: float,
    groups: Any,
) -> None:
    """Launches what reads the gradients and decides."""
    state, scale = pipeline.state, step.scale
    due = pipeline.is_underflow_due(step)
    smallest = state.format.smallest_normal if due else None
    arguments = _arguments(pipeline, pipeline.passes.last)  # type: ignore[arg-type]
    row = pipeline.row_of(step.entries[0])
    if groups:
        arguments |= {"row": row, "record": record, "copy": copy}
        decision, counts = _decide_with_ranks(
            pipeline, step, tables, groups, max_norm, smallest, arguments
        )
    else:
        decision, counts = dispatch.module("measure").measure_and_decide(
            tables,
            scale.tensor,
            row=row,
            record=record,
            copy=copy,
            max_norm=max_norm,
            smallest_normal=smallest,
            **arguments,
        )
    step.decision = decision
    step.underflow = True if due else None
    peak = partial(value_at, decision, "finite_amax")
    found = Measurement(step.stats, counts=rows(counts), finite_amax=peak)
    optimizers = [entry.held for entry in step.entries]
    step.blame = BlameLater(pipeline.monitor.names, optimizers, step.grads.params, [found])


def _arguments(pipeline: Pipeline, iteration: Iteration) -> dict[str, Any]:
    """What a kernel needs to move the scale."""
    state = pipeline.state
    rule, settings = state.kernel()  # type: ignore[misc]
    loss, kind = iteration.loss, LOSS_RAW
    if not iteration.uses_losses:
        loss, kind = None, LOSS_OFF
    elif loss is None:
        loss = iteration.loss_finite
        kind = LOSS_OFF if loss is None else LOSS_FLAG
    return {
        "loss": loss,
        "loss_kind": kind,
        "state": state.packed,
        "settings": settings,
        "rule": rule,
    }


def _decide_with_ranks(
    pipeline: Pipeline,
    step: Step,
    tables: Any,
    groups: Any,
    max_norm: float,
    smallest: float | None,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """As `measure_and_decide`, with what other ranks found."""
    scale, iteration = step.scale, pipeline.passes.last
    summary, counts = dispatch.module("measure").measure(
        tables, scale.inverse, max_norm=max_norm, smallest_normal=smallest
    )
    part = part_of_norm(step.grads.params, groups, value_at(summary, "norm", SUMMARY), scale)
    checksum = pipeline.consensus.drift.mark(pipeline.state)
    words = dispatch.module("consensus").report(
        summary,
        part,
        loss=arguments["loss"],
        loss_kind=arguments["loss_kind"],
        checksum=checksum if isinstance(checksum, Tensor) else None,
        rank=dist.get_rank(),
    )
    words, checksums = all_reports(words, groups)
    pipeline.consensus.drift.take(checksums)
    mine = words[0]
    iteration.set_losses_finite(  # type: ignore[union-attr]
        value_at(mine, "loss_non_finite", REPORT) <= value_at(mine, "penalty_non_finite", REPORT)
    )
    step.bad_rank = value_at(mine, "bad_rank", REPORT)
    # A rank without a loss goes by those of others.
    del arguments["loss"]
    arguments["loss_kind"] = LOSS_FLAG if iteration.uses_losses else LOSS_OFF  # type: ignore[union-attr]
    decision = dispatch.module("decide").decide(
        mine, summary, scale.tensor, max_norm=max_norm, **arguments
    )
    return decision, counts


def _undo(pipeline: Pipeline, step: Step) -> None:
    """Takes back the step count and the skip count of a step that raised."""
    pipeline.state.counters.steps.sub_(1)
    row = pipeline.row_of(step.entries[0])
    row.sub_(step.skip.to(row.dtype))


def measure_fused(pipeline: Pipeline, step: Step, unscale: bool, max_norm: float | None) -> bool:
    """Reads the gradients, unscales them and decides in one launch; False, doing nothing, if not.

    For torch's loop: `update()` counts the step and moves the scale.
    """
    entry = step.entries[0]
    if step.in_place or len(step.entries) > 1 or entry.groups or not can_decide(pipeline, step):
        return False
    state, table = pipeline.state, step.grads.table
    if table is None or table.keys[0][0] != state.device:
        return False
    due = pipeline.is_underflow_due(step)
    decision, counts = dispatch.module("measure").measure_and_decide(
        table.groups,
        step.scale.tensor,
        row=pipeline.row_of(entry),
        record=state.packed,  # not written, nor is the copy
        copy=step.scale.tensor,
        max_norm=math.inf if max_norm is None else max_norm,
        smallest_normal=state.format.smallest_normal if due else None,
        unscale=unscale,
        advance=False,
        **_arguments(pipeline, pipeline.passes.last),  # type: ignore[arg-type]
    )
    entry.decision, entry.underflow = decision, True if due else None
    peak = partial(value_at, decision, "finite_amax")
    step.measured = Measurement(step.stats, counts=table.rows(counts), finite_amax=peak)
    entry.measured = [step.measured]
    if max_norm is not None:
        # Of the scale there is nothing left to divide by, if the gradients are unscaled.
        step.clip = step.scale.tensor / value_at(decision, "divisor")
    return True


def advance_fused(pipeline: Pipeline) -> Record | None:
    """Moves the scale after one step in torch's loop; None, changing nothing, if it cannot."""
    passes, steps = pipeline.passes, pipeline.monitor.steps
    if len(steps) != 1 or steps[0].decision is None:
        return None
    step, iteration = steps[0], passes.last
    if iteration is None or not is_plain(pipeline, iteration):
        return None
    used = pipeline.entries.in_use()
    if len(used) != 1:
        return None
    captured = dispatch.capturing()
    record = pipeline.monitor.slots.take(pipeline.state.device, captured)  # type: ignore[arg-type]
    dispatch.module("decide").advance(
        step.decision,
        step.scale.tensor,
        row=pipeline.row_of(used[0]),
        record=record,
        copy=pipeline.state.next_copy(captured),
        **_arguments(pipeline, iteration),
    )
    iteration.finite = step.decision
    pipeline.monitor.last, pipeline.monitor.steps = step, []
    mark = None if captured else pipeline.monitor.mark_on(pipeline.state.device)
    return _record_of(pipeline, record, step, mark)


def _record_of(pipeline: Pipeline, record: Tensor, step: Step, mark: Mark | None) -> Record:
    """The record of one step that a kernel writes to `record`; in a capture without a `mark`."""
    layout = pipeline.monitor.layout_of(step.optimizers(), pipeline.state.floor)
    return Record(layout, [step], record, None if mark is None else Sent(record, mark))
