"""A scaler of ours that goes on where one of torch's is."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

from gradscale.errors import CallOrderError, SettingError

Scaler = TypeVar("Scaler", bound=torch.amp.GradScaler)
_SHARDED = "torch.distributed.fsdp.sharded_grad_scaler"
# By the modules that define them: `replace()` gives the names to other classes.
_MODULES = (
    "torch.amp.grad_scaler",
    "torch.cuda.amp.grad_scaler",
    "torch.cpu.amp.grad_scaler",
    _SHARDED,
)


def from_torch(cls: type[Scaler], scaler: torch.amp.GradScaler) -> Scaler:
    """Returns a scaler with the settings and the state of `scaler`, which does not change.

        scaler = GradScaler.from_torch(trainer.scaler)

    A `ShardedGradScaler` of torch gives a `ShardedGradScaler` with its process group; a scaler of
    gradscale gives a copy. Call it between iterations: gradients scaled by `scaler` need its own
    `step()` and `update()`. **Waits for the device.**

    Raises:
        SettingError: The class of `scaler` is neither torch's nor gradscale's, or it has a setting
            or a scale that is not valid here.
        CallOrderError: `scaler` has unscaled or stepped since its last `update()`.
    """
    kind = type(scaler)
    if kind.__module__ not in _MODULES:
        if isinstance(scaler, cls):
            return copy.copy(scaler)
        raise SettingError(
            "from_torch() supports only torch's own scaler classes, got "
            f"{kind.__module__}.{kind.__qualname__}. The behaviour of such a class cannot be "
            "copied. To copy its state, use load_state_dict(scaler.state_dict())."
        )
    made: Any = cls
    settings: dict[str, Any] = {"enabled": scaler.is_enabled()}
    if kind.__module__ == _SHARDED:
        from gradscale.torch.distributed.fsdp_scaler import ShardedGradScaler

        made = cls if issubclass(cls, ShardedGradScaler) else ShardedGradScaler
        if not issubclass(made, cls):
            raise SettingError(
                "from_torch() of a ShardedGradScaler returns a ShardedGradScaler of gradscale, "
                f"which is not a {cls.__name__}. Call ShardedGradScaler.from_torch()."
            )
        settings["process_group"] = getattr(scaler, "process_group", None)
    if not scaler.is_enabled():  # it has no other settings
        return made(scaler._device, **settings)
    if any(state["stage"].name != "READY" for state in scaler._per_optimizer_states.values()):
        raise CallOrderError(
            "from_torch() was called between step() or unscale_() of the scaler and its update(). "
            "Call scaler.update() first."
        )
    saved = scaler.state_dict()
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        settings[name] = saved[name]
    try:
        # The scale of now, because default bounds give way to the first scale, not to a loaded one.
        ours = made(scaler._device, init_scale=saved["scale"], **settings)
    except SettingError as error:
        raise SettingError(
            f"from_torch(): {error} The scale and the settings of torch's scaler must be valid for "
            "the constructor. Change them in torch's scaler first."
        ) from None
    ours.load_state_dict(saved)
    return ours
