"""The part of the scaler that looks at gradients: unscaling, rechecking, clipping.

What is found stays on the device, in torch's `found_inf_per_device` and beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.formats import Format
from gradscale.policy.histogram import EDGE
from gradscale.torch import compiled
from gradscale.torch.agree import part_of_norm
from gradscale.torch.kernels import capturing
from gradscale.torch.losses import weigh_up
from gradscale.torch.outcome import Blame, culprits
from gradscale.torch.settling import Settling
from gradscale.torch.unscale import (
    Gradients,
    Reading,
    count_bad,
    finite_amax,
    gradients_of,
    move,
    multiply,
    norm_of,
    params_with_grad,
    read,
    read_norm,
    readable,
    share_above,
    underflow,
    unscale,
    values_of,
)
from gradscale.torch.window import Window


class Checking(Settling):
    """Gradients divided by their scale, and what they were like."""

    _format: Format
    _underflow_every: int

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by their scale, in place, for clipping or reading.

        float16 gradients stay float16, so small values can vanish by that, as they can in `step()`
        of an optimizer that does not unscale by itself.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "unscale_", optimizer)
        if not self._enabled:
            return None
        window = self._use(optimizer, "unscale_", (OptState.READY,))
        self._unscale(optimizer, window)

    def _use(self, optimizer: Optimizer, call: str, stages: Sequence[OptState]) -> Window:
        """The window whose gradients `optimizer` may use now; a CallOrderError if there is none."""
        if not hasattr(optimizer, "param_groups"):
            raise SettingError(f"{call}() takes an optimizer, got {type(optimizer).__name__}.")
        key = id(optimizer)
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._groups[key] = groups = self._agreement.among(everything)
        if groups and self._state is None:  # others have the loss: later stages, or who has data
            self._lazy_init_scale_growth_tracker(everything[0].device)
        self._live(f"{call}()")
        stage = self._stage(optimizer)
        if stage is OptState.STEPPED:
            raise CallOrderError(
                f"{call}() was called after step() for the same optimizer. Call update() once per "
                "iteration, after the last step()."
            )
        if stage not in stages:
            raise CallOrderError(
                f"{call}() was called twice for the same optimizer: the gradients are unscaled "
                "already. Call step() and update() before the next one."
            )
        window = self._pending()
        if capturing() and (window is None or not window.captured):
            window = self._made = self._renew()
        elif window is None or (
            stage is OptState.READY
            and not window.captured
            and (window.closed or window.used_by(optimizer))
        ):
            params = params_with_grad(optimizer)
            had = window is not None and window.used_by(optimizer)
            nothing_new = window is not None and len(window.had(params)) == len(params)
            idle = bool(groups) and not params  # others may have gradients
            if nothing_new and (params or had) and not idle:
                raise CallOrderError(
                    f"{call}() was called, but there are no new gradients since the last step. "
                    "Call scaler.backward(loss) or scaler.scale(loss).backward() first."
                )
            # Another stage may have the loss: then what nobody has seen before is of now.
            staged = any(group.shards for group in groups) and window is not None and window.closed
            fresh = staged and not window.still(params)  # type: ignore[union-attr]
            if window is None or fresh or (had and not window.begun_since(optimizer)):
                # Scaled by hand, with get_scale(), or zeros, or by others.
                window = self._made = self._renew(window is not None and window.half)
                amax = None if groups else read(values_of(params), window.inv_scale).amax
                window.blank = None if amax is None else amax == 0
        self._watch(optimizer)
        self._held[key] = optimizer
        if window.spared:
            weigh_up(params_with_grad(optimizer), window)
        if not groups and self._agreement.is_unknown():
            window.loss_finite = None  # one rank's NaN loss may be every rank's NaN gradient
        return window

    def _stage(self, optimizer: Optimizer) -> OptState:
        """Where `optimizer` stands in this iteration."""
        states = self._per_optimizer_states  # a defaultdict: only looking must not make an entry
        return states[id(optimizer)]["stage"] if id(optimizer) in states else OptState.READY

    def _unscale(self, optimizer: Optimizer, window: Window, measure: bool = True) -> None:
        """Unscales in place and records what was found."""
        params = params_with_grad(optimizer)
        fresh, other = window.split(params)
        values = gradients_of(fresh)
        if measure:
            self._measure_underflow([optimizer], values, window)
        reading = unscale(values, window.inv_scale, amax=self._goes_by_amax())
        self._record(optimizer, reading, OptState.UNSCALED)
        if other:
            one = torch.ones_like(window.scale)
            for param, mark in other:
                left = one if mark.left is None else mark.left
                self._record(optimizer, unscale(values_of([param]), left), OptState.UNSCALED)
        self._mark_unscaled(optimizer, window, params)
        if readable(window.scale) and self._skipped(optimizer):
            # Clipping may turn one infinity into NaN everywhere, so look before it does.
            self._measured[id(optimizer)].blame = self._look([optimizer], window, unscaled=True)

    def _look(self, optimizers: Sequence[Optimizer], window: Window, unscaled: bool) -> Blame:
        """What the gradients of `optimizers` say, looked at one by one."""
        params = {id(p): p for o in optimizers for p in params_with_grad(o)}
        bad = count_bad(params.values(), None if unscaled else window.inv_scale)
        for own in window.losses.values():
            bad |= {key: counts for key, counts in own.bad.items() if key in params}
        amax = finite_amax(params.values()) * (float(window.scale) if unscaled else 1.0)
        return Blame(culprits(self._names.of(optimizers), bad), amax)

    def _record(self, optimizer: Optimizer, reading: Reading, stage: OptState) -> None:
        """Adds `reading` to what is known of the gradients of `optimizer` in this iteration."""
        state = self._per_optimizer_states[id(optimizer)]
        found = state["found_inf_per_device"]
        for device, flag in reading.found_inf.items():
            found[device] = torch.maximum(found[device], flag) if device in found else flag
        fits = self._fits.get(id(optimizer))
        self._fits[id(optimizer)] = reading.fits if fits is None else fits & reading.fits
        # The first reading is that of the window's own gradients; what follows, of gradients that
        # another optimizer has had or somebody has edited, has another scale in it.
        measured = self._measured[id(optimizer)]
        if measured.amax is None:
            measured.amax, measured.finite_amax = reading.amax, reading.finite_amax
        measured.peaks = (reading.peaks or {}) | measured.peaks
        measured.counts = (reading.counts or {}) | measured.counts
        state["stage"] = stage

    def _measure_underflow(
        self, optimizers: Sequence[Optimizer], values: Gradients, window: Window
    ) -> None:
        """Measures what scaled `values` underflow, if asked for, and what the policy goes by."""
        if self._underflow_is_due(optimizers):
            share = underflow(values, self._format.smallest_normal, window.scale)
            for optimizer in optimizers:
                self._measured[id(optimizer)].underflow = share
        if "upper" in self._policy.goes_by:
            there = {id(p): p for one in optimizers for p in params_with_grad(one)}
            share = share_above(values_of(there.values()), self._format.max * EDGE, window.scale)
            for optimizer in optimizers:
                self._measured[id(optimizer)].upper = share

    def _goes_by_amax(self) -> bool:
        """Whether the policy must be told the largest magnitude."""
        return "amax" in self._policy.goes_by

    def _sizes(self, window: Window | None) -> dict[str, Tensor]:
        """What the policy goes by besides flags, of all gradients of this iteration together."""
        if not self._policy.goes_by:
            return {}
        scale = self._live("update()").scale
        found = [m for m in self._measured.values() if m.amax is not None]
        if not found:
            return self._sizes_of(torch.zeros_like(scale))
        amax = torch.stack([move(one.amax, scale.device) for one in found]).amax()  # type: ignore[arg-type]
        if window is not None:  # the scale that they have may not be the one that moves
            amax = amax * (scale / move(window.scale, scale.device))
        upper = [move(one.upper, scale.device) for one in found if one.upper is not None]
        return self._sizes_of(amax, torch.stack(upper).amax() if upper else None)

    def _underflow_is_due(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether this step of `optimizers` should measure what underflows; counts it."""
        if not self._underflow_every:
            return False
        looks = self._looks.get(optimizers[0]) or 0
        for optimizer in optimizers:
            self._looks.set(optimizer, looks + 1)
        return looks % self._underflow_every == 0

    def _recheck(self, optimizer: Optimizer, window: Window) -> None:
        """Reads unscaled gradients again if they may have been edited since.

        Gradients that a backward pass has made since, in place of the unscaled ones, are scaled.
        """
        params = params_with_grad(optimizer)
        then = self._unscaled_in.get(id(optimizer), window)
        if then is window and not window.edited(params):
            return
        if then is not window or window.begun_since(optimizer):
            made = unscale(gradients_of(then.fresh(params)), window.inv_scale)
            self._record(optimizer, made, OptState.UNSCALED)
        if not self._found_inf_per_device(optimizer):
            raise CallOrderError(
                "The gradients of this optimizer appeared after its unscale_(), which found none. "
                "Call unscale_() after the backward pass, or leave it to step()."
            )
        self._record_edit(optimizer, read(gradients_of(params), torch.ones_like(window.scale)))
        self._mark_unscaled(optimizer, window, params)

    def _mark_unscaled(self, optimizer: Optimizer, window: Window, params: list[Tensor]) -> None:
        """Remembers that `optimizer` has the gradients of `window` now, unscaled."""
        self._unscaled_in[id(optimizer)] = window
        window.use(optimizer)
        window.mark(params)

    def _record_edit(self, optimizer: Optimizer, reading: Reading) -> None:
        """Adds a `reading` of unscaled gradients: what is not finite only now does not fit."""
        # For flags, "greater" is "and not": one operation instead of two.
        before = self._found(self._found_inf_per_device(optimizer))
        spoilt = self._found(reading.found_inf) > before
        measured = self._measured[id(optimizer)]
        measured.edited |= reading.peaks or {}
        measured.edited_counts |= reading.counts or {}
        self._record(optimizer, Reading({}, reading.fits > spoilt), OptState.UNSCALED)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """The 2-norm of the unscaled gradients, after unscaling and clipping them in place.

        Does what `unscale_` and `torch.nn.utils.clip_grad_norm_` do together, in fewer passes over
        memory, and `step()` then does not read the gradients again. The norm is NaN if the step is
        going to be skipped.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "clip_grad_norm_", optimizer, max_norm)
        if not max_norm > 0:
            raise SettingError(f"max_norm must be > 0, got {max_norm}.")
        params = params_with_grad(optimizer)
        if not self._enabled:
            return torch.nn.utils.clip_grad_norm_(params, max_norm)
        window = self._use(optimizer, "clip_grad_norm_", (OptState.READY, OptState.UNSCALED))
        stage = self._stage(optimizer)
        if stage is OptState.UNSCALED:
            self._recheck(optimizer, window)
        elif window.split(params)[1]:
            self._unscale(optimizer, window)
            stage = OptState.UNSCALED
        inv_scale = window.inv_scale if stage is OptState.READY else torch.ones_like(window.scale)
        values = gradients_of(params)
        if stage is OptState.READY:
            self._measure_underflow([optimizer], values, window)
        reading, norm = read_norm(values, inv_scale, max_norm, amax=self._goes_by_amax())
        if stage is OptState.READY:
            self._record(optimizer, reading, OptState.UNSCALED)
        else:
            self._record_edit(optimizer, reading)
        groups = self._groups[id(optimizer)]
        if groups:
            part = part_of_norm(params, groups, norm.total, inv_scale)
            whole = self._settle([optimizer], window, part)
            norm = norm_of(whole, inv_scale, max_norm)  # type: ignore[arg-type]
        skipped = self._skipped(optimizer)
        multiply(values, torch.where(skipped, inv_scale, norm.factor))
        self._mark_unscaled(optimizer, window, params)
        total = torch.where(skipped, math.nan, norm.total)
        self._measured[id(optimizer)].grad_norm = total
        return total

    def _skipped(self, optimizer: Optimizer) -> Tensor:
        """bool, on the device of the scale: the step of `optimizer` must not take place."""
        fits, window = self._fits[id(optimizer)], self._pending()
        flags = list(self._found_inf_per_device(optimizer).values())
        plain = window is None or not (window.losses or window.spared or self._held_back)
        if len(flags) == 1 and flags[0].device == fits.device and plain:
            return fits <= flags[0]
        return ~(self._finite(optimizer) & fits)

    def _finite(self, optimizer: Optimizer) -> Tensor:
        """bool, on the device of the scale: all gradients of `optimizer` were finite."""
        finite = ~self._found(self._found_inf_per_device(optimizer))
        window = self._pending()
        for own in window.losses.values() if window is not None else ():
            if own.reaches(optimizer):
                finite = finite & own.finite
        if id(optimizer) in self._held_back:  # by another rank, which such a loss reached
            finite = finite & ~self._held_back[id(optimizer)]
        if window is not None and window.dropped is not None:
            finite = finite & (window.dropped < window.spared)
        return finite

    # torch's private names.

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients of `optimizer` by `inv_scale`; torch's helper."""
        return unscale(values_of(params_with_grad(optimizer)), inv_scale.reshape(())).found_inf

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """float32 flags of what is not finite, per device, without unscaling."""
        window = self._use(optimizer, "_check_inf_per_device", (OptState.READY, OptState.UNSCALED))
        reading = read(values_of(params_with_grad(optimizer)), window.inv_scale)
        self._record(optimizer, reading, self._stage(optimizer))
        return self._found_inf_per_device(optimizer)
