"""What a step checks before its gradients are measured, where that is not usual."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError
from gradscale.torch.distributed.groups import counts_all
from gradscale.torch.grads import backend
from gradscale.torch.grads.collect import Gradients, values_of, with_grad
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.grads.dtensor import all_plain
from gradscale.torch.grads.reference import multiply
from gradscale.torch.grads.scale import constant
from gradscale.torch.step.entries import OptimizerEntry
from gradscale.torch.step.result import Step
from gradscale.torch.step.sharing import droppable_passes

if TYPE_CHECKING:
    from gradscale.torch.step.passes import Passes
    from gradscale.torch.step.pipeline import Pipeline


def find_groups(pipeline: Pipeline, entry: OptimizerEntry, params: list[Tensor]) -> None:
    """Finds the ranks that must agree on the gradients of an entry, which has these `params`."""
    groups = pipeline.consensus.groups
    entry.groups = groups.among(params)
    plain = all_plain(params)
    entry.groups_version = groups.version if plain else -1
    entry.counts = counts_all(entry.groups) if plain else None
    if entry.groups and pipeline.state.live is None:  # another rank has the loss
        pipeline.place(params[0].device)
    if not entry.groups and groups.is_unknown() and pipeline.state.live is not None:
        # One rank's NaN loss may be every rank's NaN gradient.
        pipeline.passes.origin().uses_losses = False


def refuse_others(passes: Passes) -> None:
    """Raises a CallOrderError if another thread is in the middle of an iteration."""
    now = passes.iteration
    if now is not None and now.thread not in (None, get_ident()):
        passes.claim()


def check_new_gradients(pipeline: Pipeline, entry: OptimizerEntry, call: str) -> None:
    """Raises if an entry has no gradients since its last step, else finds their iteration."""
    passes = pipeline.passes
    if passes.last is not None and passes.last.captured:
        return  # replays run passes without hooks
    if capturing():
        passes.last = passes.current()  # every replay finds other gradients
        return
    params = with_grad(entry.param_groups())
    if entry.groups and not params:
        passes.last = passes.current()  # other ranks may have gradients
        return
    if entry.stepped_at >= 0 and not entry.has_new_gradients(params):
        raise CallOrderError(
            f"{call}() was called, but there are no new gradients since the last step. "
            "Call scaler.backward(loss) or scaler.scale(loss).backward() first."
        )
    if entry.left is not None:
        return  # of an earlier iteration, which had its update()
    # Scaled by hand, with get_scale(), or zeros, or by another rank's loss.
    iteration = passes.last = passes.current()
    for param in params:
        passes.unscaled.pop(id(param), None)
    if entry.groups or not params:
        return
    if call == "apply":
        raise CallOrderError(
            "apply() found gradients, but no loss was scaled for them by this scaler. Call "
            "scaler.backward(loss) instead of loss.backward()."
        )
    stats = backend.measure(Gradients(params), iteration.scale, amax=True).stats
    blank = stats.amax == 0
    iteration.blank = blank if iteration.blank is None else iteration.blank & blank


def weigh(pipeline: Pipeline, step: Step) -> None:
    """Multiplies gradients by passes / kept passes, once per gradient.

    In place, so that norms are those of what is stepped.
    """
    weighed = pipeline.passes.weighed
    for entry in step.entries:
        reached = droppable_passes(pipeline.passes, entry)
        if not reached:
            continue
        dropped: Any = sum(each.dropped for each in reached)
        known = step.dropped
        if isinstance(known, Tensor):
            step.dropped = torch.maximum(known, dropped)
        else:
            step.dropped = dropped if known is None else max(known, dropped)
        step.skip = step.skip | (dropped >= len(reached))
        last = reached[-1].number
        params = [p for p in with_grad(entry.held.param_groups) if weighed.get(id(p)) != last]
        weighed.update({id(p): last for p in params})
        if isinstance(dropped, Tensor):
            multiply(values_of(params), len(reached) / (len(reached) - dropped).clamp(min=1))
        elif 0 < dropped < len(reached):
            multiply(values_of(params), constant(len(reached) / (len(reached) - dropped)))


def measure_shared(
    pipeline: Pipeline, step: Step, unscaled: list[Tensor], max_norm: float | None
) -> None:
    """Measures and unscales gradients of which another optimizer has unscaled some."""
    done = set(map(id, unscaled))
    fresh = [p for p in step.grads.params if id(p) not in done]
    first = backend.measure(Gradients(fresh), step.scale, unscale=True, amax=True).stats
    found = backend.measure(step.grads, step.scale.unit(), amax=True, max_norm=max_norm)
    # The largest of all, as it was before one of them was unscaled.
    stats = found.stats._replace(
        finite=found.stats.finite & first.finite,
        fits=found.stats.fits & first.fits,
        amax=found.stats.amax * step.scale.value,
    )
    step.measured = found._replace(stats=stats)
    pipeline.take(step, step.measured)
