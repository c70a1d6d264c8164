"""Finding the first good scale by backward passes alone, before anything is stepped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError, StuckError
from gradscale.policy import GradStats, Headroom, HeadroomState
from gradscale.torch import compiled
from gradscale.torch.applying import Applying
from gradscale.torch.contract import as_optimizers
from gradscale.torch.moment import Moment
from gradscale.torch.telling import largest
from gradscale.torch.unscale import read, times, values_of

PASSES = 8
"""Backward passes that are enough for any scale: four to come down from, two to go up, two to see.
"""


class Calibrating(Applying):
    """A scale that suits the gradients from the first step on."""

    def calibrate(
        self,
        closure: Callable[[], Tensor],
        optimizers: Optimizer | Iterable[Optimizer],
        model: torch.nn.Module | None = None,
    ) -> float:
        """The scale that suits the gradients of `closure`, which the scaler has from here on.

            scaler.calibrate(lambda: loss_fn(model(batch), target), optimizer, model)

        Runs `closure` and a backward pass at one scale after the other, as a `Headroom` policy
        would move it, until it moves no more: two or three passes as a rule, eight at most.
        Nothing is stepped. Gradients, the random state of torch, and the buffers of `model` (the
        statistics of batch norms) are afterwards what they were before. With a policy that is a
        `Headroom`, what it has learned is kept. On several ranks all must call it. **Waits for the
        device.**

        Args:
            closure: Computes the loss and returns it, unscaled, without a backward pass.
            optimizers: Whose parameters to look at.
            model: Whose buffers to put back.

        Raises:
            StuckError: No scale gave finite gradients, or the loss is not finite. The scale is what
                it was.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "calibrate", closure, optimizers, model)
        several = as_optimizers(optimizers, "calibrate()")
        params = [p for one in several for group in one.param_groups for p in group["params"]]
        if not params:
            raise SettingError("calibrate() takes optimizers with parameters, got none.")
        if not self._enabled:
            return 1.0
        if self._per_optimizer_states:
            raise CallOrderError(
                "calibrate() was called in the middle of an iteration. Call update() first."
            )
        rule = self._rule_to_search_by()
        state = rule.init()._replace(scale=self._scale_to_begin_with())
        for _ in range(PASSES):
            stats = self._try(closure, params, model, state.scale)
            moved = rule.update(state, stats)
            if stats.finite and moved.scale == state.scale:
                self._take_over(moved)
                return float(moved.scale)
            state = moved
        if stats.finite:  # the largest that was seen to be good enough; it only creeps up
            self._take_over(state)
            return float(state.scale)
        raise StuckError(
            f"calibrate() found no scale: after {PASSES} backward passes, the last at "
            f"{float(state.scale):g}, gradients were still not finite. Look for a division by zero "
            "or a logarithm of zero in the backward pass."
        )

    def _rule_to_search_by(self) -> Headroom:
        """The policy, if it is a `Headroom`; else one with the same bounds."""
        if isinstance(self._policy, Headroom):
            return self._policy
        low, high = self._bounds()
        low, high = 2.0 ** math.ceil(math.log2(low)), _power_below(high)
        start = min(max(2.0**16, low), high)
        return Headroom(init_scale=start, min_scale=low, max_scale=high, format=self._format.name)

    def _scale_to_begin_with(self) -> float:
        """The scale of now, as a power of two."""
        scale = self._initial.scale if self._state is None else float(self._state.scale)
        return _power_below(float(scale))

    def _try(
        self,
        closure: Callable[[], Tensor],
        params: Sequence[Tensor],
        model: torch.nn.Module | None,
        scale: float,
    ) -> GradStats:
        """What the gradients are like at `scale`; nothing is left of the pass."""
        with _undone(params, model):
            loss = closure()
            if not isinstance(loss, Tensor) or not loss.requires_grad:
                raise SettingError(
                    "closure must return the loss, a tensor that needs a gradient, got "
                    f"{type(loss).__name__}. Let it compute the loss and nothing else."
                )
            if self._state is None:
                self._lazy_init_scale_growth_tracker(loss.device)
            groups = self._agreement.among(params)
            total = loss.detach().float().sum().reshape(1)
            worst = float(largest((total * 0).abs(), groups))  # NaN if one is not finite
            if not math.isfinite(worst):
                raise StuckError(
                    f"calibrate() found a loss of {float(total):g}, or one on another rank that is "
                    "not finite, which no scale is to blame for. Look at the batch and the forward "
                    "pass."
                )
            factor = torch.full((), scale, dtype=torch.float32, device=loss.device)
            torch.autograd.backward(times(loss, factor))
            values = values_of(p for p in params if p.grad is not None)
            if not values and not groups:
                raise SettingError("The loss of closure reaches no parameter of the optimizers.")
            one = torch.ones_like(self._live("calibrate()").scale)
            found: Any = read(values, one).amax
            amax = float(largest(found.reshape(1), groups))
        finite = math.isfinite(amax)
        return GradStats(finite=finite, amax=amax, exponent=math.frexp(amax)[1] if finite else 0)

    def _take_over(self, found: HeadroomState) -> None:
        """Goes on with the state that was found, or with its scale alone."""
        live = self._live("calibrate()")
        fields = found if isinstance(live, HeadroomState) else (found.scale,)
        for value, number in zip(live, fields, strict=False):
            value.fill_(number)
        if self._window is not None:
            self._window.close([ref() for ref in self._seen.values()])


def _power_below(number: float) -> float:
    """The largest power of two that is at most `number`."""
    return 2.0 ** (math.frexp(number)[1] - 1)


@contextmanager
def _undone(params: Sequence[Tensor], model: torch.nn.Module | None) -> Iterator[None]:
    """Puts back gradients, the random state and the buffers of `model` afterwards."""
    watched = {id(p): p for p in (*params, *(model.parameters() if model is not None else ()))}
    grads = [(param, param.grad) for param in watched.values()]
    moment = Moment([] if model is None else [model])
    for param, _ in grads:
        param.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for param, grad in grads:
            param.grad = grad
        moment.restore()
