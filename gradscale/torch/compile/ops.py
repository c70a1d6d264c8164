"""The operators by which torch.compile calls a scaler; the ordinary code runs behind them.

A graph cannot hold entries, hooks and weak references. So in a compiled function `scale()` and
`apply()` are opaque operators; when the graph runs, they find the scaler by its number and call its
method of the same name.

A compiler may pass copies of the tensors that an operator changes, and write the copies back
afterwards. So `apply` first copies its arguments to the real tensors, and at the end the results to
the arguments. Where both are the same memory, as with Inductor, nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradscale.torch.compile.graph_breaks import outside
from gradscale.torch.compile.handles import find
from gradscale.torch.features import COMPILES_OPERATORS, OPERATOR_TAGS
from gradscale.torch.grads.scale import move, times
from gradscale.torch.telemetry.blame import Blame
from gradscale.torch.telemetry.outcome import StepOutcome

# Scaling.


def scale(scaler: Any, loss: Tensor) -> Tensor:
    """`loss` times the scale of the iteration; for `GradScaler.scale` in a compiled function."""
    if not COMPILES_OPERATORS:
        return outside(scaler, "scale", loss)
    scaled: Tensor = torch.ops.gradscale.scale(loss, scaler._handle.order, scaler._handle.number)
    return scaled


# Declared to change nothing, because only such an operator may have a backward pass. A compiler may
# then scale a loss twice or leave out an unused one, which does no harm.
@torch.library.custom_op(
    "gradscale::scale",
    mutates_args=(),
    schema="(Tensor loss, Tensor order, SymInt scaler) -> Tensor",
    **OPERATOR_TAGS,
)
def _scale(loss: Tensor, order: Tensor, scaler: int) -> Tensor:
    """The scaled loss."""
    scaled: Tensor = find(scaler).scale(loss)
    return scaled.detach()


@torch.library.custom_op(
    "gradscale::begin_pass",
    mutates_args=(),
    schema="(Tensor grad, Tensor loss, SymInt scaler) -> Tensor",
    **OPERATOR_TAGS,
)
def _begin_pass(grad: Tensor, loss: Tensor, scaler: int) -> Tensor:
    """The gradient of `loss`, times the scale of the iteration in which the pass runs."""
    factor = find(scaler)._pipeline.passes.begin(loss)
    return times(grad, factor.tensor).to(loss.dtype)


@_scale.register_fake
def _scale_shape(loss: Tensor, order: Tensor, scaler: int) -> Tensor:
    return times(loss, torch.empty((), dtype=torch.float32, device=loss.device))


@_begin_pass.register_fake
def _begin_pass_shape(grad: Tensor, loss: Tensor, scaler: int) -> Tensor:
    return _scale_shape(grad, loss, scaler).to(loss.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scaler = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (loss,) = ctx.saved_tensors
    return torch.ops.gradscale.begin_pass(grad, loss, ctx.scaler), None, None


_scale.register_autograd(_backward, setup_context=_setup)


# Applying.


def apply(
    scaler: Any,
    optimizers: Any,
    clip_norm: float | None,
    clip_value: float | None,
    closure: Callable[[], Any] | None,
    zero_grad: bool,
) -> StepOutcome:
    """The outcome of the step; for `GradScaler.apply` in a compiled function."""
    several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    params = _params_of(several) if all(hasattr(one, "_handle") for one in several) else []
    numbers = all(type(limit) in (int, float, type(None)) for limit in (clip_norm, clip_value))
    plain = all(type(p) in (Tensor, Parameter) for p in params) and COMPILES_OPERATORS
    if not params or not numbers or not plain or closure is not None or not zero_grad:
        limits = {"clip_norm": clip_norm, "clip_value": clip_value}
        rest = {"closure": closure, "zero_grad": zero_grad}
        return outside(scaler, "apply", optimizers, **limits, **rest)
    places = [place for place, param in enumerate(params) if param.grad is not None]
    there = [params[place] for place in places]
    grad_enabled = torch.is_grad_enabled()
    with torch.no_grad():
        flags, floats, row, number = torch.ops.gradscale.apply(
            there,
            [param.grad for param in there],
            scaler._handle.order,
            scaler._handle.number,
            [optimizer._handle.number for optimizer in several],
            places,
            clip_norm,
            clip_value,
            grad_enabled,
        )
    for param in params:
        param.grad = None  # the operator has done so, which the compiler does not see
    applied, finite, fits, loss_finite = flags.unbind()
    scale, grad_norm, amax, underflow = floats.unbind()
    measured = scaler._enabled and len(places) > 0
    # Dynamo cannot hand out defaults that are functions, so nothing is left to a default.
    return StepOutcome(
        applied=applied,
        finite=finite,
        fits=fits,
        loss_finite=loss_finite,
        scale=scale,
        grad_norm=grad_norm if measured else None,
        amax=amax if measured else None,
        underflow=underflow if measured and scaler._pipeline.underflow_every else None,
        skipped_in_a_row=row,
        _format=scaler._state.format,
        _blame=Blame.nobody,
        _original=Original(scaler._handle, number),
    )


class Original:
    """Finds the outcome that a compiled step had outside of the graph."""

    def __init__(self, handle: Any, number: Tensor) -> None:
        self._handle, self._number = handle, number

    def __call__(self) -> StepOutcome:
        """The outcome."""
        outcome: StepOutcome = self._handle.recall(self._number)
        return outcome


def _params_of(optimizers: Iterable[Any]) -> list[Tensor]:
    """The parameters of `optimizers`, each once, in the same order at every call."""
    return list(dict.fromkeys(p for o in optimizers for each in o._handle.params for p in each))


# Not a `custom_op`, inside which there is no autograd: followers of the scaler may need it.
torch.library.define(
    "gradscale::apply",
    "(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!) order, SymInt scaler,"
    " SymInt[] optimizers, int[] places, float? clip_norm, float? clip_value, bool grad_enabled)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    **OPERATOR_TAGS,
)


def _apply(
    params: list[Tensor],
    grads: list[Tensor],
    order: Tensor,
    scaler: int,
    optimizers: Sequence[int],
    places: Sequence[int],
    clip_norm: float | None,
    clip_value: float | None,
    grad_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The values of the outcome, and its number; the arguments are as they are after the step."""
    owner = find(scaler)
    several = [find(number) for number in optimizers]
    everyone = _params_of(several)
    real = [everyone[place] for place in places]
    try:
        copied = _bring(params, grads, real)
        with torch.set_grad_enabled(grad_enabled):
            outcome = owner.apply(several, clip_norm=clip_norm, clip_value=clip_value)
    except BaseException:
        torch.set_grad_enabled(grad_enabled)  # the rest of the graph, which does it, will not run
        raise
    for given, mine in copied:
        given.copy_(mine.detach())
    for optimizer in several:
        optimizer._handle.params[:] = [group["params"] for group in optimizer.param_groups]
    return *_values(outcome), owner._handle.keep(outcome)


def _bring(
    params: list[Tensor], grads: list[Tensor], real: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Copies arguments to the real tensors; returns the pairs that are not the same memory."""
    pairs = list(zip(params, real, strict=True))
    for param, grad in zip(real, grads, strict=True):
        if param.grad is None:
            param.grad = grad  # made in the same graph
        pairs.append((grad, param.grad))
    copied = [(given, mine) for given, mine in pairs if given.data_ptr() != mine.data_ptr()]
    for given, mine in copied:
        mine.data.copy_(given)  # `data`: autograd must not see it
    return copied


def _values(outcome: StepOutcome) -> tuple[Tensor, Tensor, Tensor]:
    """The flags, floats and the count of `outcome`; an operator must not return views of them."""
    device = outcome.applied.device
    flags = (outcome.applied, outcome.finite, outcome.fits, outcome.loss_finite)
    floats = (outcome.scale, outcome.grad_norm, outcome.amax, outcome.underflow)
    known = [
        torch.full_like(outcome.scale, math.nan) if value is None else move(value, device)
        for value in floats
    ]
    return torch.stack(flags), torch.stack(known), outcome.skipped_in_a_row.clone()


def _apply_shape(
    params: list[Tensor], grads: list[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = params[0].device if params else torch.device("cpu")
    return (
        torch.empty(4, dtype=torch.bool, device=device),
        torch.empty(4, dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


torch.library.impl("gradscale::apply", "default", _apply)
torch.library.register_fake("gradscale::apply", _apply_shape)
