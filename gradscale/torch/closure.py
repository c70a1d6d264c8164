"""Steps with a closure: LBFGS, line searches, SAM.

Every evaluation sees unscaled gradients and the unscaled loss, and all of them one scale. Such a
step moves the parameters between evaluations, so it is taken wholly or not at all: a snapshot
undoes it when an evaluation overflows. That costs a copy of the parameters and of the optimizer's
state, and it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradscale.errors import CallOrderError
from gradscale.torch.telling import largest
from gradscale.torch.unscale import (
    Reading,
    grouped,
    params_with_grad,
    read,
    unscale,
    values_of,
)

if TYPE_CHECKING:
    from gradscale.torch.stepping import Stepping


class _Undo(Exception):
    """Leaves the optimizer's step in the middle."""


class ClosureStep:
    """One step of `optimizer` with `closure`."""

    def __init__(
        self,
        scaler: Stepping,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        ready: bool,
        edit: Callable[[], None] | None = None,
    ) -> None:
        self.reading: Reading | None = None
        """What the last evaluation's gradients said; None if the closure was never called."""
        self._scaler = scaler
        self._optimizer = optimizer
        self._closure = closure
        self._ready = ready
        """Whether there were gradients before the step, so that it need not evaluate."""
        self._edit = edit
        """What changes the unscaled gradients after every evaluation, say by clipping."""
        self._evaluations = 0

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the optimizer's `step` returned; None, with nothing changed, if it was undone."""
        undo = _snapshot(self._optimizer)
        try:
            result = self._optimizer.step(self._evaluate, *args, **kwargs)
            if self.reading is None and not self._ready:
                raise CallOrderError(
                    "The optimizer never called the closure, and there were no scaled gradients "
                    "before step(). Call scaler.scale(loss).backward() first."
                )
            if not self._parameters_finite():
                raise _Undo
        except _Undo:
            undo()
            if self.reading is not None:
                # Not applied, whatever the gradients of the last evaluation were like.
                self.reading = self.reading._replace(fits=torch.zeros_like(self.reading.fits))
            return None
        except BaseException:
            undo()
            raise
        return result

    def _evaluate(self) -> Any:
        """The closure's unscaled loss, with the gradients unscaled."""
        scaler, optimizer = self._scaler, self._optimizer
        before = scaler._pending()
        if before is not None:
            # A closure clears its gradients, or else it would add to those of its last evaluation:
            # what comes back is scaled.
            before.forget(p for g in optimizer.param_groups for p in g["params"])
        scaled_before = scaler._scaled_losses
        loss = self._closure()
        window = scaler._pending()
        if window is None or scaler._scaled_losses == scaled_before:
            raise CallOrderError(
                "The closure ran without scaling its loss. In the closure, call "
                "scaler.backward(loss) instead of loss.backward(), and return the loss."
            )
        if loss is None or scaler._last_scaled() is loss:
            what = "nothing" if loss is None else "the scaled loss"
            raise CallOrderError(f"The closure returned {what}. Return the loss itself, unscaled.")
        self._evaluations += 1
        values = values_of(params_with_grad(optimizer))
        self.reading = unscale(values, window.inv_scale, amax=scaler._goes_by_amax())
        found = any(map(bool, self.reading.found_inf.values()))
        # A loss with a scale of its own that overflowed has left zeros behind.
        found |= any(not own.finite for own in window.losses.values() if own.reaches(optimizer))
        loss_finite = bool(torch.isfinite(torch.as_tensor(loss)).all())
        fits = bool(self.reading.fits)
        found, bad_loss, unfit = self.anywhere(found, not loss_finite, not fits)
        loss_finite = not bad_loss
        if loss_finite and not found and not unfit:
            if self._edit is not None:
                self._edit()
            return loss
        if loss_finite or self._evaluations == 1:
            raise _Undo
        # A trial step that went too far. As infinity the line search rejects it; NaN compares false
        # with everything.
        return torch.full_like(loss, torch.inf) if isinstance(loss, Tensor) else torch.inf

    def anywhere(self, *flags: bool) -> list[bool]:
        """Which of `flags` are up on any rank that must agree."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        groups = self._scaler._agreement.among(params)
        if not groups:
            return list(flags)
        here = torch.tensor(flags, dtype=torch.float32, device=params[0].device)
        return [bool(flag) for flag in largest(here, groups).tolist()]

    def _parameters_finite(self) -> bool:
        """Whether the step left only finite numbers behind."""
        params = params_with_grad(self._optimizer)  # others were not stepped
        one = torch.ones(())
        bad = any(bool(flag) for flag in read(grouped(params), one).found_inf.values())
        return not self.anywhere(bad)[0]


def _snapshot(optimizer: Optimizer) -> Callable[[], None]:
    """A function that puts back the parameters, state and settings that `optimizer` has now."""
    parts = [_keep(optimizer.param_groups), _keep(optimizer.state)]

    def undo() -> None:
        with torch.no_grad():
            for put_back in parts:
                put_back()

    return undo


def _keep(value: Any) -> Callable[[], Any]:
    """A function that gives `value` back with the contents it has now.

    The very same tensors, dicts and lists: others may hold them, as a user holds the tensor that
    is the learning rate. A tensor subclass is kept by its parts, for not all have a clone().
    """
    put_back: Callable[[], Any]
    if isinstance(value, dict):
        items = {key: _keep(item) for key, item in value.items()}

        def put_back() -> Any:
            contents = {key: item() for key, item in items.items()}
            value.clear()
            value.update(contents)
            return value

    elif isinstance(value, list):
        kept = [_keep(item) for item in value]

        def put_back() -> Any:
            value[:] = [item() for item in kept]
            return value

    elif isinstance(value, tuple) or is_traceable_wrapper_subclass(value):
        parts = (
            value
            if isinstance(value, tuple)
            else [getattr(value, n) for n in value.__tensor_flatten__()[0]]
        )
        kept = [_keep(part) for part in parts]

        def put_back() -> Any:
            for part in kept:
                part()
            return value

    elif isinstance(value, Tensor):
        copy = value.detach().clone()

        def put_back() -> Any:
            value.detach().copy_(copy)
            return value

    else:

        def put_back() -> Any:
            return value

    return put_back
