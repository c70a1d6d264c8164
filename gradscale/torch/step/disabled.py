"""Steps of a disabled scaler: the optimizer steps, and the outcome is `applied`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradscale.torch.step.apply import clip
from gradscale.torch.step.pipeline import Pipeline
from gradscale.torch.telemetry.monitor import plain_outcome
from gradscale.torch.telemetry.outcome import StepOutcome


def step(pipeline: Pipeline, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """What `optimizer.step()` returned."""
    result = optimizer.step(*args, **kwargs)
    _note(pipeline, [optimizer], result)
    return result


def apply(
    pipeline: Pipeline,
    optimizers: Sequence[Any],
    clip_norm: float | None,
    clip_value: float | None,
    closure: Callable[[], Any] | None,
    zero_grad: bool,
) -> StepOutcome:
    """The outcome, after clipping, stepping and clearing."""

    def clipped() -> Any:
        loss = None if closure is None else closure()
        clip(optimizers, clip_norm, clip_value)
        return loss

    if closure is None:
        clipped()
    args = () if closure is None else (clipped,)
    returned = [optimizer.step(*args) for optimizer in optimizers]
    outcome = _note(pipeline, optimizers, returned[0])
    try:
        for optimizer in optimizers if zero_grad else ():
            optimizer.zero_grad()
    finally:
        update(pipeline)
    return outcome


def update(pipeline: Pipeline) -> None:
    """Delivers what follows from the steps."""
    if pipeline.monitor.steps:
        record = pipeline.monitor.record(0, 1.0, ())
        for watcher in pipeline.monitor.watchers:
            watcher()
        pipeline.monitor.announce(record)


def _note(pipeline: Pipeline, optimizers: Sequence[Any], returned: Any) -> StepOutcome:
    """The outcome of a step that took place, after keeping it."""
    outcome, monitor = plain_outcome(returned), pipeline.monitor
    monitor.note_plain(optimizers, outcome)
    for optimizer in optimizers:
        pipeline.entries.of(optimizer, "step").step = monitor.steps[-1]
    return outcome


def clip_grad_norm_(optimizer: Any, max_norm: float) -> torch.Tensor:
    """Torch's own clipping of the gradients of `optimizer`."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_([p for p in params if p.grad is not None], max_norm)
