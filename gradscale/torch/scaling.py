"""The part of the scaler that multiplies: windows, scaled losses, backward passes.

Each optimizer goes through READY, UNSCALED and STEPPED until `update()`, as in torch, and every
gradient belongs to a window that knows its scale.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError, caller_level
from gradscale.policy import State
from gradscale.torch import compiled
from gradscale.torch.agree import Agreement, Group, has_ranks
from gradscale.torch.beside import Beside
from gradscale.torch.keeper import check_loss_id
from gradscale.torch.kernels import capturing
from gradscale.torch.losses import backward_alone, backward_spared
from gradscale.torch.moving import Moving
from gradscale.torch.outcome import Measured, Names, StepOutcome
from gradscale.torch.telling import largest
from gradscale.torch.ties import ScalerTie
from gradscale.torch.unscale import clear, params_with_grad, readable, times, values_of
from gradscale.torch.window import Fate, Window

# What belongs to the iterations, and not to the scaler that is saved.
NOT_SAVED = (
    "_per_optimizer_states",
    "_fits",
    "_measured",
    "_held",
    "_unscaled_in",
    "_groups",
    "_settled",
    "_held_back",
    "_window",
    "_made",
    "_scaled_losses",
    "_looks",
    "_seen",
    "_skips",
    "_outcomes",
    "_last_outcome",
    "_iteration",
    "_rows",
    "_last_scaled",
    "_slots",
    "_tie",
)
# A float16 loss seeds its backward pass in float16, where 2**16 is infinite.
_HALF_LOSS_SCALE = 2.0**15


class Scaling(Moving):
    """Losses times the scale, gradients divided by it."""

    _warned_half: bool
    _agreement: Agreement
    _names: Names

    def _begin(self) -> None:
        """Sets up what belongs to the iterations: NOT_SAVED."""
        self._reset()
        self._window: Window | None = None
        """Where the next loss goes, while it is open."""
        self._made: Window | None = None
        """Where the last backward pass came from."""
        self._scaled_losses = 0
        self._looks: Beside[int] = Beside()
        """How many steps of an optimizer could have measured what underflows."""
        # By id, because an optimizer, or a wrapper of one, need not be hashable.
        self._seen: dict[int, weakref.ref[Optimizer]] = {}
        self._skips: list[tuple[weakref.ref[Optimizer], Window, Tensor]] = []
        self._outcomes: Beside[StepOutcome] = Beside()
        self._last_outcome: StepOutcome | None = None
        self._rows: Beside[Tensor] = Beside()
        """How many steps of an optimizer in a row were skipped."""
        self._last_scaled: Callable[[], Tensor | None] = _no_tensor
        self._tie = ScalerTie(self)

    def _reset(self) -> None:
        """Makes every optimizer READY, with nothing found yet, under torch's names."""
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(
            _refresh_per_optimizer_state
        )
        self._fits: dict[int, Tensor] = {}
        self._measured: dict[int, Measured] = defaultdict(Measured)
        self._iteration: list[tuple[frozenset[int], StepOutcome]] = []
        # torch's names key by id(optimizer); holding the optimizer keeps its id from being reused.
        self._held: dict[int, Optimizer] = {}
        self._unscaled_in: dict[int, Window] = {}
        self._groups: dict[int, list[Group]] = {}
        """Who must agree on the gradients of an optimizer."""
        self._settled: set[int] = set()
        """The optimizers whose gradients they have agreed on."""
        self._held_back: dict[int, Tensor] = {}
        """bool: a loss with its own scale was bad, on a rank where it reached the optimizer."""

    def _watch(self, optimizer: Optimizer) -> None:
        """Remembers what becomes of the gradients of `optimizer` from here on."""
        seen, key = self._seen, id(optimizer)
        if key not in seen or seen[key]() is not optimizer:
            seen[key] = weakref.ref(optimizer, lambda _: seen.pop(key, None))

    # Scaling.

    def scale(self, outputs: Any) -> Any:
        """`outputs`, a tensor or an iterable of tensors, times the scale of this window."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if torch.compiler.is_compiling():
                return compiled.scale(self, outputs)
            window = self._open(outputs)
            scaled = times(outputs, window.scale)
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
        window.unreduced |= not self._agreement.is_reducing()
        window.note_loss(loss)
        self._made = window

    def _pending(self) -> Window | None:
        """The window whose gradients are there: of the last backward pass, if one was seen."""
        return self._window if self._made is None else self._made

    def backward(
        self, loss: Any, *, loss_id: int | str = 0, spare: bool = False, **kwargs: Any
    ) -> None:
        """Scales `loss`, a tensor or several, and runs its backward pass.

        Call it as often as you like before a step: gradients add up.

        Args:
            loss: What to differentiate.
            loss_id: Gives the loss a scale of its own, which its own overflows lower and nobody
                else's. Its gradients are checked on their own and brought to the common scale
                before they are added, which takes one more copy of them for the while.
            spare: If the gradients of this pass are not finite, leave it out rather than the whole
                step, and have the others of the step weigh as much as all: for accumulation. All
                passes of a step must have it. It also takes one more copy of the gradients.
            kwargs: For `torch.autograd.backward`.
        """
        if torch.compiler.is_compiling():
            ids = {"loss_id": loss_id, "spare": spare}
            return compiled.outside(self, "backward", loss, **ids, **kwargs)
        losses = [loss] if isinstance(loss, Tensor) else list(loss)
        if not losses or not all(isinstance(one, Tensor) for one in losses):
            what = ", ".join(type(one).__name__ for one in losses) or "nothing"
            raise ValueError(f"backward() takes a tensor or an iterable of tensors, got {what}.")
        check_loss_id(loss_id)
        if spare and loss_id != 0:
            raise SettingError(f"spare=True goes with the common scale, got loss_id={loss_id!r}.")
        if self._enabled and (spare or loss_id != 0):
            self._refuse_unreduced("spare=True" if spare else "a loss_id")
        if spare and self._enabled:
            scaled = [self.scale(one) for one in losses]
            backward_spared(scaled, self._open(losses[0]), self._known(), self._agreed, kwargs)
            return
        if loss_id == 0 or not self._enabled:
            torch.autograd.backward([self.scale(one) for one in losses], **kwargs)
            return
        window = self._open(losses[0], alone=True)
        self._scaled_losses += 1
        own = window.losses.get(loss_id)
        if own is None:
            if loss_id not in self._losses:
                refuse_capture(f"A loss with loss_id={loss_id!r} comes for the first time")
            state = self._loss_state(loss_id)
            if any(one.dtype is torch.float16 for one in losses):
                self._hold_for_half(state)
            own = window.add_loss(loss_id, state.scale.clone())
        scaled = [times(one, own.scale) for one in losses]
        backward_alone(scaled, window, own, self._known(), kwargs)
        for one in losses:
            own.note_loss(one)
        self._made = window

    def _refuse_unreduced(self, what: str) -> None:
        """Raises if gradients that are not reduced would be set aside, and never be."""
        window = self._window
        waiting = window is not None and not window.closed and window.unreduced
        if waiting or not self._agreement.is_reducing():
            raise CallOrderError(
                f"The gradients of a loss with {what} are looked at on their own, so every pass of "
                "the step must be reduced: not in no_sync(), with set_requires_gradient_sync(True)."
            )

    def _known(self) -> list[Tensor]:
        """The parameters that models and optimizers have told of, where there are ranks."""
        if not has_ranks():
            return []
        several = [ref() for ref in self._seen.values()]
        groups = [group for one in several if one is not None for group in one.param_groups]
        known = [*self._names.params(), *(param for group in groups for param in group["params"])]
        return list({id(param): param for param in known}.values())

    def _agreed(self, fine: Tensor, params: Sequence[Tensor]) -> Tensor:
        """bool: whether something is `fine` on all ranks that must agree on `params`."""
        groups = self._agreement.among(params)
        return largest((~fine).float().reshape(1), groups)[0] == 0 if groups else fine

    def grad(self, outputs: Any, inputs: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad`, computed with scaled `outputs` and handed back unscaled.

        For gradient penalties. float16 gradients come back in float32, because unscaled they could
        vanish. Gradients that are not finite count as an overflow in the next `update()`.
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "grad", outputs, inputs, **kwargs)
        if not self._enabled:
            return torch.autograd.grad(outputs, inputs, **kwargs)
        several = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        scaled = [times(output, self._open(output).scale) for output in several]
        grads = torch.autograd.grad(scaled, inputs, **kwargs)
        window = self._open(several[0])
        window.note_penalty(grads)
        return tuple(None if g is None else times(g, window.inv_scale) for g in grads)

    def _open(self, output: Tensor, alone: bool = False) -> Window:
        """The window that `output` belongs to: the open one, or a new one with the scale of now.

        `alone` if the output has a scale of its own.
        """
        if self._state is None:
            self._lazy_init_scale_growth_tracker(output.device)
        window = self._window
        half = output.dtype is torch.float16 and not alone
        if window is None or window.closed or window.captured != capturing():
            window = self._renew(half or (window is not None and window.half))
        window.half |= half
        if half:
            if self._agreement.has_stages():
                raise SettingError(
                    "The loss is float16, which limits the scale, and stages that have no loss do "
                    "not know of it. Compute it with loss.float()."
                )
            self._warn_of_half()
        return window

    def _warn_of_half(self) -> None:
        """Says once that a float16 loss limits the scale."""
        if not self._warned_half:
            self._warned_half = True
            warnings.warn(
                "The loss is float16, so its backward pass begins in float16 and the scale can be "
                f"{_HALF_LOSS_SCALE:g} at most. Compute it with loss.float() to lift the limit.",
                stacklevel=caller_level(),
            )

    def _hold_for_half(self, state: State) -> None:
        """Holds the scale of a float16 loss with a scale of its own where it can begin."""
        self._warn_of_half()
        state.scale.clamp_(max=max(_HALF_LOSS_SCALE, getattr(self._policy, "min_scale", 0.0)))

    def _renew(self, half: bool = False) -> Window:
        """A new window with the scale of now, or what a `half` loss can bear."""
        self._clear_skipped(wait=True)
        last = self._pending()
        state = self._live("scale()")
        with torch.inference_mode(False):
            scale = state.scale.clone()
            if half:
                scale.clamp_(max=_HALF_LOSS_SCALE)
                low = getattr(self._policy, "min_scale", None)
                if low is not None:
                    # Else it would grow on and on, and take as long to come back.
                    state.scale.clamp_(max=max(_HALF_LOSS_SCALE, low))
            before = {} if last is None else last.leftovers()
            self._window = Window(scale, before, capturing())
        return self._window

    def _abandon(self) -> None:
        """Forgets losses that were scaled and lead to no step: their gradients are gone."""
        if self._window is not None and not self._window.closed:
            if self._made is self._window:
                self._made = None
            self._window = None

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


def _no_tensor() -> None:
    """What a dead reference would say."""


def _inside_functorch(value: Tensor) -> bool:
    """Whether `value` lives in a torch.func transform, which must not leak out of it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def refuse_capture(what: str) -> None:
    """Raises a CallOrderError if a CUDA graph is being captured, where `what` must not happen.

    What is made inside a graph is made anew by every replay, so it could not count or remember.
    """
    if capturing():
        raise CallOrderError(
            f"{what} inside a CUDA graph, and every replay would start from there. Run a whole "
            "iteration, from the loss to update(), before you capture one."
        )
