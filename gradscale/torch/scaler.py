"""The drop-in GradScaler: torch's calls in torch's order, without torch's defects.

Here are its constructor, `step()` and `update()`; the policy's state is in keeper.py, scaling and
unscaling are in scaling.py. Decisions stay on the device; the one place that must wait for it is
the step of an optimizer that cannot skip by itself, exactly as in torch.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.policy import MAX_SCALE, MIN_SCALE, Dynamic, Policy
from gradscale.torch.closure import ClosureStep
from gradscale.torch.contract import step_on_device, writes_back
from gradscale.torch.outcome import StepOutcome
from gradscale.torch.scaling import NOT_SAVED, Scaling
from gradscale.torch.unscale import params_with_grad, read, values_of
from gradscale.torch.window import Fate, Window


class GradScaler(Scaling):
    """Scales losses, unscales gradients, steps or skips: `torch.amp.GradScaler`, mended.

        scaler = GradScaler("cuda")
        for inputs, targets in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)      # skipped if a gradient is not finite
            scaler.update()
            optimizer.zero_grad()

    What differs from torch is listed in docs/differences.md.

    Args:
        device: Where it will be used. The state really goes to the device of the first loss.
        enabled: False makes every method hand through what it gets.
        policy: The rule that moves the scale, instead of torch's four settings.
        min_scale: The floor of the scale.
        max_scale: The ceiling of the scale.
        hysteresis: On which consecutive overflow the scale falls.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: Policy | None = None,
        min_scale: float = MIN_SCALE,
        max_scale: float = MAX_SCALE,
        hysteresis: int = 1,
    ) -> None:
        rule = Dynamic(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
            exact=False,
        )
        if policy is not None and rule != Dynamic(exact=False):
            raise SettingError(f"Give either policy or torch's settings, got {policy} and {rule}.")
        self._device = device
        self._enabled = enabled
        self._keep(rule if policy is None else policy)
        self._warned_half = False
        self._begin()

    # Stepping.

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps `optimizer` unless a gradient is not finite; what its `step()` returned, or None.

        A closure, by position or as `closure=`, computes the loss, calls `scaler.backward(loss)`
        and returns the unscaled loss. All its evaluations have one scale, and the step is undone if
        one of them overflows.

        **Waits for the device** unless the optimizer can skip by itself (`fused=True` in
        torch.optim).
        """
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            yes = torch.ones((), dtype=torch.bool)
            self._tell(optimizer, StepOutcome(yes, yes, yes, yes, torch.ones(())))
            return result
        closure, others, named = _take_closure(args, kwargs)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, others, named)
        window = self._use(optimizer, "step", (OptState.READY, OptState.UNSCALED))
        params = params_with_grad(optimizer)
        if not params:
            _warn_no_gradients(optimizer)
            self._finish(optimizer, window, torch.ones_like(window.scale, dtype=torch.bool))
            self._skips.pop()  # there is nothing to clear
            return None
        capable = getattr(optimizer, "_step_supports_amp_scaling", False)
        if capable and "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return self._step_with_scaler(optimizer, window, args, kwargs)
        scale = None
        if self._stage(optimizer) is OptState.UNSCALED:
            self._recheck(optimizer, window)
        elif capable and not window.split(params)[1]:
            self._record(optimizer, read(values_of(params), window.inv_scale), OptState.READY)
            scale = window.scale
        else:
            self._unscale(optimizer, window)
        skipped = self._skipped(optimizer)
        if capable:
            result = step_on_device(optimizer, scale, skipped, args, kwargs)
            if scale is not None:
                self._mark_stepped(optimizer, window, skipped)
        else:
            result = None if bool(skipped) else optimizer.step(*args, **kwargs)
        self._finish(optimizer, window, skipped)
        return result

    def _mark_stepped(self, optimizer: Optimizer, window: Window, skipped: Tensor) -> None:
        """Remembers gradients that went through `step_on_device` scaled."""
        left = torch.where(skipped, window.inv_scale, torch.ones_like(window.scale))
        fate = Fate.USED if writes_back(optimizer) else Fate.OPAQUE
        window.mark(params_with_grad(optimizer), left, fate)

    def _step_with_scaler(
        self, optimizer: Optimizer, window: Window, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Steps an optimizer of the older contract, which asks the scaler for everything itself."""
        warnings.warn(
            "torch deprecated optimizers whose step() takes grad_scaler. Read the attributes "
            "grad_scale and found_inf instead.",
            FutureWarning,
            stacklevel=3,
        )
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        self._finish(optimizer, window, self._found(self._found_inf_per_device(optimizer)))
        return result

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Steps with one scale for every evaluation of `closure`, wholly or not at all."""
        if self._stage(optimizer) is OptState.STEPPED:
            self._use(optimizer, "step", ())  # says what is wrong
        window = self._pending()
        if window is not None and self._stage(optimizer) is OptState.UNSCALED:
            self._recheck(optimizer, window)
        elif window is not None and not window.closed and not window.used_by(optimizer):
            if params_with_grad(optimizer):
                self.unscale_(optimizer)  # gradients from before the step, as SAM wants them
        ready = self._stage(optimizer) is OptState.UNSCALED
        run = ClosureStep(self, optimizer, closure, ready)
        result = None if ready and bool(self._skipped(optimizer)) else run.step(args, kwargs)
        if run.reading is not None:
            self._record(optimizer, run.reading, OptState.UNSCALED)
        window = self._use(optimizer, "step", (OptState.UNSCALED,))
        window.mark(params_with_grad(optimizer))
        self._finish(optimizer, window, self._skipped(optimizer))
        return result

    def _finish(self, optimizer: Optimizer, window: Window, skipped: Tensor) -> None:
        """Ends the step of `optimizer`, and says what became of it."""
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        window.use(optimizer)
        yes = torch.ones_like(skipped)
        outcome = StepOutcome(
            applied=~skipped,
            finite=~self._found(self._found_inf_per_device(optimizer)),
            fits=self._fits.get(id(optimizer), yes),
            loss_finite=yes if window.loss_finite is None else window.loss_finite,
            scale=window.scale,
        )
        self._tell(optimizer, outcome)
        self._skips.append((weakref.ref(optimizer), window, skipped))

    def _tell(self, optimizer: Optimizer, outcome: StepOutcome) -> None:
        """Keeps `outcome` for whoever asks, as long as `optimizer` lives."""
        key, outcomes = id(optimizer), self._outcomes
        outcomes[key] = (weakref.ref(optimizer, lambda _: outcomes.pop(key, None)), outcome)
        self._last_outcome = outcome

    def outcome(self, optimizer: Optimizer | None = None) -> StepOutcome:
        """What became of the last step, of `optimizer` or of any."""
        outcome = self._last_outcome
        if optimizer is not None:
            outcome = self._outcomes.get(id(optimizer), (None, None))[1]
        if outcome is None:
            raise CallOrderError(
                "outcome() was called before step(). Call scaler.step(optimizer) first."
            )
        return outcome

    # Moving the scale.

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale by the policy, or to `new_scale`, and ends the iteration.

        Gradients of the open window keep the scale they were made with. Bad gradients of skipped
        steps are cleared.
        """
        if not self._enabled:
            return
        self._live("update()")
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            found = self._all_found()
            if found:
                finite = ~torch.stack([self._found(flags) for flags in found]).any()
                fits = torch.stack([torch.ones_like(finite), *self._fits.values()]).all()
                self._move(finite, fits, self._pending())
        self._reset()
        for window in {self._window, self._made}:
            if window is not None:
                window.close([ref() for ref in self._seen.values()])
        self._clear_skipped(wait=False)

    def _all_found(self) -> list[dict[torch.device, Tensor]]:
        """What was found for every optimizer that was checked and had gradients."""
        states = self._per_optimizer_states.values()
        found = [state["found_inf_per_device"] for state in states]
        if not any(found) and not any(state["stage"] is OptState.STEPPED for state in states):
            raise CallOrderError(
                "update() was called, but no gradients were checked since the last update(). Call "
                "scaler.step(optimizer) first."
            )
        return [flags for flags in found if flags]

    def __getstate__(self) -> dict[str, Any]:
        pickled = super().__getstate__()
        for name in NOT_SAVED:
            pickled.pop(name)
        return pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def _take_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """The closure among the arguments of `step`, if there is one, and the other arguments."""
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, {k: v for k, v in kwargs.items() if k != "closure"}
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def _warn_no_gradients(optimizer: Optimizer) -> None:
    """Warns the caller of `step()`, with what may be the cause."""
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    warnings.warn(
        f"step() did nothing: 0 of the {total} parameters of this {type(optimizer).__name__} "
        "have a gradient. If that is not meant, is the loss detached, are all parameters "
        "frozen, or was the optimizer built before the model was moved or rebuilt?",
        stacklevel=3,
    )
