"""Steps with a closure: LBFGS, line searches, SAM.

Every evaluation has unscaled gradients and the unscaled loss, and all of them one scale. Such a
step moves the parameters between evaluations, so it is taken wholly or not at all: a snapshot
undoes it when an evaluation overflows. That costs a copy of the parameters and of the optimizer's
state, and it waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradscale.errors import CallOrderError
from gradscale.policy import GradStats
from gradscale.torch.distributed.consensus import largest
from gradscale.torch.distributed.groups import has_ranks
from gradscale.torch.grads.collect import grouped, with_grad
from gradscale.torch.grads.dtensor import local
from gradscale.torch.step.agreement import agree
from gradscale.torch.step.checks import find_groups, weigh
from gradscale.torch.step.entries import UNSCALED, OptimizerEntry
from gradscale.torch.step.pipeline import Pipeline


class _Undo(Exception):
    """Leaves the optimizer's step in the middle."""


class ClosureStep:
    """One step of an optimizer with a closure.

    Args:
        pipeline: The stages.
        entry: The entry of the optimizer.
        closure: Computes the loss, runs its scaled backward pass and returns the unscaled loss.
        edit: Changes the unscaled gradients after every evaluation, say by clipping.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        entry: OptimizerEntry,
        closure: Callable[[], Any],
        edit: Callable[[], None] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._entry = entry
        self._optimizer: Any = entry.held
        self._closure = closure
        self._edit = edit
        self._ready = entry.stage is UNSCALED
        """Whether there were gradients before the step, so that it need not evaluate."""
        self._evaluations = 0
        self._undone = False
        self._good: GradStats | None = None
        """What the last evaluation that was not rejected has found."""
        self._dropped: Any = None
        """How many droppable passes its last evaluation has left out; None without any."""
        self._reached: dict[int, Tensor] = {}
        """The parameters that had a gradient in some evaluation, by their ids."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the optimizer's `step` returned; None, with nothing changed, if it was undone."""
        entry, pipeline = self._entry, self._pipeline
        before = entry.found()
        bad = False
        if self._ready:
            if before is None:
                raise CallOrderError(
                    "step() found gradients, but unscale_() had found none. Call unscale_() after "
                    "the last backward pass of an iteration."
                )
            bad = not (bool(before.finite) and bool(before.fits))
        result = None if self._anywhere(bad)[0] else self._run(args, kwargs)
        if entry.stats is None:  # the gradients of another rank were bad before it began
            entry.stats = pipeline.nothing_found()._replace(amax=None, norm=None)
        if self._undone:
            # Not applied, whatever the gradients of the last evaluation were like.
            no = (
                False if pipeline.state.on_host else torch.zeros_like(pipeline.state.live.scale) > 0
            )
            entry.stats = entry.stats._replace(fits=no)
        elif self._good is not None:  # the last evaluation may have been rejected
            entry.stats, entry.lacking = self._good, None
        step = pipeline.step_of([entry])
        if entry.groups:
            agree(pipeline, step)
        pipeline.decide(step)
        step.loss, step.dropped = result, self._dropped
        pipeline.record(step)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the optimizer's `step` returned; None if it was undone."""
        undo = _snapshot(self._optimizer)
        try:
            result = self._optimizer.step(self._evaluate, *args, **kwargs)
            if not self._evaluations and not self._ready:
                raise CallOrderError(
                    "The optimizer never called the closure, and there were no scaled gradients "
                    "before step(). Call scaler.scale(loss).backward() first."
                )
            if not self._parameters_finite():
                raise _Undo
        except _Undo:
            undo()
            self._undone = True
            return None
        except BaseException:
            undo()
            self._entry.make_ready()
            raise
        return result

    def _evaluate(self) -> Any:
        """The closure's unscaled loss, with the gradients unscaled."""
        pipeline, entry = self._pipeline, self._entry
        passes = pipeline.passes
        # A closure clears its gradients, or else it would add to those of its last evaluation.
        entry.make_ready()
        entry.left, entry.stepped_at = None, passes.count
        scaled_before = passes.scaled
        loss = self._closure()
        if passes.scaled == scaled_before:
            raise CallOrderError(
                "The closure ran without scaling its loss. In the closure, call "
                "scaler.backward(loss) instead of loss.backward(), and return the loss."
            )
        if loss is None or passes.last_scaled() is loss:
            what = "nothing" if loss is None else "the scaled loss"
            raise CallOrderError(
                f"The closure must return the unscaled loss, but it returned {what}."
            )
        self._evaluations += 1
        if has_ranks():
            groups = self._optimizer.param_groups
            find_groups(pipeline, entry, [p for group in groups for p in group["params"]])
        step = pipeline.step_of([entry])
        if passes.droppable:
            weigh(pipeline, step)
            self._dropped = step.dropped
        self._reached.update((id(p), p) for p in step.grads.params)
        pipeline.measure(step, unscale=True)
        stats: GradStats = entry.found()  # type: ignore[assignment]
        found = bool(step.skip) or not bool(stats.finite)  # it skips if all passes were dropped
        # A loss with a scale of its own that overflowed has left zeros behind.
        own = passes.origin().losses.values()
        found |= any(not bool(each.finite) for each in own if each.reaches(entry))
        value = loss if isinstance(loss, Tensor) else torch.tensor(loss, device="cpu")
        loss_finite = bool(torch.isfinite(value).all())
        found, bad_loss, unfit = self._anywhere(found, not loss_finite, not bool(stats.fits))
        if not (bad_loss or found or unfit):
            self._good = stats
            if self._edit is not None:
                self._edit()
            return loss
        if not bad_loss or self._evaluations == 1:
            raise _Undo
        # A trial step that went too far. As infinity the line search rejects it; NaN compares false
        # with everything. Gradients that lack a part become NaN: who uses them is undone.
        for param in step.grads.params if found else ():
            param.grad.mul_(math.nan)  # type: ignore[union-attr]
        return torch.full_like(loss, torch.inf) if isinstance(loss, Tensor) else torch.inf

    def _anywhere(self, *flags: bool) -> list[bool]:
        """Which of `flags` hold on any rank that must agree."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        groups = self._pipeline.consensus.groups.among(params)
        if not groups:
            return list(flags)
        here = torch.tensor(flags, dtype=torch.float32, device=params[0].device)
        return [bool(flag) for flag in largest(here, groups).tolist()]

    def _parameters_finite(self) -> bool:
        """Whether the step left only finite numbers behind."""
        held = {id(p): p for p in with_grad(self._optimizer.param_groups)} | self._reached
        params = [local(p).detach() for p in held.values()]
        bad = False
        for group in grouped(params).values():  # others were not stepped
            bad = bad or not all(bool(torch.isfinite(value).all()) for value in group)
        return not self._anywhere(bad)[0]


def _snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """A function that puts back the parameters, state and settings that `optimizer` has now."""
    parts = [_keep(optimizer.param_groups), _keep(optimizer.state)]

    def undo() -> None:
        with torch.no_grad():
            for put_back in parts:
                put_back()

    return undo


def _keep(value: Any) -> Callable[[], Any]:
    """A function that gives `value` back with the contents it has now.

    The very same tensors, dicts and lists: others may hold them, as a user holds the tensor that
    is the learning rate. A tensor subclass is kept by its parts, for not all have a clone().
    """
    put_back: Callable[[], Any]
    if isinstance(value, dict):
        items = {key: _keep(item) for key, item in value.items()}

        def put_back() -> Any:
            contents = {key: item() for key, item in items.items()}
            value.clear()
            value.update(contents)
            return value

    elif isinstance(value, list):
        kept = [_keep(item) for item in value]

        def put_back() -> Any:
            value[:] = [item() for item in kept]
            return value

    elif isinstance(value, tuple) or is_traceable_wrapper_subclass(value):
        parts = (
            value
            if isinstance(value, tuple)
            else [getattr(value, n) for n in value.__tensor_flatten__()[0]]
        )
        kept = [_keep(part) for part in parts]

        def put_back() -> Any:
            for part in kept:
                part()
            return value

    elif isinstance(value, Tensor):
        copy = value.detach().clone()

        def put_back() -> Any:
            value.detach().copy_(copy)
            return value

    else:

        def put_back() -> Any:
            return value

    return put_back
