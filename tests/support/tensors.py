"""Small tensors, and whether two of anything are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def parameter(*values: float, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf of `values` that wants a gradient; of one 0 without them."""
    return torch.tensor(values or (0.0,), device=device, dtype=dtype, requires_grad=True)


def same(one: Any, other: Any) -> bool:
    """Whether two nests of tensors and numbers are equal to the bit, and not empty."""
    if isinstance(one, dict | list | tuple) and not one:
        return False  # a comparison of nothing shows nothing
    return _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


class Fails(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError("planted")
