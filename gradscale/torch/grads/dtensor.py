"""What this rank has of tensors that are shared out over ranks: DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN = {Tensor, torch.nn.Parameter}


def local(tensor: Any) -> Any:
    """What this rank has of `tensor`, in the same memory; itself if it is no DTensor."""
    part = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    return part.wait() if hasattr(part, "wait") else part


def all_plain(tensors: Sequence[Any]) -> bool:
    """Whether `tensors` are of no kind of their own, such as DTensors."""
    return set(map(type, tensors)) <= PLAIN


def locals_of(tensors: list[Any]) -> list[Any]:
    """What this rank has of each of `tensors`."""
    return tensors if all_plain(tensors) else [local(tensor) for tensor in tensors]


def local_grad(param: Tensor) -> Any:
    """What this rank has of the gradient of `param`; None if there is none.

    One that is shared out other than its parameter, such as summands that nobody has added up yet,
    is replaced first by one that is not.
    """
    grad: Any = param.grad
    if hasattr(grad, "device_mesh"):
        wanted: Any = getattr(param, "placements", grad.placements)
        if grad.placements != wanted:
            grad = param.grad = grad.redistribute(placements=wanted)
    return local(grad)


def like_shards(value: Tensor, param: Any) -> Tensor:
    """`value`, what this rank has of a state of `param`, shared out as that is."""
    if not hasattr(param, "device_mesh"):
        return value
    whole: Tensor = type(param).from_local(
        value,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return whole


def lay_out(param: Tensor) -> None:
    """Replaces a dense gradient that lies other than `param` by a copy that does not."""
    here, there = local(param), local_grad(param)
    if there.layout is not torch.strided or there.dtype is not here.dtype:
        return
    if there.is_contiguous() and here.is_contiguous():
        return
    if there.stride() != here.stride():
        param.grad = like_shards(torch.empty_like(here).copy_(there), param)
