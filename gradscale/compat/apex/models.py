"""What `amp.initialize` does to models.

O1 has the forward pass run under torch's autocast; O2 casts the weights as
`gradscale.torch.mixed_precision` does, under autocast as well; without float32 batch norms (O3) all
is half, and autocast is off. Outputs leave as float32, because what follows outside of the model,
such as the loss, is torch as it is.

A forward pass is wrapped by an object in the place of `model.forward`: `torch.compile` sees through
it, DDP and direct calls of `forward` meet it, and copies and pickles of the model keep it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradscale.compat.apex.functions import cast_all
from gradscale.compat.apex.options import HALVES, Options, warn_or_refuse
from gradscale.compat.apex.session import SESSION
from gradscale.errors import SettingError
from gradscale.torch.mixed_precision.casting import (
    CastForward,
    cast,
    cast_tensors,
    device_of,
    put_around,
)

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def _cast(value: Any, dtype: torch.dtype, deep: bool) -> Any:
    """`value` with all in it cast, as Apex does, wherever it is."""
    return cast_all(cast_tensors(value, dtype, deep=True), dtype)


def _autocast_unless_disabled(forward: CastForward) -> AbstractContextManager[Any]:
    """Autocast to the format of `forward`; as it is if that has none, or in `disable_casts()`."""
    if forward.autocast is None or SESSION.disabled:
        return nullcontext()
    return torch.autocast(device_of(forward.module).type, forward.autocast)


_forward = partial(CastForward, cast=_cast, context=_autocast_unless_disabled)
"""The `forward` of a module as `amp` has it run."""


def check(models: list[Any]) -> None:
    """A SettingError if `amp` cannot take one of `models`; nothing was changed."""
    halves = () if SESSION.allow_incoming_model_not_fp32 else HALVES
    for model in models:
        if not isinstance(model, nn.Module):
            raise SettingError(
                f"models must be a module or a list of modules, got {type(model).__name__}."
            )
        if isinstance(model, _PARALLEL):
            raise SettingError(
                f"models must not be wrapped in {type(model).__name__} before amp.initialize(). "
                "Wrap the models that amp.initialize() returns."
            )
        for name, param in model.named_parameters():
            if param.dtype in halves:
                warn_or_refuse(
                    f"models must have float32 weights, got {name!r} in {param.dtype}. Remove "
                    "half(), and call amp.initialize() only once: it casts the weights as "
                    "opt_level requires.",
                    SESSION.hard_override,
                )


def apply(model: nn.Module, options: Options) -> None:
    """Has `model` run as `options` say."""
    release(model)
    half, outputs = options.half, options.cast_model_outputs
    if half is not None:
        if options.keep_batchnorm_fp32:
            cast(model, half, keep_float32=(_BatchNorm,))
        else:
            put_around(model, CastForward(model.to(half), half, None, torch.float32))
        # Around it: batches of a class of the user's own, and outputs in another format.
        put_around(model, _forward(model, half, None, outputs))
        model._register_state_dict_hook(_give_float32)  # its public name is of torch 2.5
    elif options.patch_torch_functions:
        put_around(model, _forward(model, None, torch.float16, outputs or torch.float32))
    elif options.cast_model_type is torch.float32:
        model.float()
        put_around(model, _forward(model, torch.float32, None, outputs))
    elif outputs is not None:
        put_around(model, _forward(model, None, None, outputs))


def release(model: nn.Module) -> None:
    """Has `model` run as before `apply`; weights that were cast stay so."""
    forward = vars(model).get("forward")
    if isinstance(forward, CastForward) and forward.cast is _cast:
        if forward.inner is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = forward.inner


def _give_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """Makes what a model saves float32, so that a checkpoint fits a model of any opt level."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor) and value.dtype in HALVES:
            state[name] = value.float()
