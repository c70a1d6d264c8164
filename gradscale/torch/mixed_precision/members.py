"""The half weights of one step with their masters, and operations on all of them at once.

Many small tensors on the CPU are treated as one flat tensor: an operation on each of 1,000 takes as
long as the optimizer's step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.grads.collect import local_grads
from gradscale.torch.grads.dtensor import all_plain, local, locals_of
from gradscale.torch.grads.scale import move
from gradscale.torch.optim import master_bits
from gradscale.torch.optim.master_bits import LARGEST, LOW_BITS

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")
_STRIDED = {torch.strided}
_FEW_ELEMENTS = 2**20
"""Up to so many elements on the CPU, float32 gradients are kept from step to step: 4 MiB."""


class KeptMaster:
    """The master of one weight between steps."""

    __slots__ = ("dtype", "values", "version", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.dtype = weight.dtype
        self.values: dict[str, Any] = {}
        """`MASTER` or `LOW_BITS`, as an optimizer's state would have them."""
        self.version = -1
        """Of the weight, when it was last compared with its master or written from it."""


class Members:
    """The parameters of a step: half weights and their masters, and others."""

    __slots__ = (
        "_addresses",
        "aside",
        "flat",
        "kept",
        "local_weights",
        "masters",
        "new",
        "others",
        "own",
        "params",
        "standing",
        "states",
        "weights",
    )

    def __init__(
        self,
        params: list[Tensor],
        weights: list[Tensor],
        masters: list[Tensor],
        others: list[Tensor],
        kept: list[KeptMaster],
        groups: list[dict[str, Any]],
    ) -> None:
        self.params, self.weights, self.masters, self.others = params, weights, masters, others
        self.kept = kept
        self.local_weights: list[Tensor] = locals_of(weights)
        self.own = [list(group["params"]) for group in groups]
        """The parameters of every group."""
        places = {id(weight): master for weight, master in zip(weights, masters, strict=True)}
        self.standing = [[places.get(id(p), p) for p in own] for own in self.own]
        """What is in every group while masters are."""
        self.states: list[dict[str, Any]] = []
        self.aside: list[tuple[Tensor, Tensor | None]] = []
        """Gradients of other parameters, as they were before the step."""
        self.flat: Tensor | None = None
        """The gradients of all masters, if there are few elements, on the CPU."""
        self._addresses: list[int] = []
        self.new = True

    def plan(self) -> None:
        """Prepares to be used again."""
        self._addresses = list(map(Tensor.data_ptr, self.local_weights))
        weights = self.local_weights
        if not are_few(self.weights):
            return
        self.flat = torch.empty(sum(map(Tensor.numel, weights)), dtype=torch.float32, device="cpu")
        parts = torch._C._nn.unflatten_dense_tensors(self.flat, self.masters)
        for master, part in zip(self.masters, parts, strict=True):
            master.grad = part

    def holds(self, params: list[Tensor], groups: list[dict[str, Any]]) -> bool:
        """Whether a step with the gradients of `params` has the same members."""
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and len(groups) == len(self.own)
            and all(map(_same, (group["params"] for group in groups), self.own))
            and list(map(Tensor.data_ptr, self.local_weights)) == self._addresses
        )


def are_few(weights: list[Tensor]) -> bool:
    """Whether operations on all of `weights` at once, as one flat tensor, take less time."""
    return (
        len(weights) > 1
        and all_plain(weights)
        and len(set(map(_DTYPE, weights))) == 1
        and sum(map(Tensor.numel, weights)) <= _FEW_ELEMENTS
        and all(weight.is_cpu and weight.is_contiguous() for weight in weights)
    )


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both have the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def give_gradients(members: Members, factor: Tensor) -> None:
    """Gives masters the gradients of their weights times `factor`."""
    grads: list[Any] = local_grads(members.weights)
    dense = set(map(_LAYOUT, grads)) <= _STRIDED
    if members.flat is not None:
        if dense and len(set(map(_DTYPE, grads))) == 1:
            # One operation for all: 1,000 small ones would take as long as the step itself.
            members.flat.copy_(torch._C._nn.flatten_dense_tensors(grads)).mul_(factor)
            return
        members.flat = None
    wide = []
    for master, grad in zip(members.masters, grads, strict=True):
        if grad.layout is torch.strided:
            master.grad = torch.empty_like(master)
            wide.append((master.grad, grad))
        else:
            master.grad = grad.float() * move(factor, grad.device)
    devices = {grad.device for _, grad in wide}
    for device in devices:
        made = [new for new, _ in wide if new.device == device]
        torch._foreach_copy_(made, [grad for new, grad in wide if new.device == device])
        torch._foreach_mul_(made, move(factor, device))


def multiply_grads(params: list[Tensor], factor: Tensor) -> None:
    """Replaces the gradients of float32 parameters by new ones, times `factor`."""
    for param in params:
        grad: Any = param.grad
        param.grad = grad * move(factor, grad.device)


def write_float32(weights: list[Tensor], masters: list[Tensor], flat: Tensor | None) -> None:
    """Rounds masters to their weights; with `flat` there are few elements, on the CPU."""
    if flat is None:
        master_bits.write_weights(weights, masters)
        return
    values = torch._C._nn.flatten_dense_tensors(masters)
    dtype = weights[0].dtype
    if dtype is torch.float16:
        values.clamp_(-LARGEST, LARGEST)
    parts = torch._C._nn.unflatten_dense_tensors(values.to(dtype), weights)
    torch._foreach_copy_(weights, list(parts))


def write_split(members: Members) -> None:
    """Writes weights and the 16 more bits of their masters."""
    lows: list[Any] = [kept.values.get(LOW_BITS) for kept in members.kept]
    if not are_few(members.weights) or any(low is None for low in lows):
        for kept, master in zip(members.kept, members.masters, strict=True):
            master_bits.write(kept.weight, kept.values, master, "split")
        return
    weights, apart = members.local_weights, torch._C._nn.unflatten_dense_tensors
    flat = torch._C._nn.flatten_dense_tensors(members.masters)
    high, low = master_bits.split(flat, weights[0].dtype)
    torch._foreach_copy_(weights, list(apart(high, weights)))
    torch._foreach_copy_(lows, list(apart(low, weights)))


@torch.no_grad()
def make_whole(kept: KeptMaster) -> None:
    """Writes a master to its weight, which somebody has made float32 by `model.float()`."""
    weight = local(kept.weight)
    half = weight.to(kept.dtype)
    master = master_bits.master_of(half, kept.values).to(weight.device)
    same = (half.to(weight.dtype) == weight) & (master_bits.rounded(master, kept.dtype) == half)
    weight.copy_(torch.where(same, master.to(weight.dtype), weight))
