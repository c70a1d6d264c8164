"""The calls of torch's loop: `unscale_`, `clip_grad_norm_`, `step` and `update`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, caller_level
from gradscale.policy import GradStats
from gradscale.torch.grads.collect import with_grad
from gradscale.torch.grads.fields import value_at
from gradscale.torch.grads.scale import move
from gradscale.torch.step import fused
from gradscale.torch.step.agreement import groups_of
from gradscale.torch.step.closure import ClosureStep
from gradscale.torch.step.contract import check_closure, is_capable
from gradscale.torch.step.entries import READY, STEPPED, UNSCALED, OptimizerEntry
from gradscale.torch.step.masters import with_masters_in
from gradscale.torch.step.passes import Iteration
from gradscale.torch.step.pipeline import Pipeline
from gradscale.torch.step.rescale import unscale_and_clip
from gradscale.torch.step.result import Step

Moves = list[tuple[int | str, Any, Any, float]]
"""Loss, scale before and after, and floor, of every scale that may have moved."""


def unscale_(pipeline: Pipeline, optimizer: Any) -> None:
    """Divides the gradients of `optimizer` by their scale, in place."""
    entry = pipeline.use(optimizer, "unscale_", unscaled=False)
    step = pipeline.collect([entry], "unscale_")
    pipeline.measure(step, unscale=True)
    if entry.groups:
        pipeline.agree(step)
    elif not step.grads.params:
        entry.stats = None  # nothing was checked, so there is nothing that update() could go by


def clip_grad_norm_(pipeline: Pipeline, optimizer: Any, max_norm: float) -> Tensor:
    """The 2-norm of the unscaled gradients, after unscaling and clipping them in place."""
    entry = pipeline.use(optimizer, "clip_grad_norm_")
    step = pipeline.collect([entry], "clip_grad_norm_")
    if step.in_place:
        pipeline.read_again(step, max_norm)
    else:
        pipeline.measure(step, max_norm=max_norm)
    pipeline.agree(step, max_norm)
    pipeline.decide(step)
    if entry.decision is not None:
        norm = value_at(entry.decision, "grad_norm")
        unscale_and_clip(pipeline, step)
        return norm
    stats: Any = entry.stats
    unscale_and_clip(pipeline, step)
    norm = stats.norm
    if isinstance(norm, Tensor):
        return torch.where(step.skip != 0, math.nan, norm)
    double = any(dtype is torch.float64 for _, dtype in step.grads.values)
    dtype = torch.float64 if double else torch.float32
    return torch.tensor(math.nan if step.skip else norm, dtype=dtype, device="cpu")


def step(pipeline: Pipeline, scaler: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Steps `optimizer` unless a gradient is not finite; what its `step()` returned, or None."""
    if args or kwargs:
        closure, others, named = _take_closure(args, kwargs)
        if closure is not None:
            return step_with_closure(pipeline, optimizer, closure, others, named)
    entry = pipeline.use(optimizer, "step")
    one = pipeline.collect([entry], "step")
    if not one.grads.params and not entry.groups:
        nothing(pipeline, one)
        return None
    if entry.older:
        return _older_contract(pipeline, one, args, {**kwargs, "grad_scaler": scaler})
    if entry.stage is UNSCALED:
        if entry.stats is None and entry.decision is None:
            raise CallOrderError(
                "step() found gradients, but unscale_() had found none. Call unscale_() after the "
                "last backward pass of an iteration."
            )
        if pipeline.recheck:
            pipeline.read_again(one)
            pipeline.agree(one)
    else:
        pipeline.measure(one, unscale=not one.masters and not is_capable(optimizer))
        if entry.groups:
            pipeline.agree(one)
    pipeline.decide(one)
    result = pipeline.run(one, args, kwargs)
    pipeline.record(one)
    return result


def nothing(pipeline: Pipeline, one: Step) -> None:
    """Ends the step of optimizers that have no gradients, with a warning."""
    optimizers: list[Any] = [entry.held for entry in one.entries]
    total = sum(len(group["params"]) for o in optimizers for group in o.param_groups)
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    warnings.warn(
        f"The step did nothing: 0 of the {total} parameters of this {names} have a gradient. "
        "Unless this is intended, check whether the loss is detached, whether all parameters are "
        "frozen, and whether the optimizer was created before the model was moved or rebuilt.",
        stacklevel=caller_level(),
    )
    one.nothing = True
    one.skip = True if pipeline.state.on_host else torch.ones_like(one.scale.tensor) > 0
    one.stats = pipeline.nothing_found()._replace(amax=None, norm=None)
    pipeline.record(one)


def _older_contract(pipeline: Pipeline, one: Step, args: Any, kwargs: dict[str, Any]) -> Any:
    """Steps an optimizer of torch's older contract, which asks the scaler for everything itself."""
    warnings.warn(
        "torch deprecated optimizers whose step() takes grad_scaler. Read the attributes "
        "grad_scale and found_inf instead.",
        FutureWarning,
        stacklevel=caller_level(),
    )
    entry = one.entries[0]
    result = entry.held.step(*args, **kwargs)
    if entry.stats is None:
        entry.stats = pipeline.nothing_found()._replace(amax=None, norm=None)
    one.skip, one.stats = entry.stats.finite ^ True, entry.stats
    pipeline.record(one)
    return result


def step_with_closure(
    pipeline: Pipeline,
    optimizer: Any,
    closure: Callable[[], Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    edit: Callable[[], None] | None = None,
) -> Any:
    """Steps with one scale for every evaluation of `closure`, wholly or not at all."""
    check_closure(closure)
    entry = pipeline.entries.of(optimizer, "step")
    if entry.stage is UNSCALED and not with_grad(optimizer.param_groups):
        entry.make_ready()  # what was unscaled is gone, and with it what was found
    if entry.stage is STEPPED or entry.mixed:
        pipeline.use(optimizer, "step")  # raises the error
    elif entry.stage is READY:
        made = pipeline.passes.count > max(entry.stepped_at, 0)
        if made and with_grad(optimizer.param_groups):
            unscale_(pipeline, optimizer)  # gradients from before the step, as SAM wants them
    elif pipeline.recheck:
        entry.held = optimizer
        pipeline.read_again(pipeline.step_of([entry]))
    entry.held = optimizer

    def run(evaluated: Callable[[], Any]) -> Any:
        return ClosureStep(pipeline, entry, evaluated, edit).run(args, kwargs or {})

    return with_masters_in(pipeline, entry, closure, run)


def _take_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """The closure among the arguments of `step`, if there is one, and the other arguments."""
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, {k: v for k, v in kwargs.items() if k != "closure"}
    return None, args, kwargs


# Update.


def update(pipeline: Pipeline, new_scale: float | Tensor | None = None) -> None:
    """Moves the scale by the policy, or to `new_scale`, and ends the iteration."""
    state, passes, monitor = pipeline.state, pipeline.passes, pipeline.monitor
    if state.live is None:
        state.placed("update()")
    now = passes.iteration
    if now is not None and now.thread not in (None, get_ident()):
        passes.claim()
    iteration = passes.last or passes.current()
    moves: Moves = []
    if not state.on_host:
        record = fused.advance_fused(pipeline) if new_scale is None else None
        if record is not None:
            end_iteration(pipeline)
            monitor.announce(record)
            return
        for one in monitor.steps:
            pipeline.count_late(one)
    if new_scale is not None:
        state.set_scale(new_scale)
        _move_losses(pipeline, iteration, moves)
    else:
        checked = []
        stepped = False
        for entry in pipeline.entries.all:
            if entry.held is not None:
                stepped = stepped or entry.stage is STEPPED
                if entry.stats is not None or entry.decision is not None:
                    checked.append(entry)
        if not checked and not stepped:
            raise CallOrderError(
                "update() was called, but no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) first. apply() updates by itself: after it, leave update() "
                "out."
            )
        if checked:
            for entry in checked if not state.on_host else ():
                entry.found()
            _move(pipeline, iteration, checked, moves)
    number = state.count_step(None if iteration.blank is None else iteration.blank ^ True)
    if state.on_host and not monitor.busy and _is_quiet(monitor.steps, moves):
        if monitor.steps:
            monitor.last, monitor.steps = monitor.steps[-1], []
        end_iteration(pipeline)
        return
    scale = state.live.scale if state.on_host else state.live.scale.clone()
    record = monitor.record(number, scale, moves)
    end_iteration(pipeline)
    monitor.announce(record)


def _is_quiet(steps: Sequence[Step], moves: Moves) -> bool:
    """Whether all steps were applied and no scale has moved, so that there is no event."""
    for one in steps:
        if one.skip:
            return False
    for _, before, after, _ in moves:
        if before != after:
            return False
    return True


def end_iteration(pipeline: Pipeline) -> None:
    """Makes every optimizer ready again."""
    for watcher in pipeline.monitor.watchers:
        watcher()
    entries, passes = pipeline.entries, pipeline.passes
    groups = pipeline.consensus.groups
    if groups.sharded and groups.has_stages() and passes.iteration is not None:
        _bring_unseen(pipeline, passes.iteration)
    passes.end()
    if passes.droppable:
        known = [(entry.stepped_at, entry.param_ids()) for entry in entries.all]
        passes.droppable = [
            each
            for each in passes.droppable
            if not all(at >= each.number for at, ids in known if not each.params.isdisjoint(ids))
        ]
        if not passes.droppable:
            passes.weighed.clear()


def _bring_unseen(pipeline: Pipeline, iteration: Iteration) -> None:
    """Keeps the scale of gradients whose passes this rank has not seen, and no step has used."""
    for entry in pipeline.entries.all:
        if entry.stage is READY and entry.left is None and not iteration.passes:
            entry.leave_unseen(iteration.scale)


def _move(
    pipeline: Pipeline, iteration: Iteration, checked: list[OptimizerEntry], moves: Moves
) -> None:
    """Moves the scale by the policy, given the gradients of `checked` entries."""
    state = pipeline.state
    stats = _folded(pipeline, checked, iteration)
    finite = stats.finite
    if iteration.penalty_finite is not None:
        finite = finite & iteration.penalty_finite
    passes = pipeline.passes
    for each in passes.droppable:
        if each.number > passes.count - iteration.passes:  # else an earlier update() has counted it
            finite = finite & (each.dropped ^ True)
    loss_finite: Any = True
    counts: Any = None
    if iteration.finite is None or iteration.captured:
        seen = iteration.loss_finite
        if iteration.loss is not None or not iteration.uses_losses:
            seen = iteration.losses_finite()
        if seen is not True or state.counters.bad_losses != 0:
            loss_finite = state.losses_finite(seen, iteration.penalty_finite)
    else:
        # A further update() for the same backward passes: only a new overflow counts.
        if isinstance(iteration.finite, Tensor) and iteration.finite.dim():
            iteration.finite = value_at(iteration.finite, "finite")
        counts = iteration.finite & (finite ^ True)
        seen = iteration.losses_finite()
        if seen is not None:
            counts = counts & seen
        finite = finite & iteration.finite
    iteration.finite = finite
    if iteration.blank is not None:
        counts = _also(counts, iteration.blank ^ True)
    if iteration.idle is not None:
        counts = _also(counts, iteration.idle ^ True)
    # If loss 0 took no part, its scale, which the gradients have now, can be found too high but not
    # good enough to grow.
    if iteration.common is not None:
        counts = _also(counts, iteration.common | (finite ^ True))
    elif iteration.own_passes and iteration.own_passes == iteration.passes:
        counts = _also(counts, finite ^ True)
    if state.policy.goes_by and iteration.own_passes:
        # Unknown without a pass of loss 0, or if that pass was not finite.
        amax: Any = math.inf if iteration.common_amax is None else iteration.common_amax
        sized: Any = torch.isfinite(amax) if isinstance(amax, Tensor) else math.isfinite(amax)
        if sized is not True:
            counts = _also(counts, (finite ^ True) | sized)
    stats = stats._replace(finite=finite, loss_finite=loss_finite)
    before, after = state.advance(stats, counts)
    still = state.on_host and before == after
    moves.append((0, before, after, 0.0 if still else state.floor))
    if iteration.losses:
        _move_losses(pipeline, iteration, moves)


def _move_losses(pipeline: Pipeline, iteration: Iteration, moves: Moves) -> None:
    """Moves the scales of the losses that have one of their own."""
    state = pipeline.state
    for loss_id, own in iteration.losses.items():
        if not own.passes or own.moved:
            continue
        own.moved = True
        fits = True if state.on_host else torch.ones_like(own.finite)
        stats = GradStats(own.finite, amax=own.amax, loss_finite=own.loss_finite, fits=fits)
        before, after = state.advance(stats, own.present, loss_id)
        moves.append((loss_id, before, after, state.floor))


def _folded(pipeline: Pipeline, checked: list[OptimizerEntry], iteration: Iteration) -> GradStats:
    """What all gradients of the iteration were like together, at the scale that moves."""
    state = pipeline.state
    if len(checked) == 1 and not state.policy.goes_by:
        only: Any = checked[0].stats
        return GradStats(finite=only.finite, fits=only.fits)
    stats: list[Any] = [entry.stats for entry in checked]
    finite, fits = stats[0].finite, stats[0].fits
    for one in stats[1:]:
        finite, fits = finite & one.finite, fits & one.fits
    amax = None
    if state.policy.goes_by:
        amax = _amax(pipeline, stats, iteration)
    if len(checked) == 1:
        return GradStats(finite=finite, fits=fits, amax=amax)
    groups = groups_of(checked)
    kinds = {frozenset(id(group.process) for group in entry.groups) for entry in checked}
    if len(kinds) > 1 and groups:
        # One scale, and optimizers about which different ranks have agreed.
        scale = iteration.scale
        bad, unfit = pipeline.consensus.any([finite ^ True, fits ^ True], groups, scale)
        finite, fits = bad ^ True, unfit ^ True
        if amax is not None:
            amax = pipeline.consensus.largest(amax, groups, scale)
    return GradStats(finite=finite, fits=fits, amax=amax)


def _amax(pipeline: Pipeline, stats: list[Any], iteration: Iteration) -> Any:
    """The largest scaled magnitude, as it would be at the scale that moves."""
    state, common = pipeline.state, iteration.common_amax
    found = [one.amax for one in stats if one.amax is not None]
    if iteration.own_passes:
        # Gradients of other losses are in the sum, at a scale that is not theirs.
        found = [] if common is None else [common]
    if state.on_host:
        amax = math.nan if any(map(math.isnan, found)) else max(found, default=0.0)
        return amax * (state.live.scale / iteration.scale.number)
    scale = state.live.scale
    if not found:
        return torch.zeros_like(scale)
    amax = torch.stack([move(one, scale.device) for one in found]).amax()
    # The scale that they have may not be the one that moves.
    return amax * (scale / move(iteration.scale.tensor, scale.device))


def _also(counts: Any, flag: Any) -> Any:
    """Both flags; None does not count."""
    return flag if counts is None else counts & flag
