"""The borders of a block: the identity in the forward pass, a factor in the backward pass.

There are three: where tensors leave a block, where they enter it, and its weights. The largest
gradients that pass are returned as the gradient of an extra input, the meter. So a backward pass
changes nothing but gradients, and compiles as any other.

Factors are attributes of the context and not saved tensors, because activation checkpointing would
replace those by what it finds when it recomputes a block. And forward() takes the context: with
setup_context() torch inspects the signature in every call, which takes 50 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.blocks.gaps import Gap
from gradscale.torch.blocks.rule import VANISHED

OUTSIDE = -1
"""The place of what belongs to no block."""

Factor = float | Tensor


class Clock:
    """How many times the scales have moved."""

    def __init__(self) -> None:
        self.time = 0


class Live(NamedTuple):
    """What a border needs in a pass that is not compiled."""

    clock: Clock
    time: int
    """Of the forward pass."""
    x: Tensor | None = None
    gap: Gap | None = None
    """What lies between `x` and the blocks that it comes from."""
    factors: Sequence[Factor] = ()
    """For each end of the gap."""

    def check(self) -> None:
        """Raises if the scales have moved since, or if this gradient will be differentiated."""
        if self.time != self.clock.time:
            raise CallOrderError(
                "The scales of the blocks have moved between a forward pass and its backward pass. "
                "Call blocks.update() after the backward pass, before the next forward pass."
            )
        _refuse_second_gradients()


def _refuse_second_gradients() -> None:
    """Raises if this gradient will be differentiated."""
    if torch.is_grad_enabled():
        raise SettingError(
            "create_graph=True does not go with BlockScales: gradients of gradients would have "
            "wrong scales. Call blocks.remove(), or give blocks= without what is differentiated "
            "twice."
        )


class Output(torch.autograd.Function):
    """A tensor that leaves a block; its gradient is multiplied by the scale of the block.

    Gradients that come through a gap (see gaps.py) have that scale already. They lie in `arrived`
    of the context, each with the number of its backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factor: Factor,
        entering: Tensor | None,
        route: tuple[int, int, int],
        live: Live | None,
    ) -> Tensor:
        """`x` itself, and no view of it: hooks.py notices a write in place by the `grad_fn`.

        Args:
            ctx: Of autograd.
            x: The tensor.
            factor: By which its gradient is multiplied.
            entering: The meter of the block.
            route: A mark, and the places that the gradient comes from and goes to.
            live: None in a compiled function, which is given a view.
        """
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.measured, ctx.route, ctx.live = factor, entering is not None, route, live
        if live is None:
            return x.view_as(x)
        ctx.arrived = []
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient at the scale of the block; amax."""
        total = None if grad is None else _times(grad, ctx.factor)
        if ctx.live is not None:
            ctx.live.check()
            this_pass = torch._C._current_graph_task_id()
            for number, part in ctx.arrived:
                if number == this_pass:
                    total = part if total is None else total + part
            ctx.arrived.clear()
        if total is None:
            return (None,) * 5
        return total, None, _amax([total]) if ctx.measured else None, None, None


class Input(torch.autograd.Function):
    """A tensor that enters a block; its gradient goes the other way.

    The gradient is brought to the scale of the place that it goes to by one factor, so it is never
    unscaled in between. If there is a gap, it goes through the gap at the scale of this block and
    is brought to other scales at the ends of the gap.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factor: Factor,
        leaving: Tensor | None,
        entering: Tensor | None,
        route: tuple[int, int, int],
        live: Live | None,
        *leaves: Tensor,
    ) -> Tensor:
        """A view of `x`, which torch refuses to write to in place: autograd would not see that.

        Args:
            ctx: Of autograd.
            x: The tensor.
            factor: By which its gradient is multiplied.
            leaving: The meter of this block.
            entering: The meter of the block that the gradient goes to.
            route: A mark, and the places that the gradient comes from and goes to.
            live: None in a compiled function.
            leaves: The leaves of the gap.
        """
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.route, ctx.live, ctx.num_leaves = factor, route, live, len(leaves)
        ctx.measured = leaving is not None, entering is not None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient at the scale of the place that it goes to; amax before and after."""
        others = (None,) * ctx.num_leaves
        if grad is None:
            return None, None, None, None, None, None, *others
        live = ctx.live
        if live is not None:
            live.check()
            # A hook that was put on `x` meanwhile wants its gradient, unscaled.
            if live.gap is not None and is_untouched(live.x):
                at_blocks, at_leaves = live.gap.carry(grad)
                gone = [each for each in (*at_blocks, *at_leaves) if each is not None]
                leaving = _amax(gone) if gone and ctx.measured[0] else None
                this_pass = torch._C._current_graph_task_id()
                for node, part, factor in zip(
                    live.gap.blocks, at_blocks, live.factors, strict=True
                ):
                    if part is not None:
                        node.arrived.append((this_pass, _times(part, factor)))
                parts = (None if g is None else _times(_wide(g), ctx.factor) for g in at_leaves)
                return None, None, leaving, None, None, None, *parts
        amax = _amax([grad]) if any(ctx.measured) else None
        entering = amax * ctx.factor if amax is not None and ctx.measured[1] else None
        leaving = amax if ctx.measured[0] else None
        return _times(grad, ctx.factor), None, leaving, entering, None, None, *others


class Weights(torch.autograd.Function):
    """Weights as blocks use them; their gradients are divided by the scale of the blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        factor: Factor,
        meter: Tensor | None,
        slots: tuple[int, ...],
        places: tuple[int, ...],
        mark: int,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        """The `params` themselves; no views, which torch would not have twice if they are written.

        Args:
            ctx: Of autograd.
            factor: By which gradients are multiplied.
            meter: With a number for every weight, also of those that get no gradient.
            slots: Which numbers those of `params` are.
            places: The block of each.
            mark: Of these blocks.
            params: Weights.
        """
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.slots, ctx.places, ctx.mark = factor, slots, places, mark
        ctx.num_meters = 0 if meter is None else len(meter)
        if torch.compiler.is_compiling():
            return tuple(param.view_as(param) for param in params)
        return tuple(param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients without the scale of the block, those of half weights in float32; amax."""
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, None, None, None, None, *grads
        if not torch.compiler.is_compiling():
            _refuse_second_gradients()
        amax = _each_amax(grads, ctx.slots, ctx.num_meters) if ctx.num_meters else None
        wide = [_wide(grad) for grad in there]
        if any(_is_sparse(grad) for grad in there):
            done = iter([_times(grad, ctx.factor) for grad in wide])
        else:
            done = iter(wide if is_one(ctx.factor) else torch._foreach_mul(wide, ctx.factor))
        parts = (None if grad is None else next(done) for grad in grads)
        return None, amax, None, None, None, *parts


leave: Callable[..., Tensor] = Output.apply
enter: Callable[..., Tensor] = Input.apply
lend: Callable[..., tuple[Tensor, ...]] = Weights.apply


def _now(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for passes that are not compiled, in two thirds of the time."""
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return direct(*args)

    return apply


leave_now: Callable[..., Tensor] = _now(Output)
enter_now: Callable[..., Tensor] = _now(Input)


def is_untouched(x: Tensor | None) -> bool:
    """Whether nobody wants the gradient of `x`."""
    return x is not None and not x._backward_hooks and not x.retains_grad


def is_one(factor: Factor) -> bool:
    """Whether the host knows that a factor changes nothing."""
    return isinstance(factor, float) and factor == 1.0


def _times(grad: Tensor, factor: Factor) -> Tensor:
    """`grad` times `factor`, which may be beyond what float16 can hold."""
    if is_one(factor):
        return grad
    if isinstance(factor, Tensor) and grad.dtype is torch.float16:
        return (grad.float() * factor).half()
    return grad * factor  # a Python number is not rounded to float16


def _is_sparse(grad: Tensor) -> bool:
    """Whether `grad` is sparse: none is in a graph, where torch 2.6 refuses the question."""
    return not torch.compiler.is_compiling() and grad.is_sparse


def _wide(grad: Tensor) -> Tensor:
    """`grad` in a format in which a small one does not vanish."""
    return grad.float() if grad.dtype is torch.float16 else grad


def _amax(grads: Sequence[Tensor]) -> Tensor:
    """The largest magnitude (float32) in all of `grads`, at least VANISHED; NaN if there is one."""
    largest = _norms(grads)
    return (largest[0] if len(largest) == 1 else torch.stack(largest).amax()).clamp(min=VANISHED)


def _each_amax(grads: Sequence[Tensor | None], slots: Sequence[int], num: int) -> Tensor:
    """The largest magnitude of each of `grads`, at its slot of `num`; 0 where there is none."""
    there = [grad for grad in grads if grad is not None]
    found = torch.stack(_norms(there)).clamp(min=VANISHED)
    if len(there) == num:
        return found
    used = [slot for grad, slot in zip(grads, slots, strict=True) if grad is not None]
    every = [torch.zeros((), device=found.device)] * num
    for slot, each in zip(used, found.unbind(), strict=True):
        every[slot] = each
    return torch.stack(every)


def _norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude of each (float32)."""
    values = [grad._values() if _is_sparse(grad) else grad for grad in grads]
    full = [value for value in values if value.numel()]
    if len(full) == 1 == len(values):
        return [torch.linalg.vector_norm(values[0], float("inf")).float()]
    norms = iter(torch._foreach_norm(full, float("inf")) if full else ())
    zero = torch.zeros((), device=grads[0].device)
    return [next(norms).float() if value.numel() else zero for value in values]
