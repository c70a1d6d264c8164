"""Models in float16 and bfloat16: which weights are cast, and what runs in which format.

A model that was cast runs under autocast wherever it is called, so formats meet nowhere by
accident: floating-point inputs are cast where they come in and outputs where they leave, norms keep
their weights in float32, and a module that was asked to stay in float32 runs in it. Buffers keep
their format: they are no weights, and a table of frequencies or a mean does not bear rounding.

Parameters are cast in place: they stay the same objects, so optimizers still have them and tied
weights stay tied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.mixed_precision.containers import mapped
from gradscale.torch.mixed_precision.pretrained import (
    inner_models,
    modules_in_float32,
    params_in_float32,
)
from gradscale.torch.optim.master_bits import HALF_DTYPES
from gradscale.torch.telemetry.names import WRAPPERS, bare

Keep = str | nn.Module | type[nn.Module]
"""A module that stays in float32: by a pattern of its name, itself, or by its class."""

_MIXED: tuple[type[nn.Module], ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm)
"""Autocast computes them in float32, or torch's kernels do; so only their weights are kept. Batch
norms and instance norms are the first."""
NORMS = (*_MIXED, nn.RMSNorm)
"""The norms, which stay in float32 unless somebody says otherwise."""


class CastForward:
    """The `forward` of a module with casts around it: `module.forward = CastForward(module, ...)`.

    An object and not a hook: `torch.compile` traces through it, and a copy of a module has a copy.

    Args:
        module: Whose forward it is.
        inputs: What floating-point inputs are cast to; None: they stay as they are.
        autocast: What autocast casts to inside; None: see `context`.
        outputs: What floating-point outputs are cast to; None: they stay as they are.
        cast: Returns a value with what is in it cast: an argument, or, as the third argument says,
            what the module returned.
        context: Returns the autocast that the module runs in, for the module's `CastForward`.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: torch.dtype | None,
        autocast: torch.dtype | None,
        outputs: torch.dtype | None = None,
        *,
        cast: Callable[[Any, torch.dtype, bool], Any] | None = None,
        context: Callable[[CastForward], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.module = module
        self.inner = vars(module).get("forward")
        self.inputs, self.autocast, self.outputs = inputs, autocast, outputs
        self.cast = cast_tensors if cast is None else cast
        self.context = autocast_or_off if context is None else context
        self.device = device_of(module).type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if self.inputs is not None:
            args = tuple([self.cast(value, self.inputs, False) for value in args])
            kwargs = {name: self.cast(value, self.inputs, False) for name, value in kwargs.items()}
        with self.context(self):
            if self.inner is None:
                # Not a bound method: a pickle would look it up, and find this object.
                output = type(self.module).forward(self.module, *args, **kwargs)
            else:
                output = self.inner(*args, **kwargs)
        return output if self.outputs is None else self.cast(output, self.outputs, True)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward inside: some read it to find out what a model takes."""
        if self.inner is not None:
            return inspect.signature(self.inner)
        whole = inspect.signature(type(self.module).forward)
        return whole.replace(parameters=list(whole.parameters.values())[1:])


def cast_tensors(value: Any, dtype: torch.dtype, deep: bool) -> Any:
    """`value` with its tensors cast; `deep` also those in lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return _floating(value, dtype)
    return mapped(value, partial(_floating, dtype=dtype), deep)


def autocast_or_off(forward: CastForward) -> AbstractContextManager[Any]:
    """Autocast to the format of `forward`; switched off if it has none."""
    return torch.autocast(forward.device, forward.autocast, enabled=forward.autocast is not None)


def _floating(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype` if it is in a format that autocast would cast."""
    if value.dtype not in (torch.float32, *HALF_DTYPES):
        return value
    lowest, own = torch.finfo(dtype).min, torch.finfo(value.dtype).min
    new = value.to(dtype)
    if own >= lowest or value.layout is not torch.strided or value.is_nested:
        return new
    # Masks hide with the lowest number there is. As -inf, a row that hides all would be NaN.
    return new.masked_fill(value == own, lowest)


def cast(model: nn.Module, dtype: torch.dtype, keep_float32: Iterable[Keep] = NORMS) -> None:
    """Casts the weights of `model` to `dtype` in place, and has it run in that format.

        cast(model, torch.float16, keep_float32=(*NORMS, "head", "*.router"))

    Inputs come in as `dtype` and outputs leave as float32.

    Args:
        model: The model itself, before it is wrapped in DDP or sharded.
        dtype: float16 or bfloat16.
        keep_float32: Modules that stay in float32: names with wildcards, modules, classes. Batch,
            layer and group norms run as autocast has them; all others in float32 altogether.

    Raises:
        SettingError: It cannot be cast; nothing was changed.
    """
    cast_all([(model, list(keep_float32))], dtype)


def cast_all(models: Iterable[tuple[nn.Module, list[Keep]]], dtype: torch.dtype) -> None:
    """Casts models, which may share weights, each with what it keeps in float32; all or none."""
    if dtype not in HALF_DTYPES:
        raise SettingError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}.")
    whole = [(bare(model), keep) for model, keep in models]
    whole = [(model, [*keep, *modules_in_float32(model, dtype)]) for model, keep in whole]
    kept = [module for model, keep in whole for one in keep for module in find(model, one)]
    fixed = {id(param) for module in kept for param in module.parameters()}
    fixed |= {id(param) for model, _ in whole for param in params_in_float32(model, dtype)}
    plans = []
    for model, _ in whole:
        refuse_cast(model)
        plans.append(
            {
                name: torch.float32 if id(param) in fixed else dtype
                for name, param in model.named_parameters()
                if param.dtype in (torch.float32, *HALF_DTYPES)
            }
        )
        _refuse(model, plans[-1])
    for (model, keep), plan in zip(whole, plans, strict=True):
        _cast_in_place(model, plan)
        wide = {each for module in run_in_float32(model, keep) for each in module.modules()}
        for module in inner_models(model):
            if module not in wide:
                put_around(module, CastForward(module, None, dtype))
        put_around(model, CastForward(model, dtype, dtype, torch.float32))


def run_in_float32(model: nn.Module, keep_float32: Iterable[Keep]) -> list[nn.Module]:
    """The modules of `keep_float32` that now run in float32, where autocast had them run otherwise.

    Not those with half weights: of a frozen base, which stays as it is.
    """
    wide = [
        module
        for module in _outermost(bare(model), keep_float32)
        if all(param.dtype not in HALF_DTYPES for param in module.parameters())
    ]
    for module in wide:
        put_around(module, CastForward(module, torch.float32, None))
    return wide


def lift(model: nn.Module, frozen: bool = False, keep_float32: Iterable[Keep] = ()) -> None:
    """Makes the weights of `model` that are trained, and those to be kept, float32, in place.

    `frozen` weights are lifted too if asked: else a base that is not trained stays as it is.
    """
    kept = (module for each in keep_float32 for module in find(bare(model), each))
    wanted = {id(param) for module in kept for param in module.parameters()}
    halves = {
        name: param
        for name, param in bare(model).named_parameters()
        if param.dtype in HALF_DTYPES and (frozen or param.requires_grad or id(param) in wanted)
    }
    if halves:
        refuse_wrapped(model)
    plan = dict.fromkeys(halves, torch.float32)
    _refuse(bare(model), plan)
    _cast_in_place(bare(model), plan)


def widen_states(optimizers: Iterable[Optimizer]) -> None:
    """Makes the states of float32 parameters float32, where they were made for half ones."""
    for optimizer in optimizers:
        for key, state in optimizer.state.items():
            if getattr(key, "dtype", None) is torch.float32:
                narrow = {
                    k: v for k, v in state.items() if getattr(v, "dtype", None) in HALF_DTYPES
                }
                state.update({name: value.float() for name, value in narrow.items()})


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter or buffer of `model` is; the CPU if it has none."""
    everything: Iterator[Tensor] = chain(model.parameters(), model.buffers())
    for value in everything:  # not next() with a default, which torch 2.6 cannot trace
        return value.device
    return torch.device("cpu")


def refuse_cast(model: nn.Module) -> None:
    """Raises if `model` computes in 16 bits by itself, because it was cast before."""
    forward = vars(bare(model)).get("forward")
    if isinstance(forward, CastForward) and forward.autocast in HALF_DTYPES:
        raise SettingError(
            "The model has been cast already. Build a new model to train it in another mode."
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raises if `model` is wrapped in something that depends on the formats of its weights."""
    while model is not bare(model):
        if isinstance(model, WRAPPERS):
            raise SettingError(
                f"{type(model).__name__} depends on the formats of the weights, so the weights "
                "cannot be cast any more. Pass the model itself to MixedPrecision, and wrap it "
                "afterwards."
            )
        model = model._orig_mod  # type: ignore[assignment]


@torch.no_grad()
def _refuse(model: nn.Module, formats: dict[str, torch.dtype]) -> None:
    """Raises if the parameters of these names cannot be cast."""
    for name, param in model.named_parameters():
        if formats.get(name, param.dtype) is param.dtype:
            continue
        if hasattr(param, "device_mesh"):
            raise SettingError(
                f"{name!r} is sharded, so it cannot be cast. Pass "
                "MixedPrecisionPolicy(param_dtype=...) to fully_shard() instead and use the mode "
                '"fp16" or "bf16".'
            )
        if param.grad is not None:
            raise CallOrderError(
                f"{name!r} has a gradient and would be cast. Call zero_grad() first."
            )
        if formats[name] is torch.float16 and bool(_overflows(param)):
            raise SettingError(
                f"{name!r} has weights beyond 65504, which are infinite in float16. Keep its "
                f"module in float32: keep_float32=[{name.rpartition('.')[0]!r}]."
            )


@torch.no_grad()
def _cast_in_place(model: nn.Module, formats: dict[str, torch.dtype]) -> None:
    """Casts the parameters of these names."""
    for name, param in model.named_parameters():
        if formats.get(name, param.dtype) is not param.dtype:
            param.data = param.data.to(formats[name])
    # What a norm has counted goes with its weights, or its kernel refuses both.
    for module in model.modules():
        if isinstance(module, _NormBase) and getattr(module.weight, "dtype", None) is torch.float32:
            for buffer in module.buffers(recurse=False):
                if buffer.dtype in HALF_DTYPES:
                    buffer.data = buffer.data.float()


def _overflows(param: Tensor) -> Tensor:
    """bool: a number of `param` is finite, and would not be in float16."""
    largest = torch.where(param.isfinite(), param, 0).abs().amax() if param.numel() else param.sum()
    return largest.to(torch.float16).isinf()


def _outermost(model: nn.Module, keep: Iterable[Keep]) -> Iterator[nn.Module]:
    """The modules of `keep` that are in no other one, and that autocast must leave out."""
    named = [found for each in keep for found in find(model, each)]
    chosen = {module for module in named if not isinstance(module, _MIXED)}
    inner = {each for module in chosen for each in module.modules() if each is not module}
    yield from (module for module in model.modules() if module in chosen and module not in inner)


def find(model: nn.Module, keep: Keep) -> list[nn.Module]:
    """The modules of `model` that `keep` means."""
    if isinstance(keep, str):
        return [module for name, module in model.named_modules() if fnmatchcase(name, keep)]
    if isinstance(keep, nn.Module):
        return [module for module in model.modules() if module is keep]
    if isinstance(keep, type) and issubclass(keep, nn.Module):
        return [module for module in model.modules() if isinstance(module, keep)]
    raise SettingError(
        "keep_float32 takes names with wildcards, modules and classes of modules, got "
        f"{type(keep).__name__}."
    )


def put_around(module: nn.Module, forward: CastForward) -> None:
    """Makes `forward` the forward of `module`."""
    vars(module)["forward"] = forward
