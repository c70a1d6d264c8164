"""Gradients divided by what is still in them: the scale and clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradscale.torch.grads import backend
from gradscale.torch.grads.reference import clamp, clip_factor
from gradscale.torch.grads.scale import move
from gradscale.torch.step.agreement import agree
from gradscale.torch.step.result import Step

if TYPE_CHECKING:
    from gradscale.torch.step.pipeline import Pipeline


def unscale_and_clip(pipeline: Pipeline, step: Step) -> None:
    """Unscales and clips the gradients in place, as far as they are not yet."""
    # Of a step that is skipped, what clips may be NaN.
    if step.skip is True:
        step.clip = 1.0
    elif isinstance(step.skip, Tensor) and isinstance(step.clip, Tensor):
        step.clip = torch.where(move(step.skip, step.clip.device) != 0, 1.0, step.clip)
    factor = step.factor(wide=True)
    if step.scale.number is None or factor.item() != 1.0:
        backend.multiply(step.grads, factor)
    step.clip = 1.0
    if not step.in_place:
        pipeline.note_unscaled(step)
        if step.shared:
            pipeline.passes.note_unscaled(step.grads.params)


def limit_elements(pipeline: Pipeline, step: Step, limit: float, max_norm: float | None) -> None:
    """Limits the elements of unscaled gradients, and then finds what clips their norm."""
    clamp(step.grads.values, limit)
    if max_norm is not None:
        found = backend.measure(step.grads, step.scale.unit(), max_norm=max_norm)
        step.clip = found.clip
        if any(entry.groups for entry in step.entries):
            step.clip = clip_factor(agree(pipeline, step, found.stats.norm), max_norm)
