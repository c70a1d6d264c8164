"""The border of a block: the identity in the forward pass, a factor in the backward pass.

The largest gradient that passes is returned as the gradient of an extra input, the meter. So a
backward pass changes nothing but gradients, and compiles as any other.

The factors are attributes of the context and not saved tensors, because activation checkpointing
would replace those by what it finds when it recomputes a block. And forward() takes the context:
with setup_context() torch inspects the signature in every call, which takes 50 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError

OUTSIDE = -1
"""The place of what belongs to no block."""


class Border(torch.autograd.Function):
    """A tensor that leaves a block, enters one, or both; its gradient goes the other way.

    The gradient is divided by the scale of the block that it leaves (`shut`) and multiplied by
    that of the block that it enters (`opened`), by one factor: it is never unscaled in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        opened: Tensor | None,
        shut: Tensor | None,
        entering: Tensor | None,
        leaving: Tensor | None,
        route: tuple[int, int, int],
    ) -> Tensor:
        """`x` itself: where it enters a block a view, which torch refuses to write to in place.

        Autograd would not see such a write. Where it leaves a block it is no view: hooks.py notices
        a write by the `grad_fn`. In a compiled function it is always a view.

        Args:
            ctx: Of autograd.
            x: The tensor.
            opened: The scale of the block that the gradient enters.
            shut: The reciprocal of the scale of the block that the gradient leaves.
            entering: The meter of the block that the gradient enters.
            leaving: The meter of the block that the gradient leaves.
            route: A mark, and the places that the gradient comes from and goes to.
        """
        ctx.opened, ctx.shut = opened, shut
        ctx.measured = entering is not None, leaving is not None
        _prepare(ctx, route, opened if shut is None else shut)
        if route[1] == OUTSIDE and not torch.compiler.is_compiling():
            return x.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient at the scale of the place that it goes to; amax there, amax before."""
        if grad is None:
            return (None,) * 6
        _check(ctx, ctx.opened if ctx.shut is None else ctx.shut)
        factor = ctx.opened
        if ctx.shut is not None:
            factor = ctx.shut if factor is None else factor * ctx.shut
        amax = _amax([grad]) if any(ctx.measured) else None
        entering = amax * factor if amax is not None and ctx.measured[0] else None
        leaving = amax if ctx.measured[1] else None
        # A factor may be beyond what float16 can hold.
        moved = (_wide(grad) * factor).to(grad.dtype)
        return moved, None, None, entering, leaving, None


class Weights(torch.autograd.Function):
    """The weights of a block, as it uses them; their gradients are divided by its scale."""

    @staticmethod
    def forward(
        ctx: Any, shut: Tensor, meter: Tensor | None, route: tuple[int, int, int], *params: Tensor
    ) -> tuple[Tensor, ...]:
        """The `params` themselves."""
        ctx.shut, ctx.measured = shut, meter is not None
        _prepare(ctx, route, shut)
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients without the scale of the block, those of half weights in float32; amax."""
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, None, None, *grads
        _check(ctx, ctx.shut)
        amax = _amax(there) if ctx.measured else None
        if any(_is_sparse(grad) for grad in there):
            done = iter([_wide(grad) * ctx.shut for grad in there])
        else:
            done = iter(torch._foreach_mul([_wide(grad) for grad in there], ctx.shut))
        return None, amax, None, *(None if grad is None else next(done) for grad in grads)


cross: Callable[..., Tensor] = Border.apply
lend: Callable[..., tuple[Tensor, ...]] = Weights.apply


def _amax(grads: list[Tensor]) -> Tensor:
    """The largest magnitude (float32) in all of `grads`; NaN if there is one."""
    values = [grad._values() if _is_sparse(grad) else grad for grad in grads]
    values = [value for value in values if value.numel()]
    if not values:
        return torch.zeros((), device=grads[0].device)
    if len(values) == 1:
        return torch.linalg.vector_norm(values[0], float("inf")).float()
    largest = torch._foreach_norm(values, float("inf"))
    if any(value.dtype is not values[0].dtype for value in values):
        largest = tuple(each.float() for each in largest)
    return torch.stack(largest).amax().float()


def _is_sparse(grad: Tensor) -> bool:
    """Whether `grad` is sparse: none is in a graph, where torch 2.6 refuses the question."""
    return not torch.compiler.is_compiling() and grad.is_sparse


def _wide(grad: Tensor) -> Tensor:
    """`grad` in a format in which a small one does not vanish."""
    return grad.float() if grad.dtype is torch.float16 else grad


def _prepare(ctx: Any, route: tuple[int, int, int], factor: Tensor | None) -> None:
    """Stores the route, and the version of `factor`, in the context."""
    ctx.route = route
    ctx.set_materialize_grads(False)
    compiling = torch.compiler.is_compiling()
    ctx.version = None if factor is None or compiling else factor._version


def _check(ctx: Any, factor: Tensor) -> None:
    """Raises if `factor` was written since, or if this gradient will be differentiated."""
    if torch.compiler.is_compiling():
        return
    if ctx.version != factor._version:
        raise CallOrderError(
            "The scales of the blocks have moved between a forward pass and its backward pass. "
            "Call blocks.update() after the backward pass, before the next forward pass."
        )
    if torch.is_grad_enabled():
        raise SettingError(
            "create_graph=True does not go with BlockScales: gradients of gradients would have "
            "wrong scales. Call blocks.remove(), or give blocks= without what is differentiated "
            "twice."
        )
