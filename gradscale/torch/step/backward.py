"""`backward()` and `grad()`: scaled losses, and the passes that are run for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import SettingError, caller_level
from gradscale.torch.distributed.groups import has_ranks
from gradscale.torch.grads.scale import times
from gradscale.torch.step.own_losses import (
    OwnLoss,
    backward_common,
    backward_droppable,
    backward_own,
)
from gradscale.torch.step.pipeline import Pipeline


def scale_all(scaler: Any, outputs: Any) -> Any:
    """`outputs`, an iterable of tensors, each scaled by `scaler.scale()`; of the same kind."""
    # Not `str | bytes`, which torch 2.8 cannot trace.
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, Mapping)):
        scaled_items = map(scaler.scale, outputs)
        if not isinstance(outputs, (list, tuple)):
            return scaled_items
        # A namedtuple is not made from one iterable.
        return getattr(outputs, "_make", type(outputs))(scaled_items)
    raise ValueError(
        f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}."
    )


def backward(
    scaler: Any,
    pipeline: Pipeline,
    loss: Any,
    loss_id: int | str,
    droppable: bool,
    spare: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Scales `loss`, a tensor or several, and runs its backward pass."""
    several = isinstance(loss, Iterable) and not isinstance(loss, (str, bytes, Mapping))
    if not isinstance(loss, Tensor) and not several:
        hint = " Pass the loss itself, not loss.item()." if isinstance(loss, float) else ""
        what = type(loss).__name__
        raise ValueError(f"backward() takes a tensor or an iterable of tensors, got {what}.{hint}")
    losses = [loss] if isinstance(loss, Tensor) else list(loss)
    if not losses or not all(isinstance(one, Tensor) for one in losses):
        what = ", ".join(type(one).__name__ for one in losses) or "nothing"
        raise ValueError(f"backward() takes a tensor or an iterable of tensors, got {what}.")
    check_loss_id(loss_id)
    if spare is not None:
        warnings.warn(
            "backward(spare=...) is deprecated. Use droppable=.",
            DeprecationWarning,
            stacklevel=caller_level(),
        )
        droppable = spare
    if droppable and loss_id != 0:
        raise SettingError(
            f"droppable=True cannot be combined with loss_id, got loss_id={loss_id!r}."
        )
    if not scaler.is_enabled():
        torch.autograd.backward(losses, **kwargs)
        return
    passes, state = pipeline.passes, pipeline.state
    if droppable or loss_id != 0:
        passes.refuse_unreduced("droppable=True" if droppable else "a loss_id")
    if loss_id != 0:
        _backward_own(scaler, pipeline, losses, loss_id, kwargs)
        return
    scaled = [scaler.scale(one) for one in losses]
    if droppable:
        backward_droppable(scaled, passes, _known(pipeline), _agreed(pipeline), kwargs)
    elif state.losses and state.policy.goes_by and not kwargs.get("create_graph"):
        # Beside losses with scales of their own, its gradients are only known if measured alone.
        amax = backward_common(scaled, passes, _known(pipeline), kwargs)
        iteration = passes.current()
        known = iteration.common_amax
        if known is not None:
            amax = torch.maximum(known, amax) if isinstance(amax, Tensor) else max(known, amax)
        iteration.common_amax = amax
    else:
        torch.autograd.backward(scaled, **kwargs)


def _backward_own(
    scaler: Any, pipeline: Pipeline, losses: list[Tensor], loss_id: int | str, kwargs: Any
) -> None:
    """Runs the pass of losses with a scale of their own."""
    state, passes = pipeline.state, pipeline.passes
    if state.live is None:
        scaler._lazy_init_scale_growth_tracker(losses[0].device)
    iteration = passes.claim()
    passes.scaled += 1
    own = iteration.losses.get(loss_id)
    if own is None:
        if loss_id not in state.losses:
            passes.refuse_capture(f"A loss with loss_id={loss_id!r} is scaled for the first time")
        half = any(one.dtype is torch.float16 for one in losses)
        if half:
            passes.check_half()
        own = iteration.losses[loss_id] = OwnLoss(state.loss_scale(loss_id, half))
    scaled = [times(one, own.scale.tensor) for one in losses]
    backward_own(scaled, passes, own, _known(pipeline), kwargs)
    for one in losses:
        own.note_loss(one)
        if iteration.first is None and one.numel() == 1:
            iteration.first = one.detach()


def _known(pipeline: Pipeline) -> list[Tensor]:
    """The parameters of named models and of known optimizers, where there are ranks."""
    if not has_ranks():
        return []
    groups = [group for entry in pipeline.entries.all for group in entry.param_groups()]
    known = [*pipeline.monitor.names.params(), *(p for group in groups for p in group["params"])]
    return list({id(param): param for param in known}.values())


def _agreed(pipeline: Pipeline) -> Any:
    """A function: whether a flag holds on all ranks that must agree on some parameters."""

    def agreed(fine: Any, params: Sequence[Tensor]) -> Any:
        groups = pipeline.consensus.groups.among(params)
        scale = pipeline.passes.current().scale
        return pipeline.consensus.any([fine ^ True], groups, scale)[0] ^ True

    return agreed


def penalty_grad(
    scaler: Any, pipeline: Pipeline, outputs: Any, inputs: Any, kwargs: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of scaled `outputs`, unscaled."""
    several = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if pipeline.state.live is None:
        scaler._lazy_init_scale_growth_tracker(several[0].device)
    half = any(output.dtype is torch.float16 for output in several)
    if half:
        pipeline.passes.check_half()
    iteration = pipeline.passes.claim(half)
    iteration.half = iteration.half or half
    scaled = [times(output, iteration.scale.tensor) for output in several]
    grads = torch.autograd.grad(scaled, inputs, **kwargs)
    iteration.note_penalty(grads)
    return tuple(None if g is None else times(g, iteration.scale.inverse) for g in grads)


def check_loss_id(loss_id: Any) -> None:
    """Raises SettingError if `loss_id` cannot be one."""
    if isinstance(loss_id, bool) or not isinstance(loss_id, int | str):
        raise SettingError(f"loss_id must be a whole number or a string, got {loss_id!r}.")
