"""`apex.amp`: mixed precision by opt level, with a scale for every loss.

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
scaled_loss.backward()
torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
optimizer.step()
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.checkpoints import peers
from gradscale.compat.apex import models as casts
from gradscale.compat.apex.amp_optimizer import AmpOptimizer, amp_optimizer, scaled_pass
from gradscale.compat.apex.cast_mode import CastMode
from gradscale.compat.apex.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from gradscale.compat.apex.handle import AmpHandle, NoOpHandle
from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.compat.apex.options import DISABLED, Options, resolve
from gradscale.compat.apex.session import SESSION, disable_casts
from gradscale.errors import SettingError, StateError, caller_level

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

_amp_state = SESSION
"""What scripts read and set: `loss_scalers[0]._loss_scale`, `opt_properties`, `handle`."""


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    cast_model_outputs: Any = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Has models and optimizers train as `opt_level` says; the same objects, in the same shapes.

    Call it after the models are on their device, and before they are wrapped in DDP.

    Args:
        models: A model, or a list of them.
        optimizers: An optimizer, or a list of them; None to infer only, and only the models come
            back.
        enabled: False switches everything here off.
        opt_level: "O0" float32, "O1" autocast, "O2" half weights with float32 masters and batch
            norms, "O3" half altogether.
        cast_model_type: The format of the weights, also torch.bfloat16.
        patch_torch_functions: Whether forward passes run under autocast; O1 only.
        keep_batchnorm_fp32: Whether batch norms stay in float32; also "True" and "False".
        master_weights: Whether half weights have float32 masters.
        loss_scale: "dynamic", or a number, also as a string.
        cast_model_outputs: The format of what models return, instead of float32.
        num_losses: How many losses have a scale of their own; see `scale_loss`.
        verbosity: Is kept in `_amp_state`, and nothing is printed.
        min_loss_scale: The floor of dynamic scales; None is 2**-14.
        max_loss_scale: Their ceiling.
    """
    SESSION.verbosity = verbosity
    if not enabled:
        SESSION.begin(DISABLED, [])
        return models if optimizers is None else (models, optimizers)
    options = resolve(
        opt_level,
        SESSION.hard_override,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
    )
    scale: Any = options.loss_scale
    bounds: dict[str, Any] = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    if _whole(num_losses) < 1:
        raise SettingError(f"num_losses must be a whole number > 0, got {num_losses!r}.")
    scalers = [LossScaler(scale, **bounds) for _ in range(_whole(num_losses))]
    several_models = models if isinstance(models, list) else [models]
    several = _several("optimizers", optimizers)
    casts.check(several_models)
    for model in several_models:
        casts.apply(model, options)
    for optimizer in several:
        _take_over(optimizer, options)
    SESSION.begin(options, scalers)
    if options.patch_torch_functions:
        AmpHandle(scale).activate()
    return models if optimizers is None else (models, optimizers)


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle | NoOpHandle:
    """A handle that scales losses; from here on torch's functions cast their arguments.

        amp_handle = amp.init()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    This is the API before `amp.initialize`, for scripts that have it.

    Args:
        enabled: False gives a handle that does nothing.
        loss_scale: "dynamic", or a number.
        enable_caching: Not used: casts of weights are not kept.
        verbose: Not used: nothing is printed.
        allow_banned: Whether `binary_cross_entropy` of float16 is computed in float32, and not an
            error.
    """
    if not enabled:
        SESSION.drop_handle()
        return NoOpHandle()
    handle = AmpHandle(loss_scale, enable_caching, verbose)
    handle.activate(CastMode(handle, allow_banned))
    return handle


def _whole(value: Any) -> int:
    """`value` as an int; -1 if it is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        return -1


def _several(name: str, optimizers: Any) -> list[Optimizer]:
    """`optimizers` as a list."""
    several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    if several is None:
        return []
    if not isinstance(several, list | tuple) or not all(
        isinstance(one, Optimizer) for one in several
    ):
        raise SettingError(
            f"{name} must be an optimizer of torch.optim or a list of them, got "
            f"{type(optimizers).__name__}. Pass the optimizer itself, not a wrapper around it."
        )
    return list(several)


def _take_over(optimizer: Any, options: Options) -> None:
    """Gives `optimizer` what `amp` adds to it."""
    before = getattr(optimizer, "_amp_stash", None)
    if before is not None:
        before.detach()
    if options.half is not None and not options.master_weights:
        _warn_of_eps(optimizer, options)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # casts averages that it has already
    amp_optimizer(optimizer, bool(options.master_weights), options.idle)


def _warn_of_eps(optimizer: Optimizer, options: Options) -> None:
    """Warns of an `eps` that a half format takes for 0: Adam divides by it, and weights are NaN."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if isinstance(eps, float) and eps and not torch.tensor(eps, dtype=options.half):
            warnings.warn(
                f"eps={eps} of {type(optimizer).__name__} is 0 in {options.half}, so weights with "
                "small gradients become NaN. Pass eps=1e-4, or use opt_level='O2'.",
                stacklevel=caller_level(),
            )
            return


def _amp_optimizers(optimizers: Any) -> list[AmpOptimizer]:
    """Those of `optimizers`."""
    found = []
    for optimizer in _several("optimizers", optimizers):
        one = getattr(optimizer, "_amp_stash", None)
        if one is None:
            raise SettingError(
                "optimizers must be those that were passed to amp.initialize(), got another "
                f"{type(optimizer).__name__}. Pass all optimizers to amp.initialize(), as a list."
            )
        found.append(one)
    return found


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Gives the scaled loss; afterwards the gradients of its backward pass are unscaled.

    What other passes have left in `.grad` is added to. If a gradient is not finite, the next
    `step()` of every optimizer named here does nothing, also with a static scale. **Waits for the
    device.**

    Args:
        loss: The loss itself.
        optimizers: All optimizers that have parameters which the backward pass reaches.
        loss_id: Whose scale to take, from 0 to `num_losses` - 1.
        model: Not used.
        delay_unscale: Leaves the gradients scaled, for a later pass to add to and to unscale.
        delay_overflow_check: Does not wait for the device here; `step()` does then.
    """
    SESSION.demand("scale_loss()")
    if not SESSION.opt_properties.enabled:
        yield loss
        return
    several = _amp_optimizers(optimizers)
    scaler = _scaler(loss_id)
    if all(one.idle for one in several) and not scaler.dynamic and scaler.loss_scale() == 1:
        yield loss.float()
        return
    with scaled_pass(several, scaler, loss, delay_unscale, not delay_overflow_check) as scaled:
        yield scaled


def _scaler(loss_id: Any) -> LossScaler:
    """The scaler of a loss."""
    scalers, number = SESSION.loss_scalers, _whole(loss_id)
    if not 0 <= number < len(scalers):
        raise SettingError(
            f"loss_id must be from 0 to num_losses - 1 = {len(scalers) - 1}, got {loss_id!r}. Pass "
            "a larger num_losses to amp.initialize()."
        )
    return scalers[number]


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """What `optimizer` works on: float32 masters where there are some, else its parameters."""
    one = getattr(optimizer, "_amp_stash", None)
    if one is not None:
        yield from one.params()
    else:
        for group in optimizer.param_groups:
            yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The scale of every loss, under Apex' keys; nothing if amp is switched off."""
    SESSION.demand("state_dict()")
    states = {} if destination is None else destination
    for number, scaler in enumerate(SESSION.loss_scalers):
        states[f"loss_scaler{number}"] = scaler.saved()
    return states


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Goes on with the scales of `state_dict`, one of ours or of Apex'.

    Does nothing if amp is switched off.

    Raises:
        StateError: It is no state of amp's, or of another number of losses; nothing was loaded.
    """
    SESSION.demand("load_state_dict()")
    if not SESSION.opt_properties.enabled:
        return
    read = peers.read(state_dict)
    if read is None or "loss_scaler0" not in state_dict:
        raise StateError(
            "The state must be what amp.state_dict() returned, with loss_scaler0 and so on, got "
            f"the keys {sorted(map(str, state_dict))}. Nothing was loaded."
        )
    states = [read.state, *(state for _, state in read.losses)]
    scalers = SESSION.loss_scalers
    if len(states) != len(scalers):
        raise StateError(
            f"The state has {len(states)} loss scalers, but amp.initialize() created "
            f"{len(scalers)}. Pass the num_losses of the run that saved the state. Nothing was "
            "loaded."
        )
    for number, (scaler, state) in enumerate(zip(scalers, states, strict=True)):
        scaler.check(f"loss_scaler{number}", state["scale"])
    for scaler, state in zip(scalers, states, strict=True):
        scaler.load(state["scale"], state["good_steps"])
