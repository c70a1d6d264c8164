"""The stage "agree": what was found on any rank is taken over by all that decide together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.torch.distributed.consensus import Report
from gradscale.torch.distributed.groups import Group, part_of_norm
from gradscale.torch.state import ScaleState
from gradscale.torch.step.entries import OptimizerEntry
from gradscale.torch.step.own_losses import OwnLoss
from gradscale.torch.step.passes import Iteration

if TYPE_CHECKING:
    from gradscale.torch.step.pipeline import Pipeline
    from gradscale.torch.step.result import Step


def agree(pipeline: Pipeline, step: Step, norm: Any = None) -> Any:
    """The norm of the gradients of all ranks; everything else is put into the entries.

    `norm` is that of this rank's gradients, where it is another than was measured first.
    """
    state, passes, entries = pipeline.state, pipeline.passes, step.entries
    groups = groups_of(entries)
    iteration, scale = passes.origin(), step.scale
    losses = _losses_here(state, iteration)
    if norm is None and step.measured is not None:
        norm = step.measured.stats.norm
    part = norm
    counts = entries[0].counts if len(entries) == 1 else None
    if norm is not None and step.grads.params and counts is False:
        part = 0.0
    elif norm is not None and counts is None:
        # The gradients as they are by now may have to be read again.
        now = scale.unit() if step.in_place else scale
        part = part_of_norm(step.grads.params, groups, norm, now)
    mine = _report(entries, iteration, bool(step.grads.params), part)
    reports = [mine, *(_report_of(loss, entries) for loss in losses)]
    found, *others = pipeline.consensus.combine(reports, groups, scale, state)
    for loss, report in zip(losses, others, strict=True):
        loss.finite, loss.loss_finite = report.non_finite == 0, report.loss_non_finite == 0
        loss.amax, loss.present = report.amax, report.has_gradients > 0
    iteration.set_losses_finite(found.loss_non_finite == 0)
    iteration.penalty_finite = found.penalty_non_finite == 0
    if losses:
        iteration.common = found.has_common_loss > 0
    if not step.grads.params:
        iteration.idle = found.has_gradients == 0
    held_back = reduce(or_, [report.unfit > 0 for report in others]) if losses else None
    for entry in entries:
        stats: Any = entry.stats
        if not entry.agreed:  # else all ranks report by now that it was bad
            entry.bad_rank = found.bad_rank
        entry.stats = stats._replace(
            finite=found.non_finite == 0,
            # Without a gradient on any rank there is nothing to step, and the scale is fine.
            fits=(found.unfit == 0) & (found.has_gradients > 0),
            amax=found.amax if stats.amax is not None or state.policy.goes_by else None,
            norm=stats.norm if part is None else found.norm,
        )
        entry.held_back, entry.agreed = held_back, True
    return None if part is None else found.norm


def groups_of(entries: Sequence[OptimizerEntry]) -> list[Group]:
    """The groups that must agree on the gradients of `entries`, all together."""
    if len(entries) == 1:
        return entries[0].groups
    found: list[Group] = []
    for entry in entries:
        for group in entry.groups:
            if all(group.process is not known.process for known in found):
                found.append(group)
    return found


def _report(
    entries: Sequence[OptimizerEntry], iteration: Iteration, present: bool, norm: Any
) -> Any:
    """What this rank has found in the gradients of `entries`."""
    stats: list[Any] = [entry.stats for entry in entries]
    found = reduce(or_, [one.finite ^ True for one in stats])
    rank = float(dist.get_rank())
    if isinstance(found, Tensor):
        lowest: Any = torch.where(found, rank, math.inf)
        amax: Any = torch.stack(
            [one.amax for one in stats if one.amax is not None] or [found * 0.0]
        )
        amax = amax.amax()
    else:
        lowest = rank if found else math.inf
        sizes = [one.amax for one in stats if one.amax is not None]
        amax = math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)
    return Report(
        non_finite=found,
        unfit=reduce(or_, [one.fits ^ True for one in stats]),
        loss_non_finite=_bad(iteration.losses_finite()),
        penalty_non_finite=_bad(iteration.penalty_finite),
        has_gradients=float(present),
        has_common_loss=float(iteration.passes > iteration.own_passes),
        amax=amax,
        norm=0.0 if norm is None else norm,
        bad_rank=lowest,
    )


def _losses_here(state: ScaleState, iteration: Iteration) -> list[OwnLoss]:
    """All losses with a scale of their own, in an order that all ranks have.

    Also those that this rank has not had in this iteration: others may have.
    """
    for loss_id in state.losses:
        if loss_id not in iteration.losses:
            own = iteration.losses[loss_id] = OwnLoss(state.loss_scale(loss_id, half=False))
            own.passes, own.present = 1, own.finite ^ True
    return [iteration.losses[key] for key in sorted(iteration.losses, key=repr)]


def _report_of(loss: OwnLoss, entries: Sequence[OptimizerEntry]) -> Any:
    """What this rank has found of a loss with a scale of its own.

    Its word `unfit` is whether it holds back the step of `entries`, or whether one of these lacks
    gradients of an earlier iteration.
    """
    bad = loss.finite ^ True
    holding = [entry.lacking for entry in entries if entry.lacking is not None]
    if any(loss.reaches(entry) for entry in entries):
        holding.append(bad)
    return Report(
        non_finite=bad,
        unfit=reduce(or_, holding) if holding else 0.0,
        loss_non_finite=loss.loss_finite ^ True,
        has_gradients=1.0 if loss.present is None else loss.present,
        amax=loss.amax,
    )


def _bad(finite: Any) -> Any:
    """The opposite of a flag; of None, False."""
    return 0.0 if finite is None else finite ^ True
