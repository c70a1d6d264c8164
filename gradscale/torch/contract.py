"""The contract with optimizers that skip on the device, torch's own made public.

An optimizer with `_step_supports_amp_scaling = True` reads two attributes in `step()`: `grad_scale`, what the
gradients must be divided by (None: they are unscaled), and `found_inf`, a float32 that is exactly 0 or 1; at 1 the
step writes nothing, not even its counters. Then nobody waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradscale.torch.unscale import move, readable

_ATTRIBUTES = ("grad_scale", "found_inf")


def step_on_device(
    optimizer: Optimizer,
    scale: Tensor | None,
    skipped: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What `optimizer.step()` returned, called with the attributes of the contract and put back as it was."""
    theirs = {name: getattr(optimizer, name) for name in _ATTRIBUTES if hasattr(optimizer, name)}
    own = theirs.get("grad_scale")  # the user's, to be divided out as well
    first = _without_momentum(optimizer)
    if first and (readable(skipped) or any(group["dampening"] for group, _ in first)) and skipped:
        # Waits on a GPU, but only until the first step with momentum and dampening is applied.
        return None
    optimizer.grad_scale = own if scale is None else scale if own is None else scale * own  # type: ignore[attr-defined]
    optimizer.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        for name in _ATTRIBUTES:
            delattr(optimizer, name)
        for name, value in theirs.items():
            setattr(optimizer, name, value)
    for _, param in first:
        buffer = optimizer.state.get(param, {}).get("momentum_buffer")
        if buffer is not None:
            buffer.masked_fill_(move(skipped, buffer.device), 0)
    return result


def _without_momentum(optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """The parameters that fused SGD is about to make a momentum buffer for, with their groups.

    Its kernel leaves the new buffer uninitialised when the step is skipped, and then takes it for a real one. Zeros
    are as good as none without dampening: momentum * 0 + grad is grad.
    """
    if not isinstance(optimizer, SGD):
        return []
    return [
        (group, param)
        for group in optimizer.param_groups
        if group["momentum"]
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]


def left_by(optimizer: Optimizer, skipped: Tensor, inv_scale: Tensor) -> Tensor:
    """What the gradients must still be multiplied by after `step_on_device` with a scale.

    torch's fused kernels write the unscaled gradients back, unless they skip; NaN where that is not known.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return torch.where(skipped, inv_scale, torch.ones_like(inv_scale))
    return torch.full_like(inv_scale, torch.nan)
