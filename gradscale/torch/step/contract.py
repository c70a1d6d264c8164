"""The contract with optimizers that skip on the device, torch's own made public.

An optimizer with `_step_supports_amp_scaling = True` reads two attributes in `step()`:
`grad_scale`, what the gradients must be divided by (None: they are unscaled), and `found_inf`, a
float32 that is exactly 0 or 1; at 1 the step writes nothing, not even its counters. Then the
host does not wait for the device.

An optimizer whose step is a launch of kernels may offer more: a method `fused_plan()`, which
returns a `FusedPlan` for the gradients that there are now, or None. A scaler then reads the
gradients by the optimizer's own tables of addresses, and steps without `optimizer.step()`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradscale.errors import SettingError
from gradscale.torch.grads.scale import move

if TYPE_CHECKING:
    from gradscale.torch.grads.triton.tables import Table

_ATTRIBUTES = ("grad_scale", "found_inf")
_ZERO_IN_FLOAT16 = 2.0**-25
"""Rounds to 0, half of the smallest number; what is above does not."""


class FusedPlan(Protocol):
    """One step of one optimizer, with the gradients that `fused_plan()` found.

    To be used at once, or dropped: it is no longer true when gradients, parameter groups or states
    have changed. The optimizer checks the addresses of gradients in `fused_plan()`, and all others
    in `step()`, while the device reads the gradients.
    """

    params: list[Tensor]
    """The parameters that have gradients, in the order of the groups."""

    def tables(self) -> list[tuple[torch.dtype, Table]]:
        """The dtype and the table of every launch; the first row of a table are gradients.

        With one dtype the tensors of all tables, in order, are those of `params`.
        """

    def step(self, divisor: Tensor, skip: Tensor) -> None:
        """Steps with gradients divided by `divisor`, a float32; not 0 in `skip` skips.

        Calls `optimizer.step()`, with the attributes of the contract, where there are hooks,
        overrides or a profiler, and where something else than the gradients has changed.
        """


def fused_plan(optimizer: Any) -> FusedPlan | None:
    """The plan of a step of `optimizer` by kernels; None if it offers none, or cannot now."""
    offer = getattr(optimizer, "fused_plan", None)
    plan: FusedPlan | None = None if offer is None else offer()
    return plan


def as_optimizers(given: Any, caller: str) -> list[Optimizer]:
    """One optimizer or several, which `caller` was given, as a list: what has `param_groups`."""
    is_tensor = isinstance(given, Tensor)
    is_model = isinstance(given, torch.nn.Module)  # some of which are iterable, as Sequential
    alone = hasattr(given, "param_groups") or is_tensor or is_model
    alone = alone or not isinstance(given, Iterable)
    several: list[Any] = [given] if alone else list(given)
    odd = [type(each).__name__ for each in several if not hasattr(each, "param_groups")]
    if odd or not several:
        what = odd[0] if odd else "none"
        hint = " Pass the optimizer of this model." if is_model else ""
        hint = " Pass the loss to backward() first." if is_tensor else hint
        raise SettingError(
            f"{caller}: optimizer must be an optimizer or several of them, got {what}.{hint}"
        )
    return several


def check_closure(closure: Any) -> None:
    """Raises a SettingError if `closure` is not a function."""
    if not callable(closure):
        raise SettingError(
            "closure must be a function that computes the loss and returns it, got "
            f"{type(closure).__name__}."
        )


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


def refuse_small_eps(optimizer: Any, params: list[Tensor]) -> None:
    """Raises a SettingError if `eps` is 0 in float16 and would be added to float16 numbers.

    torch's optimizers compute in the format of the parameter: where the average of squares is 0 in
    float16, which it is for gradients below 2**-12, they divide by 0. Those with masters do not.
    """
    if hasattr(optimizer, "keep_masters"):
        return
    half = {id(param) for param in params if param.dtype is torch.float16}
    for group in optimizer.param_groups if half else ():
        eps = group.get("eps")
        if not isinstance(eps, float) or not 0 < eps <= _ZERO_IN_FLOAT16:
            continue
        if any(id(param) in half for param in group["params"]):
            name = type(optimizer).__name__
            raise SettingError(
                f"eps={eps:g} of {name} is 0 in float16, and its parameters are float16, so the "
                "step would divide by 0 and the parameters would become NaN. Train with float32 "
                f'masters: MixedPrecision(model, optimizer, "fp16-master"), or {name} of '
                "gradscale.torch.optim if there is one. Or pass eps=1e-4."
            )


def writes_back(optimizer: Optimizer) -> bool:
    """Whether `step_on_device` with a scale surely leaves unscaled gradients where it steps."""
    step = getattr(type(optimizer), "step", None)  # a wrapper may have none of its own
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")
