"""One object for the whole of mixed precision, and steps that are tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.applying import check_limits
from gradscale.torch.moment import Moment
from gradscale.torch.outcome import StepOutcome
from gradscale.torch.precision.steps import Steps


class MixedPrecision(Steps):
    """Trains models in a format, with the loop that cannot be got wrong.

        mp = MixedPrecision(model, AdamW(model.parameters(), lr=3e-4), "fp16")
        for batch in data:
            with mp.autocast():
                loss = loss_fn(model, batch)
            mp.backward(loss)
            outcome = mp.step(clip_norm=1.0)

    or, where a batch is precious, `outcome = mp.run(lambda: loss_fn(model, batch))`.

    Modes, all with the same guard against gradients that are not finite, and the same outcome:

    | mode | passes | weights | masters |
    |---|---|---|---|
    | "fp32", "O0" | float32 | float32 | |
    | "bf16" | bfloat16, autocast | float32 | |
    | "fp16", "O1" | float16, autocast | float32 | |
    | "bf16-master" | bfloat16 | bfloat16 | float32 |
    | "fp16-master", "O2" | float16 | float16 | float32 |
    | "fp16-pure", "O3" | float16 | float16 | 16 bits that rounding has cut off |

    Args:
        model: The model, or several, where they will be trained. Wrap it in DDP afterwards if the
            mode casts weights. It stays the same object.
        optimizer: The optimizer, or several; any of torch's, or ours, which take fewer passes.
        mode: One of the above.
        policy: What moves the scale: `Headroom()` in float16, else `Static()` at 1.
        keep_float32: Modules that stay in float32, besides norms: names with wildcards, modules,
            classes.
        settings: Those of `GradScaler` that are no torch's, such as `on_stuck`.
    """

    def run(
        self,
        closure: Callable[[], Any],
        *,
        retries: int = 2,
        accumulate: int = 1,
        drop: str = "window",
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> StepOutcome:
        """What became of a step that is computed again, at a lower scale, if it overflows.

            outcome = mp.run(lambda: loss_fn(model, batch), clip_norm=1.0)

        The same batch is computed again with the random state of torch and Python and the buffers
        of the models put back, so dropout repeats and batch norms count once. A loss that is not
        finite is not tried again: no scale can help it. `outcome.loss` is what `closure` returned,
        `outcome.earlier` what became of the tries before; `mp.retries` counts them all.

        **Waits for the device** once for every try.

        Args:
            closure: Computes the loss and returns it; several micro-batches as an iterable of
                losses, best from a generator, which are computed again all together. Runs under
                `autocast()`. Take the batch from the data before, not within.
            retries: How often to try again, at most.
            accumulate: How many losses there are, if several: see `accumulate()`.
            drop: See `accumulate()`.
            clip_norm: See `step()`.
            clip_value: See `step()`.
        """
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise SettingError(f"retries must be a whole number >= 0, got {retries!r}.")
        check_limits(clip_norm, clip_value)
        if any(param.grad is not None for _, param in self._trained()):
            raise CallOrderError(
                "run() was called with gradients there, which a retry would lose. Call step() or "
                "zero_grad() first, or let the closure return all losses of the step."
            )
        moment = Moment(self.models)
        earlier: list[StepOutcome] = []
        while True:
            try:
                made = self._compute(closure, accumulate, drop)
            except BaseException:
                self.zero_grad()
                moment.restore()
                raise
            outcome = self.step(clip_norm=clip_norm, clip_value=clip_value)
            outcome.with_(loss=made, earlier=tuple(earlier))
            if outcome.applied or len(earlier) == retries or not self._has_fallen(outcome):
                return outcome
            earlier.append(outcome)
            self.retries += 1
            moment.restore()

    def _compute(self, closure: Callable[[], Any], passes: int, drop: str) -> Any:
        """What `closure` returned, after the backward passes of its losses."""
        with ExitStack() as stack:
            stack.enter_context(self.accumulate(passes, drop=drop))
            with self.autocast():
                made = closure()
            if not isinstance(made, Iterable):  # a tensor is one, too
                what = type(made).__name__
                raise SettingError(f"closure must return the loss, got {what}. Does it say return?")
            if isinstance(made, Tensor):
                self.backward(made)
                return made.detach()
            losses: list[Tensor] = []
            remaining = iter(made)
            while True:
                with self.autocast():
                    loss = next(remaining, None)
                if loss is None:
                    return losses
                self.backward(loss)
                losses.append(loss.detach())

    def _has_fallen(self, outcome: StepOutcome) -> bool:
        """Whether the scale is lower than in `outcome`, which was skipped; lowers it if it can."""
        if not outcome.loss_finite or outcome.finite:
            return False
        if any(not finite for finite, _ in outcome._own):
            return True
        return self.scaler._lower(float(outcome.scale))
