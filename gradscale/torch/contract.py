"""The contract with optimizers that skip on the device, torch's own made public.

An optimizer with `_step_supports_amp_scaling = True` reads two attributes in `step()`:
`grad_scale`, what the gradients must be divided by (None: they are unscaled), and `found_inf`, a
float32 that is exactly 0 or 1; at 1 the step writes nothing, not even its counters. Then nobody
waits for the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradscale.errors import SettingError
from gradscale.torch.unscale import move

_ATTRIBUTES = ("grad_scale", "found_inf")


def as_optimizers(given: Any, caller: str) -> list[Optimizer]:
    """One optimizer or several, which `caller` was given, as a list: what has `param_groups`."""
    alone = hasattr(given, "param_groups") or not isinstance(given, Iterable)
    several: list[Any] = [given] if alone else list(given)
    odd = [type(each).__name__ for each in several if not hasattr(each, "param_groups")]
    if odd or not several:
        what = odd[0] if odd else "none"
        raise SettingError(f"{caller}: optimizer must be one or more, got {what}.")
    return several


def is_capable(optimizer: Optimizer) -> bool:
    """Whether `optimizer` keeps the contract."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not takes_scaler(
        optimizer
    )


def takes_scaler(optimizer: Optimizer) -> bool:
    """Whether `optimizer` keeps an older contract, in which `step()` is handed the scaler."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    kind: Any = type(optimizer)
    return bool(supports) and _step_takes_scaler(kind)


@functools.cache  # looking costs 0.1 ms (H200's host)
def _step_takes_scaler(kind: type[Any]) -> bool:
    """Whether `step()` of such optimizers has an argument for the scaler."""
    step = getattr(kind, "step", None)  # a wrapper may have none of its own
    return step is not None and "grad_scaler" in inspect.signature(step).parameters


def step_on_device(
    optimizer: Optimizer,
    scale: Tensor | None,
    skipped: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What `optimizer.step()` returned, called with the attributes of the contract set."""
    first = _without_momentum(optimizer)
    # Waits on a GPU, but only until a first step with dampening is applied.
    if any(group["dampening"] for group, _ in first) and skipped:
        return None
    theirs = {name: getattr(optimizer, name) for name in _ATTRIBUTES if hasattr(optimizer, name)}
    own = theirs.get("grad_scale")  # the user's, to be divided out as well
    ours = own if scale is None else scale if own is None else scale * own
    try:
        for name, value in zip(_ATTRIBUTES, (ours, skipped.to(torch.float32)), strict=True):
            setattr(optimizer, name, value)
        result = optimizer.step(*args, **kwargs)
    finally:
        for name in _ATTRIBUTES:
            if name in theirs:
                setattr(optimizer, name, theirs[name])
            else:
                delattr(optimizer, name)
    for _, param in first:
        buffer = optimizer.state[param]["momentum_buffer"]
        buffer.masked_fill_(move(skipped, buffer.device) != 0, 0)
    return result


def _without_momentum(optimizer: Optimizer) -> list[tuple[dict[str, Any], Tensor]]:
    """The parameters that fused SGD is about to make a momentum buffer for, with their groups.

    Its kernel leaves the new buffer uninitialised when the step is skipped, and then takes it for a
    real one. Zeros are as good as none without dampening: momentum * 0 + grad is grad.
    """
    if not isinstance(optimizer, SGD) or getattr(optimizer, "_begins_with_zeros", False):
        return []
    return [
        (group, param)
        for group in optimizer.param_groups
        if group["momentum"]
        for param in group["params"]
        if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
    ]


def writes_back(optimizer: Optimizer) -> bool:
    """Whether `step_on_device` with a scale surely leaves unscaled gradients where it steps."""
    return getattr(type(optimizer).step, "__module__", "").startswith("torch.optim.")
