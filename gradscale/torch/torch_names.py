"""torch's private names of a scaler, which Lightning, accelerate, FSDP and torch's tests read.

Settings are in the frozen policy and numbers in its state, each in one place: the names are views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch.grads.collect import Gradients, with_grad
from gradscale.torch.grads.reference import measure
from gradscale.torch.grads.scale import Scale
from gradscale.torch.step import entries


def setting(name: str, missing: float) -> Any:
    """A view of a setting of the policy; `missing` where the policy has no such setting."""
    return property(
        lambda scaler: getattr(scaler._state.policy, name, missing),
        lambda scaler, value: scaler._state.change(name, value),
    )


def setter(name: str) -> Any:
    """Returns the method that sets a setting of the policy."""

    def put(scaler: Any, value: Any) -> None:
        scaler._state.change(name, value)

    put.__name__ = f"set_{name}"
    put.__doc__ = f"Sets {name}, a setting of `Dynamic`."
    return put


def initial(name: str, missing: float) -> Any:
    """A view of a field of the first state; `missing` where it has no such field."""

    def put(scaler: Any, value: Any) -> None:
        scaler._state.initial = scaler._state.initial._replace(**{name: value})

    return property(lambda scaler: getattr(scaler._state.initial, name, missing), put)


def live(name: str) -> Any:
    """A field of the state as a tensor, None before the first loss; setting ends the iteration."""

    def put(scaler: Any, value: Any) -> None:
        if scaler._state.live is None:
            scaler._pipeline.place(value.device)
        scaler._state.put(name, value)
        scaler._pipeline.passes.end()

    return property(lambda scaler: scaler._state.field(name), put)


def states() -> Any:
    """A copy of the states of the optimizers in torch's form."""
    return property(lambda scaler: scaler._pipeline.entries.as_torch(scaler._state.device))


def check_scale_growth_tracker(scaler: Any, funcname: str) -> tuple[Any, Any]:
    """The scale and the count of finite steps; a CallOrderError before the first loss."""
    scaler._state.placed(f"{funcname}()")
    tracker = scaler._growth_tracker
    if tracker is None:
        tracker = torch.zeros_like(scaler._scale, dtype=torch.int32)
    return scaler._scale, tracker


def get_scale_async(scaler: Any) -> Tensor | None:
    """The scale as a tensor."""
    return scaler._scale


def get_growth_tracker(scaler: Any) -> int:
    """The count of finite steps as a number."""
    if not scaler.is_enabled():
        return 0
    tracker = scaler._growth_tracker
    return int(scaler._init_growth_tracker if tracker is None else tracker)


def unscale_grads_(
    scaler: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
) -> dict[torch.device, Tensor]:
    """Multiplies the gradients of `optimizer` by `inv_scale`; float32 flags per device."""
    grads = Gradients(with_grad(optimizer.param_groups))
    inverse = inv_scale.reshape(())
    scale = Scale(inverse.reciprocal(), None, inverse)
    finite = measure(grads, scale, unscale=True).stats.finite
    return {device: (~finite).float().to(device) for device, _ in grads.values}


def check_inf_per_device(scaler: Any, optimizer: Optimizer) -> dict[Any, Any]:
    """float32 flags of what is not finite, per device, without unscaling."""
    pipeline = scaler._pipeline
    entry = pipeline.use(optimizer, "_check_inf_per_device")
    pipeline.measure(pipeline.collect([entry], "_check_inf_per_device"))
    return found_inf_per_device(scaler, optimizer)


def found_inf_per_device(scaler: Any, optimizer: Optimizer) -> dict[Any, Any]:
    """float32 flags of what was found not to be finite, per device."""
    entry = scaler._pipeline.entries.of(optimizer, "step")
    return entries.found_inf_per_device(entry, scaler._state.device)
