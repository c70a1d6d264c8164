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
    inverse = step.scale.unit().inverse if step.in_place else step.scale.inverse
    if step.skip is True:
        factor = inverse
    elif step.scale.number is not None:
        number = step.clip * (1.0 if step.in_place else 1.0 / step.scale.number)
        # What clips float64 gradients can be 0 in float32.
        dtype = torch.float32 if number >= 2.0**-126 else torch.float64
        factor = torch.full((), number, dtype=dtype, device="cpu")
    else:
        factor = inverse * step.clip
        if isinstance(step.skip, Tensor):
            factor = torch.where(move(step.skip, factor.device) != 0, inverse, factor)
    if step.scale.number is None or factor.item() != 1.0:
        backend.multiply(step.grads, factor)
    step.clip = 1.0
    if not step.in_place:
        pipeline.note_unscaled(step)


def limit_elements(pipeline: Pipeline, step: Step, limit: float, max_norm: float | None) -> None:
    """Limits the elements of unscaled gradients, and then finds what clips their norm."""
    clamp(step.grads.values, limit)
    if max_norm is not None:
        found = backend.measure(step.grads, step.scale.unit(), max_norm=max_norm)
        step.clip = found.clip
        if any(entry.groups for entry in step.entries):
            step.clip = clip_factor(agree(pipeline, step, found.stats.norm), max_norm)
