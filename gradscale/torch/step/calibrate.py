"""The first good scale, found by backward passes alone, before anything is stepped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError, StuckError
from gradscale.policy import GradStats, Headroom, HeadroomState, Off
from gradscale.torch.distributed.consensus import largest
from gradscale.torch.grads.collect import Gradients
from gradscale.torch.grads.reference import measure
from gradscale.torch.grads.scale import UNIT, times
from gradscale.torch.state import ScaleState
from gradscale.torch.step.checks import refuse_others
from gradscale.torch.step.contract import check_closure
from gradscale.torch.step.loop import end_iteration
from gradscale.torch.step.pipeline import Pipeline
from gradscale.torch.step.snapshot import Snapshot

PASSES = 8
"""Backward passes that are enough for any scale: four to come down from, two to go up, two to see.
"""


def calibrate(
    pipeline: Pipeline,
    closure: Callable[[], Tensor],
    optimizers: Sequence[Any],
    model: torch.nn.Module | None,
) -> float:
    """The scale that suits the gradients of `closure`, which the state has from here on.

    With the policy `Off` it is 1, and no pass is run.

    Raises:
        StuckError: No scale gave finite gradients, or the loss is not finite.
    """
    check_closure(closure)
    params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    if not params:
        raise SettingError("calibrate() takes optimizers with parameters, got none.")
    refuse_others(pipeline.passes)
    if pipeline.entries.in_use():
        raise CallOrderError(
            "calibrate() was called in the middle of an iteration. Call update() first."
        )
    if isinstance(pipeline.state.policy, Off):
        return 1.0
    rule = _rule_to_search_by(pipeline.state)
    state = rule.init()._replace(scale=_power_below(pipeline.state.number()))
    for _ in range(PASSES):
        stats = _try(pipeline, closure, params, model, state.scale)
        moved = rule.update(state, stats)
        if stats.finite and moved.scale == state.scale:
            return _take_over(pipeline, moved)
        state = moved
    if stats.finite:  # still growing: the next scale of the rule, not yet tried
        return _take_over(pipeline, state)
    raise StuckError(
        f"calibrate() found no scale: after {PASSES} backward passes, the last at "
        f"{float(state.scale):g}, gradients were still not finite. Look for a division by zero "
        "or a logarithm of zero in the backward pass."
    )


def _rule_to_search_by(state: ScaleState) -> Headroom:
    """The policy, if it is a `Headroom`; else one with the same bounds."""
    if isinstance(state.policy, Headroom):
        return state.policy
    low, high = state.bounds()
    low, high = 2.0 ** math.ceil(math.log2(low)), _power_below(high)
    start = min(max(2.0**16, low), high)
    return Headroom(init_scale=start, min_scale=low, max_scale=high, format=state.format.name)


def _try(
    pipeline: Pipeline,
    closure: Callable[[], Tensor],
    params: list[Tensor],
    model: torch.nn.Module | None,
    scale: float,
) -> GradStats:
    """What the gradients are like at `scale`; nothing is left of the pass."""
    with undone(params, model):
        loss = closure()
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise SettingError(
                "closure must return the loss, a tensor that requires a gradient, got "
                f"{type(loss).__name__}. It must compute the loss and nothing else."
            )
        if pipeline.state.live is None:
            pipeline.place(loss.device)
        groups = pipeline.consensus.groups.among(params)
        total = loss.detach().float().sum().reshape(1)
        worst = float(largest((total * 0).abs(), groups))  # NaN if one is not finite
        if not math.isfinite(worst):
            raise StuckError(
                f"calibrate() found a loss of {float(total):g}, or one on another rank that is not "
                "finite, and the scale is not the cause. Check the batch and the forward pass."
            )
        factor = torch.full((), scale, dtype=torch.float32, device=loss.device)
        torch.autograd.backward(times(loss, factor))
        there = [p for p in params if p.grad is not None]
        if not there and not groups:
            raise SettingError(
                "The loss of closure does not depend on any parameter of the optimizers."
            )
        amax = 0.0
        if there:
            amax = measure(Gradients(there), UNIT, amax=True).stats.amax
        found = torch.full((1,), amax, dtype=torch.float32, device=loss.device)
        amax = float(largest(found, groups))
    finite = math.isfinite(amax)
    return GradStats(finite=finite, amax=amax, exponent=math.frexp(amax)[1] if finite else 0)


def _take_over(pipeline: Pipeline, found: HeadroomState) -> float:
    """Goes on with the state that was found, or with its scale alone."""
    state = pipeline.state
    known = found._asdict() if isinstance(state.policy, Headroom) else {"scale": found.scale}
    end_iteration(pipeline)
    state.write(**known)
    return float(found.scale)


def _power_below(number: float) -> float:
    """The largest power of two that is at most `number`."""
    return 2.0 ** (math.frexp(number)[1] - 1)


@contextmanager
def undone(params: Sequence[Tensor], model: torch.nn.Module | None) -> Iterator[None]:
    """Puts back gradients, the random state and the buffers of `model` afterwards."""
    watched = {id(p): p for p in (*params, *(model.parameters() if model is not None else ()))}
    grads = [(param, param.grad) for param in watched.values()]
    snapshot = Snapshot([] if model is None else [model])
    for param, _ in grads:
        param.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for param, grad in grads:
            param.grad = grad
        snapshot.restore()
