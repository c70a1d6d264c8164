"""Bringing models and optimizers into the formats of a mode, and masters to the optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import SettingError
from gradscale.torch.mixed_precision.casting import (
    NORMS,
    Keep,
    cast_all,
    find,
    lift,
    refuse_cast,
    refuse_wrapped,
    run_in_float32,
    widen_states,
)
from gradscale.torch.mixed_precision.masters import Masters
from gradscale.torch.mixed_precision.modes import Mode
from gradscale.torch.mixed_precision.pretrained import modules_in_float32
from gradscale.torch.optim.master_bits import HALF_DTYPES, set_master
from gradscale.torch.telemetry.names import bare


def trained(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, Any]]:
    """The parameters that are trained, with their optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from ((optimizer, param) for param in group["params"] if param.requires_grad)


def has_gradients(optimizers: Sequence[Optimizer]) -> bool:
    """Whether any parameter that is trained has a gradient."""
    # Plain loops, not generators: `run()` asks while the device waits for the next forward pass.
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.requires_grad:
                    return True
    return False


def refuse_strangers(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raises a SettingError if an optimizer has no parameter of the models."""
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if any(id(param) in known for param in params):
            continue
        raise SettingError(
            f"None of the {len(params)} parameters of this {type(optimizer).__name__}, the first "
            f"of shape {tuple(params[0].shape)}, is one of the {len(known)} parameters of the "
            "model. Was the optimizer built for another model, or before the model was rebuilt? "
            "Build it from model.parameters()."
        )


def convert(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    mode: Mode,
    keep: Sequence[Keep],
) -> list[Masters | None]:
    """Casts the models; what keeps the masters of every optimizer, None if it does so itself."""
    refuse_strangers(models, optimizers)
    if mode.casts:
        refuse_shared(optimizers, mode)
    exact = exact_values(param for _, param in trained(optimizers))
    convert_models(models, mode, keep)
    widen_states(optimizers)
    return give_masters(optimizers, mode, exact)


def exact_values(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The float32 ones of `params`, each with the value that it has before it is cast."""
    return [(param, param.data) for param in params if param.dtype is torch.float32]


@torch.no_grad()
def give_masters(
    optimizers: Sequence[Optimizer], mode: Mode, exact: Iterable[tuple[Tensor, Tensor]]
) -> list[Masters | None]:
    """What keeps the masters of every optimizer, None if it does so itself.

    Args:
        optimizers: Those of models that were cast.
        mode: In which format things are.
        exact: What `exact_values()` returned before the cast, where masters begin.
    """
    masters = [masters_of(optimizer, mode) for optimizer in optimizers]
    values = {id(param): value for param, value in exact}
    owners = {id(optimizer): own for optimizer, own in zip(optimizers, masters, strict=True)}
    for optimizer, param in trained(optimizers) if mode.master is not None else ():
        value, own = values.get(id(param)), owners[id(optimizer)]
        if value is None or param.dtype not in HALF_DTYPES:
            continue
        value = value.to(param.device)  # the model may have been moved since
        if own is None:
            set_master(param, optimizer.state[param], value, mode.master)  # type: ignore[arg-type]
        else:
            own.store.set_master(param, value)
    for optimizer in optimizers:
        # All states or none: torch's get_state_dict() takes a master for all that there will be.
        if optimizer.state and owners[id(optimizer)] is None:
            params = [param for _, param in trained([optimizer])]
            optimizer.make_states(params)  # type: ignore[attr-defined]
    return masters


def refuse_shared(optimizers: Sequence[Optimizer], mode: Mode) -> None:
    """Raises a SettingError if a parameter is in two optimizers, which goes with no masters."""
    owners = Counter(id(param) for _, param in trained(optimizers))
    if any(count > 1 for count in owners.values()):
        raise SettingError(
            "A parameter is in two optimizers, which is not supported with masters. Use the mode "
            f'"{mode.name.partition("-")[0]}", or pass it to one of them only.'
        )


def convert_models(models: Sequence[nn.Module], mode: Mode, keep: Sequence[Keep]) -> None:
    """Brings the models into the formats of the mode."""
    for model in models:
        refuse_cast(model)
        if mode.casts:
            refuse_wrapped(model)
    for each in keep:
        if not any(find(bare(model), each) for model in models):
            what = repr(each) if isinstance(each, str) else f"this {type(each).__name__}"
            raise SettingError(f"keep_float32 contains {what}, which is not a module of the model.")
    kept = [(model, [each for each in keep if find(bare(model), each)]) for model in models]
    wide = mode.passes == "float32"
    if mode.casts:
        cast_all([(model, [*NORMS, *mine]) for model, mine in kept], mode.dtype)
    for model, mine in () if mode.casts else kept:
        lift(model, frozen=wide, keep_float32=mine)
        if not wide:
            run_in_float32(model, (*NORMS, *mine, *modules_in_float32(bare(model), mode.dtype)))


def masters_of(optimizer: Any, mode: Mode) -> Masters | None:
    """What keeps the masters of `optimizer`; None if it does so itself."""
    keep_masters = getattr(optimizer, "keep_masters", None)
    if keep_masters is not None:
        if mode.master is not None:
            keep_masters(mode.master)
        return None
    # Without masters, too, a half weight may come: one that is unfrozen, or added to a group.
    masters = Masters(optimizer, mode.master or "float32")
    if mode.master is not None:
        optimizer.register_step_pre_hook(masters.begin_step)
        optimizer.register_step_post_hook(masters.end_step)
    for name in ("train", "eval"):  # in which schedule-free optimizers move the weights
        if callable(method := getattr(optimizer, name, None)):
            setattr(optimizer, name, masters.moved_by(method))
    return masters
