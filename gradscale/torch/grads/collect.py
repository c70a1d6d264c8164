"""The gradients of a step, looked at once: which there are, and by device and format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.grads import dispatch
from gradscale.torch.grads.dispatch import Values as Values
from gradscale.torch.grads.dtensor import PLAIN, all_plain, local_grad

_LAYOUT, _DTYPE, _IS_CPU = attrgetter("layout"), attrgetter("dtype"), attrgetter("is_cpu")
_PARAMS, _GRAD = itemgetter("params"), attrgetter("grad")
_STRIDED = {torch.strided}


class Gradients:
    """The gradients of some parameters, as this rank has them.

    `values` and `table` are made when first asked for: a step by kernels needs the table alone.
    """

    __slots__ = ("_table", "_values", "params")

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        """The parameters that have gradients, each once."""
        self._values: Values | None = None
        self._table: Any = False

    @property
    def values(self) -> Values:
        """The numbers of the gradients, as real dense tensors that share their memory."""
        if self._values is None:
            self._values = values_of(self.params)
        return self._values

    @property
    def table(self) -> dispatch.TensorTable | None:
        """Where the gradients are in memory, for kernels; None if they cannot take them."""
        if self._table is False:
            self._table = None
            if self.params and dispatch.uses_triton(self.params[0].device):
                self._table = dispatch.locate(self.params, local_grads(self.params))
        return self._table

    def on_host(self) -> bool:
        """Whether all gradients are in the memory of the host."""
        return all(device.type == "cpu" for device, _ in self.values)


def with_grad(param_groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    """The parameters of some optimizer's groups that have a gradient."""
    # By functions in C: with a model of 40 tensors, loops in Python take as long as the launch of
    # the kernel that reads the gradients.
    params = list(chain.from_iterable(map(_PARAMS, param_groups)))
    if any(map(is_, map(_GRAD, params), repeat(None))):
        return [param for param in params if param.grad is not None]
    return params


def with_grad_of(optimizers: Sequence[Any]) -> list[Tensor]:
    """The parameters of several optimizers that have a gradient, each once."""
    if len(optimizers) == 1:
        return with_grad(optimizers[0].param_groups)
    found = [p for optimizer in optimizers for p in with_grad(optimizer.param_groups)]
    return list({id(p): p for p in found}.values())


def local_grads(params: list[Tensor]) -> list[Any]:
    """The part of the gradient of each of `params` that is on this rank."""
    if all_plain(params):
        return list(map(_GRAD, params))
    return [local_grad(param) for param in params]


def values_of(params: list[Tensor]) -> Values:
    """The numbers of the gradients of `params`, as real dense tensors that share their memory.

    A sparse gradient is coalesced first, because duplicates add up and the sum may overflow; that
    replaces `.grad`.
    """
    return grouped(dense_grads(params))


def dense_grads(params: list[Tensor]) -> list[Tensor]:
    """The numbers of the gradient of each of `params` that has one, as dense tensors."""
    grads: list[Any] = list(map(_GRAD, params))
    plain = set(map(type, grads)) <= PLAIN and set(map(_LAYOUT, grads)) == _STRIDED
    return grads if plain else _dense(params)


def _dense(params: Iterable[Tensor]) -> list[Tensor]:
    """The numbers of the gradients of `params`, of which some are sparse or DTensors, or None."""
    dense = []
    for param in params:
        grad = local_grad(param)
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:
            param.grad = grad.coalesce()
            grad = param.grad._values()
        elif grad.layout is not torch.strided:
            grad = grad.values()
        dense.append(grad)
    return dense


@torch.no_grad()
def grouped(tensors: list[Tensor]) -> Values:
    """Dense `tensors` by device and dtype; complex ones as real tensors that share their memory."""
    if not tensors:
        return {}
    first = tensors[0]
    if all(map(_IS_CPU, tensors)) and set(map(_DTYPE, tensors)) == {first.dtype}:
        if not first.is_complex():
            return {(first.device, first.dtype): tensors}
    values: Values = {}
    for tensor in tensors:
        value = tensor
        if tensor.is_complex():
            # The factors are real, so the conjugate in the same memory will do.
            value = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
        values.setdefault((value.device, value.dtype), []).append(value)
    return values
