"""What lies on the border of a block: nothing in the forward pass, a factor in the backward pass.

The largest gradient that passes is handed on as the gradient of a number that nobody uses, the
meter. So a backward pass changes nothing but gradients, and compiles as any other.

The factors are kept as they are, not with save_for_backward: a checkpoint that computes a block
once more would put what it finds then in their place. And forward() takes the context, because
with setup_context() torch looks at the signature in every call, which takes 50 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError

OUTSIDE = -1
"""The place of what belongs to no block."""


class Border(torch.autograd.Function):
    """A tensor that leaves a block, enters one, or both; its gradient goes the other way.

    The gradient is divided by the scale of the block that it leaves (`shut`) and multiplied by
    that of the block that it enters (`opened`), at once: between two blocks it is never unscaled.
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
        """`x` itself. Where it enters a block it is a view, which torch lets nobody write to.

        Whoever did would change what others see of `x`, unknown to autograd. Where it leaves one it
        is not, because the owner of `seen` (hooks.py) can tell; but not while it is compiled.

        The `route` is a mark, the place where its gradient comes from, and that it goes to.
        `entering` and `leaving` are the meters of the blocks that it enters and leaves.
        """
        ctx.opened, ctx.shut, ctx.route = opened, shut, route
        ctx.heard = entering is not None, leaving is not None
        ctx.set_materialize_grads(False)
        _stamp(ctx, opened if shut is None else shut)
        if route[1] == OUTSIDE and not torch.compiler.is_compiling():
            return x.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient at the scale of the place that it goes to; amax there, amax before."""
        if grad is None:
            return None, None, None, None, None, None
        _check(ctx, ctx.opened if ctx.shut is None else ctx.shut)
        factor = ctx.opened
        if ctx.shut is not None:
            factor = ctx.shut if factor is None else factor * ctx.shut
        amax = _amax([grad]) if any(ctx.heard) else None
        entering = amax * factor if amax is not None and ctx.heard[0] else None
        leaving = amax if ctx.heard[1] else None
        return _times(grad, factor), None, None, entering, leaving, None


class Weights(torch.autograd.Function):
    """The weights of a block, as it uses them; their gradients are divided by its scale."""

    @staticmethod
    def forward(
        ctx: Any,
        shut: Tensor,
        meter: Tensor | None,
        route: tuple[int, int, int],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        """The `params` themselves."""
        ctx.shut, ctx.route, ctx.heard = shut, route, meter is not None
        ctx.set_materialize_grads(False)
        _stamp(ctx, shut)
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients without the scale of the block, those of half weights in float32; amax."""
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, None, None, *grads
        _check(ctx, ctx.shut)
        amax = _amax(there) if ctx.heard else None
        if any(grad.is_sparse for grad in there):
            done = iter([_wide(grad) * ctx.shut for grad in there])
        else:
            done = iter(torch._foreach_mul([_wide(grad) for grad in there], ctx.shut))
        return None, amax, None, *(None if grad is None else next(done) for grad in grads)


def cross(
    x: Tensor,
    opened: Tensor | None,
    shut: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    route: tuple[int, int, int],
) -> Tensor:
    """`x` on the other side of a border."""
    return Border.apply(x, opened, shut, entering, leaving, route)  # type: ignore[no-untyped-call]


def lend(
    shut: Tensor, meter: Tensor | None, route: tuple[int, int, int], params: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The `params` inside of a block."""
    return Weights.apply(shut, meter, route, *params)  # type: ignore[no-untyped-call]


def _amax(grads: list[Tensor]) -> Tensor:
    """The largest magnitude (float32) in all of `grads`; NaN if there is one."""
    values = [grad._values() if grad.is_sparse else grad for grad in grads]
    values = [value for value in values if value.numel()]
    if not values:
        return torch.zeros((), device=grads[0].device)
    if len(values) == 1:
        return torch.linalg.vector_norm(values[0], float("inf")).float()
    largest = torch._foreach_norm(values, float("inf"))
    if any(value.dtype is not values[0].dtype for value in values):
        largest = tuple(each.float() for each in largest)
    return torch.stack(largest).amax().float()


def _times(grad: Tensor, factor: Tensor) -> Tensor:
    """`grad` times `factor`, which float16 cannot always hold."""
    if grad.dtype is torch.float16:
        return (grad.float() * factor).to(grad.dtype)
    return grad * factor


def _wide(grad: Tensor) -> Tensor:
    """`grad` in a format in which a small one does not vanish."""
    return grad.float() if grad.dtype is torch.float16 else grad


def _stamp(ctx: Any, factor: Tensor | None) -> None:
    """Remembers how often `factor` has been written."""
    compiling = torch.compiler.is_compiling()
    ctx.stamp = None if factor is None or compiling else factor._version


def _check(ctx: Any, factor: Tensor) -> None:
    """Raises if `factor` was written since, or if this gradient will be differentiated."""
    if torch.compiler.is_compiling():
        return
    if ctx.stamp != factor._version:
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
