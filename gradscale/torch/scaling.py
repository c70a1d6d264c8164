"""The part of the scaler that multiplies and divides: windows, unscaling, clipping.

Each optimizer goes through READY, UNSCALED and STEPPED until `update()`, as in torch, and every
gradient belongs to a window that knows its scale. What is found stays on the device.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.policy import Dynamic
from gradscale.torch.keeper import ScaleKeeper
from gradscale.torch.outcome import StepOutcome
from gradscale.torch.unscale import (
    Reading,
    clear,
    move,
    multiply,
    params_with_grad,
    read,
    read_norm,
    readable,
    unscale,
    values_of,
)
from gradscale.torch.window import Fate, Window

# What belongs to the iterations, and not to the scaler that is saved.
NOT_SAVED = (
    "_per_optimizer_states",
    "_fits",
    "_held",
    "_unscaled_in",
    "_window",
    "_made",
    "_scaled_losses",
    "_seen",
    "_skips",
    "_outcomes",
    "_last_outcome",
    "_last_scaled",
)
# A float16 loss seeds its backward pass in float16, where 2**16 is infinite.
_HALF_LOSS_SCALE = 2.0**15


class Scaling(ScaleKeeper):
    """Losses times the scale, gradients divided by it."""

    _warned_half: bool

    def _begin(self) -> None:
        """Sets up what belongs to the iterations: NOT_SAVED."""
        self._reset()
        self._window: Window | None = None
        """Where the next loss goes, while it is open."""
        self._made: Window | None = None
        """Where the last backward pass came from."""
        self._scaled_losses = 0
        # By id, because an optimizer, or a wrapper of one, need not be hashable.
        self._seen: dict[int, weakref.ref[Optimizer]] = {}
        self._skips: list[tuple[weakref.ref[Optimizer], Window, Tensor]] = []
        self._outcomes: dict[int, tuple[weakref.ref[Optimizer], StepOutcome]] = {}
        self._last_outcome: StepOutcome | None = None
        self._last_scaled: Callable[[], Tensor | None] = _no_tensor

    def _reset(self) -> None:
        """Makes every optimizer READY, with nothing found yet, under torch's names."""
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(
            _refresh_per_optimizer_state
        )
        self._fits: dict[int, Tensor] = {}
        # torch's names key by id(optimizer); holding the optimizer keeps its id from being reused.
        self._held: dict[int, Optimizer] = {}
        self._unscaled_in: dict[int, Window] = {}

    # Scaling.

    def scale(self, outputs: Any) -> Any:
        """`outputs`, a tensor or an iterable of tensors, times the scale of this window."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            window = self._open(outputs)
            scaled = _times(outputs, window.scale)
            if scaled.requires_grad and not _inside_functorch(scaled):
                scaled.register_hook(partial(self._begin_pass, window, outputs.detach()))
            self._last_scaled = weakref.ref(scaled)
            self._scaled_losses += 1
            return scaled
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes | Mapping):
            scaled_items = map(self.scale, outputs)
            if not isinstance(outputs, list | tuple):
                return scaled_items
            # A namedtuple is not made from one iterable.
            return getattr(outputs, "_make", type(outputs))(scaled_items)
        raise ValueError(
            f"scale() takes a tensor or an iterable of tensors, got {type(outputs).__name__}."
        )

    def _begin_pass(self, window: Window, loss: Tensor, _: Tensor) -> None:
        """Called when the backward pass of a scaled `loss` begins: its gradients are `window`'s."""
        window.begin()
        if _losses_tell():
            window.note_loss(loss)
        self._made = window

    def _pending(self) -> Window | None:
        """The window whose gradients are there: of the last backward pass, if one was seen."""
        return self._window if self._made is None else self._made

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Scales `loss`, a tensor or several, and runs its backward pass."""
        scaled = self.scale(loss)
        torch.autograd.backward(scaled if isinstance(scaled, Tensor) else list(scaled), **kwargs)

    def grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`, computed with scaled `outputs` and handed back unscaled.

        For gradient penalties. float16 gradients come back in float32, because unscaled they could
        vanish. Gradients that are not finite count as an overflow in the next `update()`.
        """
        if not self._enabled:
            return torch.autograd.grad(outputs, inputs, **kwargs)
        several = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        scaled = [_times(output, self._open(output).scale) for output in several]
        grads = torch.autograd.grad(scaled, inputs, **kwargs)
        window = self._open(several[0])
        window.note_penalty(grads)
        return tuple(None if g is None else _times(g, window.inv_scale) for g in grads)

    def _open(self, output: Tensor) -> Window:
        """The window that `output` belongs to: the open one, or a new one with the scale of now."""
        if self._state is None:
            self._lazy_init_scale_growth_tracker(output.device)
        window = self._window
        half = output.dtype is torch.float16
        if window is None or window.closed or window.captured != _capturing():
            window = self._renew(half or (window is not None and window.half))
        window.half |= half
        if half and not self._warned_half:
            self._warned_half = True
            warnings.warn(
                "The loss is float16, so its backward pass begins in float16 and the scale can be "
                f"{_HALF_LOSS_SCALE:g} at most. Compute it with loss.float() to lift the limit.",
                stacklevel=3,
            )
        return window

    def _renew(self, half: bool = False) -> Window:
        """A new window with the scale of now, or what a `half` loss can bear."""
        self._clear_skipped(wait=True)
        last = self._pending()
        state = self._live("scale()")
        with torch.inference_mode(False):
            scale = state.scale.clone()
            if half:
                scale.clamp_(max=_HALF_LOSS_SCALE)
                if isinstance(self._policy, Dynamic):
                    # Else it would grow on and on, and take as long to come back.
                    state.scale.clamp_(max=max(_HALF_LOSS_SCALE, self._policy.min_scale))
            before = {} if last is None else last.leftovers()
            self._window = Window(scale, before, _capturing())
        return self._window

    def _clear_skipped(self, wait: bool) -> None:
        """Sets the bad gradients of skipped steps to 0, so that they are not added to.

        Where the host does not know whether a step was skipped, this is put off (`wait=False`)
        until the next loss is scaled: by then the gradients are usually gone.
        """
        later = []
        for ref, window, skipped in self._skips:
            optimizer = ref()
            if optimizer is None or (readable(skipped) and not skipped):
                continue
            if not wait and not readable(skipped):
                later.append((ref, window, skipped))
                continue
            # Where the host knows of the skip, also what a later backward pass added to.
            known = window.known if readable(skipped) else window.still
            params = known(params_with_grad(optimizer))
            clear(values_of(params), skipped)
            window.mark(params, fate=Fate.CLEARED)
        self._skips = later

    # Unscaling.

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of `optimizer` by their scale, in place, for clipping or reading.

        float16 gradients stay float16, so small values can vanish by that, as they can in `step()`
        of an optimizer that does not unscale by itself.
        """
        if not self._enabled:
            return
        window = self._use(optimizer, "unscale_", (OptState.READY,))
        self._unscale(optimizer, window)

    def _use(self, optimizer: Optimizer, call: str, stages: Sequence[OptState]) -> Window:
        """The window whose gradients `optimizer` may use now; a CallOrderError if there is none."""
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
        if _capturing() and (window is None or not window.captured):
            window = self._made = self._renew()
        elif window is None or (
            stage is OptState.READY
            and not window.captured
            and (window.closed or window.used_by(optimizer))
        ):
            params = params_with_grad(optimizer)
            had = window is not None and window.used_by(optimizer)
            nothing_new = window is not None and len(window.had(params)) == len(params)
            if nothing_new and (params or had):
                raise CallOrderError(
                    f"{call}() was called, but there are no new gradients since the last step. "
                    "Call scaler.scale(loss).backward() first."
                )
            if window is None or (had and not window.begun_since(optimizer)):
                window = self._made = self._renew()  # scaled by hand, with get_scale()
        key, seen = id(optimizer), self._seen
        seen[key] = weakref.ref(optimizer, lambda _: seen.pop(key, None))
        self._held[key] = optimizer
        return window

    def _stage(self, optimizer: Optimizer) -> OptState:
        """Where `optimizer` stands in this iteration."""
        states = self._per_optimizer_states  # a defaultdict: only looking must not make an entry
        return states[id(optimizer)]["stage"] if id(optimizer) in states else OptState.READY

    def _unscale(self, optimizer: Optimizer, window: Window) -> None:
        """Unscales in place and records what was found."""
        params = params_with_grad(optimizer)
        fresh, other = window.split(params)
        self._record(optimizer, unscale(values_of(fresh), window.inv_scale), OptState.UNSCALED)
        if other:
            one = torch.ones_like(window.scale)
            for param, mark in other:
                left = one if mark.left is None else mark.left
                self._record(optimizer, unscale(values_of([param]), left), OptState.UNSCALED)
        self._mark_unscaled(optimizer, window, params)

    def _record(self, optimizer: Optimizer, reading: Reading, stage: OptState) -> None:
        """Adds `reading` to what is known of the gradients of `optimizer` in this iteration."""
        state = self._per_optimizer_states[id(optimizer)]
        found = state["found_inf_per_device"]
        for device, flag in reading.found_inf.items():
            found[device] = torch.maximum(found[device], flag) if device in found else flag
        fits = self._fits.get(id(optimizer))
        self._fits[id(optimizer)] = reading.fits if fits is None else fits & reading.fits
        state["stage"] = stage

    def _recheck(self, optimizer: Optimizer, window: Window) -> None:
        """Reads unscaled gradients again if they may have been edited since.

        Gradients that a backward pass has made since, in place of the unscaled ones, are scaled.
        """
        params = params_with_grad(optimizer)
        then = self._unscaled_in.get(id(optimizer), window)
        if then is window and not window.edited(params):
            return
        if then is not window or window.begun_since(optimizer):
            made = unscale(values_of(then.fresh(params)), window.inv_scale)
            self._record(optimizer, made, OptState.UNSCALED)
        if not self._found_inf_per_device(optimizer):
            raise CallOrderError(
                "The gradients of this optimizer appeared after its unscale_(), which found none. "
                "Call unscale_() after the backward pass, or leave it to step()."
            )
        self._record_edit(optimizer, read(values_of(params), torch.ones_like(window.scale)))
        self._mark_unscaled(optimizer, window, params)

    def _mark_unscaled(self, optimizer: Optimizer, window: Window, params: list[Tensor]) -> None:
        """Remembers that `optimizer` has the gradients of `window` now, unscaled."""
        self._unscaled_in[id(optimizer)] = window
        window.use(optimizer)
        window.mark(params)

    def _record_edit(self, optimizer: Optimizer, reading: Reading) -> None:
        """Adds a `reading` of unscaled gradients: what is not finite only now does not fit."""
        before = self._found(self._found_inf_per_device(optimizer))
        spoilt = self._found(reading.found_inf) & ~before
        self._record(optimizer, Reading({}, reading.fits & ~spoilt), OptState.UNSCALED)

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """The 2-norm of the unscaled gradients, after unscaling and clipping them in place.

        Does what `unscale_` and `torch.nn.utils.clip_grad_norm_` do together, in fewer passes over
        memory, and `step()` then does not read the gradients again. The norm is NaN if the step is
        going to be skipped.
        """
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
        values = values_of(params)
        reading, norm = read_norm(values, inv_scale)
        if stage is OptState.READY:
            self._record(optimizer, reading, OptState.UNSCALED)
        else:
            self._record_edit(optimizer, reading)
        skipped = self._skipped(optimizer)
        # In two steps, because the scaled norm may overflow where the unscaled one does not.
        half = norm.shift.sqrt()
        total = norm.root / half * inv_scale / half
        clipping = torch.where(
            torch.isfinite(total),
            inv_scale * torch.clamp(max_norm / (total + 1e-6), max=1.0),
            torch.minimum(inv_scale, max_norm * (norm.shift / norm.root)),
        )
        multiply(values, torch.where(skipped, inv_scale, clipping))
        self._mark_unscaled(optimizer, window, params)
        return torch.where(skipped, math.nan, total)

    def _skipped(self, optimizer: Optimizer) -> Tensor:
        """bool, on the device of the scale: the step of `optimizer` must not take place."""
        return self._found(self._found_inf_per_device(optimizer)) | ~self._fits[id(optimizer)]

    def _found(self, found_inf: Mapping[torch.device, Tensor]) -> Tensor:
        """bool, on the device of the scale: something is not finite on some device."""
        scale = self._live("step()").scale
        found = torch.zeros_like(scale, dtype=torch.bool)
        for flag in found_inf.values():
            found = found | (move(flag, scale.device) > 0)
        return found

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

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]


def _no_tensor() -> None:
    """What a dead reference would say."""


def _times(value: Tensor, factor: Tensor) -> Tensor:
    """`value` times the float32 `factor`, in float32 where `value` is float16."""
    wide = value.float() if value.dtype is torch.float16 else value
    return wide * move(factor, value.device)


def _inside_functorch(value: Tensor) -> bool:
    """Whether `value` lives in a torch.func transform, which must not leak out of it."""
    # Dynamo cannot trace the question, and has its own answer.
    return not torch.compiler.is_compiling() and bool(
        torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _losses_tell() -> bool:
    """Whether a non-finite loss spares the scale: not where other ranks may have a finite one."""
    distributed = torch.distributed
    alone = not (distributed.is_available() and distributed.is_initialized())
    return alone or distributed.get_world_size() == 1
