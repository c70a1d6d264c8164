"""The borders of a block: the identity in the forward pass, a factor in the backward pass.

There are four: where tensors leave a block, where they enter it, where they go from one block to
the next, and its weights. The largest gradients that pass are written to the log of the meters.
Where a backward pass must change nothing but gradients, because it is compiled or captured, they
are returned as the gradient of an extra input, the meter.

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
from gradscale.torch.blocks.meters import OUTSIDE, Log
from gradscale.torch.blocks.references import counts_of_lone, lone
from gradscale.torch.blocks.rule import VANISHED

__all__ = ["OUTSIDE"]

Factor = float | Tensor


class Clock:
    """How many times the scales have moved."""

    def __init__(self) -> None:
        self.time = 0


class Terms:
    """Whether the scales of some forward passes hold; if not, all of their factors are 1.

    Weights are replaced by the same views in several passes, so these have the same terms.
    """

    def __init__(self) -> None:
        self.holds = True
        """False while a forward pass is running of which something is assumed."""
        self.void = False
        """Whether one of the passes was not what was assumed."""
        self.used: set[int] = set()
        """The blocks whose outputs were used by others than the next block."""


class Live(NamedTuple):
    """What a border needs in a pass that is not compiled."""

    clock: Clock
    time: int
    """Of the forward pass."""
    terms: Terms
    log: Log | None = None
    """Where the largest gradients are written to, in passes that measure."""
    x: Tensor | None = None
    gap: Gap | None = None
    """What lies between `x` and the blocks that it comes from."""
    factors: Sequence[Factor] = ()
    """For each end of the gap."""

    def check(self) -> None:
        """Raises if the scales have moved since, or if this gradient will be differentiated."""
        if self.time != self.clock.time:
            raise CallOrderError(
                "The scales of the blocks have changed between a forward pass and its backward "
                "pass. Call blocks.update() after the backward pass, before the next forward pass."
            )
        _refuse_second_gradients()


def _refuse_second_gradients() -> None:
    """Raises if this gradient will be differentiated."""
    if torch.is_grad_enabled():
        raise SettingError(
            "create_graph=True is not supported with BlockScales, because second derivatives "
            "would have wrong scales. Call blocks.remove(), or leave modules that are "
            "differentiated twice out of blocks=."
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
        live = ctx.live
        factor = ctx.factor if live is None or live.terms.holds else 1.0
        total = None if grad is None else _times(grad, factor)
        if live is not None:
            live.check()
            if grad is not None:
                live.terms.used.add(ctx.route[2])
            this_pass = torch._C._current_graph_task_id()
            for number, part in ctx.arrived:
                if number == this_pass:
                    total = part if total is None else total + part
            ctx.arrived.clear()
        if total is None:
            return (None,) * 5
        if live is not None and live.log is not None:
            live.log.came(ctx.route[2], largest([total]))
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
        live, own = ctx.live, ctx.factor
        if live is not None:
            live.check()
            own = own if live.terms.holds else 1.0
            # A hook that was put on `x` meanwhile wants its gradient, unscaled.
            if live.gap is not None and is_untouched(live.x):
                at_blocks, at_leaves = live.gap.carry(grad)
                gone = [each for each in (*at_blocks, *at_leaves) if each is not None]
                leaving = _amax(gone) if gone and ctx.measured[0] else None
                if gone and live.log is not None:
                    live.log.left(ctx.route[1], OUTSIDE, largest(gone))
                this_pass = torch._C._current_graph_task_id()
                for node, part, factor in zip(
                    live.gap.blocks, at_blocks, live.factors, strict=True
                ):
                    if part is not None:
                        part = _times(part, factor if live.terms.holds else 1.0)
                        node.arrived.append((this_pass, part))
                parts = (None if g is None else _times(_wide(g), own) for g in at_leaves)
                return None, None, leaving, None, None, None, *parts
            if live.log is not None:
                live.log.left(*ctx.route[1:], largest([grad]))
        amax = _amax([grad]) if any(ctx.measured) else None
        entering = amax * ctx.factor if amax is not None and ctx.measured[1] else None
        leaving = amax if ctx.measured[0] else None
        return _times(grad, own), None, leaving, entering, None, None, *others


class Change:
    """Where a gradient goes from one block to the one before it, in a pass that does not measure.

    A hook of the operation that has made the tensor between the two. It is called with the
    gradients of all outputs of that operation.

    Args:
        nr: Which of the outputs the tensor is.
        factor: By which its gradient is multiplied.
        live: Of the pass.
    """

    __slots__ = ("_factor", "_live", "_nr")

    def __init__(self, nr: int, factor: Factor, live: Live) -> None:
        self._nr, self._factor, self._live = nr, factor, live

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """The gradients, that of the tensor at the scale of the block that it goes to."""
        self._live.check()
        nr = self._nr
        grad = grads[nr]
        if grad is None or not self._live.terms.holds:
            return None
        return *grads[:nr], _times(grad, self._factor), *grads[nr + 1 :]


class Weights(torch.autograd.Function):
    """Weights as blocks use them; their gradients are divided by the scale of the blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        factors: Factor | list[float],
        meter: Tensor | None,
        slots: tuple[int, ...],
        places: tuple[int, ...],
        mark: int,
        terms: Terms | None,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        """The `params` themselves; no views, which torch would not have twice if they are written.

        Args:
            ctx: Of autograd.
            factors: By which gradients are multiplied; if they differ, one for each.
            meter: With a number for every weight, also of those that get no gradient.
            slots: Which numbers those of `params` are.
            places: The block of each.
            mark: Of these blocks.
            terms: Of the passes that use them; None in a compiled function.
            params: Weights.
        """
        ctx.set_materialize_grads(False)
        ctx.factors, ctx.slots, ctx.places, ctx.mark = factors, slots, places, mark
        ctx.terms = terms
        ctx.is_plain = (
            meter is None
            and terms is not None
            and not isinstance(factors, Tensor)
            and all(param.dtype is not torch.float16 for param in params)
        )
        ctx.num_meters = 0 if meter is None else len(meter)
        if torch.compiler.is_compiling():
            return tuple(param.view_as(param) for param in params)
        return tuple(param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients without the scale of the block, those of half weights in float32; amax."""
        compiling = torch.compiler.is_compiling()
        own = [False] * len(grads) if compiling else lone(grads, counts_of_lone())
        if ctx.is_plain and all(own):
            _refuse_second_gradients()
            if ctx.terms.holds:
                torch._foreach_mul_(list(grads), ctx.factors)  # type: ignore[arg-type]
            return None, None, None, None, None, None, *grads
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, None, None, None, None, None, *grads
        if not compiling:
            _refuse_second_gradients()
        amax = _each_amax(grads, ctx.slots, ctx.num_meters) if ctx.num_meters else None
        half = torch.float16
        wide = [grad.float() if grad.dtype is half else grad for grad in there]
        factors = ctx.factors if ctx.terms is None or ctx.terms.holds else 1.0
        if len(there) < len(grads):
            own = [each for each, g in zip(own, grads, strict=True) if g is not None]
            if isinstance(factors, list):
                factors = [each for each, g in zip(factors, grads, strict=True) if g is not None]
        own = [mine or new is not grad for mine, new, grad in zip(own, wide, there, strict=True)]
        if not compiling and any([grad.is_sparse for grad in there]):  # noqa: C419, faster
            each = factors if isinstance(factors, list) else [factors] * len(wide)
            done = [_times(grad, factor) for grad, factor in zip(wide, each, strict=True)]
        else:
            done = wide if is_one(factors) else _each_times(wide, factors, own)
        if len(there) == len(grads):
            return None, amax, None, None, None, None, *done
        left = iter(done)
        parts = (None if grad is None else next(left) for grad in grads)
        return None, amax, None, None, None, None, *parts


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


def is_one(factor: Factor | list[float]) -> bool:
    """Whether the host knows that a factor changes nothing."""
    return isinstance(factor, float) and factor == 1.0


def _times(grad: Tensor, factor: Factor) -> Tensor:
    """`grad` times `factor`, which may be beyond what float16 can hold."""
    if is_one(factor):
        return grad
    if isinstance(factor, Tensor) and grad.dtype is torch.float16:
        return (grad.float() * factor).half()
    return grad * factor  # a Python number is not rounded to float16


def _each_times(
    grads: list[Tensor], factors: Factor | list[float], own: list[bool]
) -> list[Tensor]:
    """Each of `grads` times its factor, written over those that are our `own`."""
    if 4 * sum(own) < 3 * len(own):  # torch 2.6 does not compile own.count()
        return list(torch._foreach_mul(grads, factors))
    # Nothing is allocated, which takes most of the time for many small weights.
    done = [grad if mine else grad.clone() for grad, mine in zip(grads, own, strict=True)]
    torch._foreach_mul_(done, factors)
    return done


def _is_sparse(grad: Tensor) -> bool:
    """Whether `grad` is sparse: none is in a graph, where torch 2.6 refuses the question."""
    return not torch.compiler.is_compiling() and grad.is_sparse


def _wide(grad: Tensor) -> Tensor:
    """`grad` in a format in which a small one does not vanish."""
    return grad.float() if grad.dtype is torch.float16 else grad


def largest(grads: Sequence[Tensor]) -> Tensor:
    """The largest magnitude (float32) in all of `grads`; NaN if there is one."""
    found = _norms(grads)
    return found[0] if len(found) == 1 else torch.stack(found).amax()


def _amax(grads: Sequence[Tensor]) -> Tensor:
    """`largest(grads)`, at least VANISHED."""
    return largest(grads).clamp(min=VANISHED)


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
        [value] = values
        dtype = None if value.dtype is torch.float64 else torch.float32  # it does not narrow
        return [torch.linalg.vector_norm(value, float("inf"), dtype=dtype).float()]
    norms = iter(torch._foreach_norm(full, float("inf")) if full else ())
    zero = torch.zeros((), device=grads[0].device)
    return [next(norms).float() if value.numel() else zero for value in values]
