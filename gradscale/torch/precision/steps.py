"""Steps in a format: backward passes, accumulation, the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.applying import check_limits
from gradscale.torch.contract import as_optimizers
from gradscale.torch.master.masters import Masters
from gradscale.torch.outcome import StepOutcome
from gradscale.torch.precision.models import Models

DROPS = ("window", "micro")


class Steps(Models):
    """Backward passes and steps."""

    _share: _Share | None = None
    """The part that each backward pass has in the step, within `accumulate()`."""

    def autocast(self) -> torch.autocast:
        """A context in which operations run in the format of the mode."""
        dtype = self.mode.dtype
        on = dtype is not torch.float32
        return torch.autocast(self._device, dtype=dtype if on else None, enabled=on)

    def backward(self, loss: Any, **settings: Any) -> None:
        """Scales `loss`, a tensor or several, and runs its backward pass.

        Call it as often as you like before a step: gradients add up. Within `accumulate()` the loss
        is divided. `settings` are those of `GradScaler.backward`.
        """
        share = self._share
        if share is not None:
            loss = share.take(loss)
            settings = {"spare": share.drop == "micro", **settings}
        self.scaler.backward(loss, **settings)

    @contextmanager
    def accumulate(self, passes: int, *, drop: str = "window") -> Iterator[None]:
        """Within, `passes` backward passes make the gradients of one step, which is their mean.

            with mp.accumulate(4):
                for micro in batch:
                    mp.backward(loss_fn(model, micro))
            outcome = mp.step()

        Args:
            passes: How many there will be; losses are divided by it.
            drop: What a pass with gradients that are not finite costs: the whole "window", or the
                "micro" batch alone. Then the others are weighted up, `outcome.dropped` says how
                many were left out, and every pass takes one more copy of the gradients.
        """
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            raise SettingError(f"passes must be a whole number > 0, got {passes!r}.")
        if drop not in DROPS:
            raise SettingError(f"drop must be one of {', '.join(DROPS)}, got {drop!r}.")
        if self._share is not None:
            raise CallOrderError("accumulate() was called within accumulate(). Leave one out.")
        share = self._share = _Share(passes, drop)
        try:
            yield
            if share.taken < passes:
                raise CallOrderError(
                    f"accumulate({passes}) saw {share.taken} backward passes, so their mean would "
                    "be too small, and their gradients are cleared. Give it the number that there "
                    "are."
                )
        except BaseException:
            self.zero_grad()
            raise
        finally:
            self._share = None

    def step(
        self,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> StepOutcome:
        """What became of the step, after unscaling, clipping, stepping or skipping, and clearing.

        Args:
            optimizer: Which of several to step; without it all of them, together.
            clip_norm: The largest 2-norm that all gradients together may have.
            clip_value: The largest magnitude that an element may have; taken before `clip_norm`.
            closure: For LBFGS and the like: computes the loss, calls `mp.backward(loss)` and
                returns the loss.
        """
        if self._share is not None:
            raise CallOrderError("step() was called within accumulate(). Call it after the block.")
        several = self.optimizers if optimizer is None else as_optimizers(optimizer, "step()")
        strange = [type(each).__name__ for each in several if id(each) not in self._masters]
        if strange:
            raise SettingError(
                f"step() takes the optimizers that MixedPrecision was made with, got {strange[0]}."
            )
        check_limits(clip_norm, clip_value)
        masters = [own for each in several if (own := self._masters[id(each)]) is not None]
        with ExitStack() as stack:
            for own in masters:
                if closure is None:
                    self._gather(own)
                else:
                    own.make_all()
                for weight, stand in own.pairs():
                    self.scaler._names.stand_in(weight, stand)
                stack.enter_context(own.in_place())
            if closure is not None and masters:
                closure = masters[0].around(closure)
            return self.scaler.apply(
                several, clip_norm=clip_norm, clip_value=clip_value, closure=closure
            )

    def _gather(self, masters: Masters) -> None:
        """Moves gradients to `masters`, those that were left by an earlier step at today's scale.

        Raises:
            CallOrderError: gradients of different scales were added up, which nothing can undo.
        """
        window = self.scaler._pending()
        if window is None:
            masters.gather()
            return
        _, other = window.split(masters.with_grad())
        masters.gather()
        left = {id(weight): mark.left for weight, mark in other}
        for weight, stand in masters.pairs():
            if id(weight) in left and stand.grad is not None:
                rest = left[id(weight)]
                stand.grad.mul_(window.scale if rest is None else rest * window.scale)

    def grad(self, outputs: Any, inputs: Any, **settings: Any) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`, computed with scaled `outputs` and handed back unscaled."""
        return self.scaler.grad(outputs, inputs, **settings)

    def zero_grad(self) -> None:
        """Clears all gradients, and forgets the losses that made them."""
        for optimizer in self.optimizers:
            masters = self._masters[id(optimizer)]
            if masters is not None:
                masters.zero_grad()
            optimizer.zero_grad()
        self.scaler._abandon()

    def follow(self, *things: Any, **settings: Any) -> None:
        """Steps schedulers, averages, counters after applied steps alone: `GradScaler.follow`.

        What has a state is saved in `state_dict()`.
        """
        self.scaler.follow(*things, **settings)
        self._followed += [each for each in things if hasattr(each, "load_state_dict")]

    def calibrate(self, closure: Callable[[], Tensor]) -> float:
        """The scale that suits the gradients of `closure`: `GradScaler.calibrate`.

        Runs under `autocast()`; nothing is stepped, and all is put back.
        """

        def cast() -> Tensor:
            with self.autocast():
                return closure()

        return self.scaler.calibrate(cast, self.optimizers, nn.ModuleList(self.models))

    def name(self, model: nn.Module) -> None:
        """Takes over the process groups of a model that was wrapped in DDP afterwards."""
        self.scaler.name(model)

    def flush(self) -> None:
        """Tells and calls everything that is still due; **waits for the device**."""
        self.scaler.flush()


class _Share:
    """The part of a step that each backward pass within `accumulate()` makes."""

    def __init__(self, passes: int, drop: str) -> None:
        self.passes, self.drop, self.taken = passes, drop, 0

    def take(self, loss: Any) -> Any:
        """`loss`, or several, divided."""
        if self.taken == self.passes:
            raise CallOrderError(
                f"accumulate({self.passes}) has had {self.passes} backward passes, and this is one "
                "more. Call step() after the block."
            )
        self.taken += 1
        if self.passes == 1:
            return loss
        if isinstance(loss, Tensor):
            return loss / self.passes
        return [one / self.passes for one in loss]
