"""Products of matrices whose float16 is real and quick on the CPU too.

torch's own float16 product on the CPU adds up in float32 and rounds once, as a GPU does, but takes
ten times as long as in float32. Here the same product is made of float32: float16 numbers in,
float16 numbers out, forward and backward. `tests/test_arena.py` compares the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias` of float16 tensors, added up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        product = functional.linear(
            x.float(), weight.float(), None if bias is None else bias.float()
        )
        return product.half()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        rows, inputs = grad.flatten(0, -2), x.float().flatten(0, -2)
        to_bias = rows.sum(0).half() if ctx.has_bias else None
        return (grad @ weight.float()).half(), (rows.T @ inputs).half(), to_bias


class _Batched(torch.autograd.Function):
    """`left @ right` of batches of float16 matrices, added up in float32."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return (left.float() @ right.float()).half()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (tensor.float().mT for tensor in ctx.saved_tensors)
        grad = grads[0].float()
        return (grad @ right).half(), (left @ grad).half()


def _is_slow(x: Tensor) -> bool:
    """Whether autocast asks for float16 on the CPU."""
    if not (x.device.type == "cpu" and torch.is_autocast_enabled("cpu")):
        return False
    return torch.get_autocast_dtype("cpu") is torch.float16


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of batches of matrices that have the same size."""
    if not _is_slow(left):
        return left @ right
    with torch.autocast("cpu", enabled=False):
        return _Batched.apply(left.half(), right.half())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, which is `x @ weight.T + bias`."""
    if not _is_slow(x):
        return functional.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        small_bias = None if bias is None else bias.half()
        return _Product.apply(x.half(), weight.half(), small_bias)


class Linear(nn.Linear):
    """`nn.Linear` by way of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
