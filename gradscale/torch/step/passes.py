"""Which scale gradients have: iterations, and what a backward pass means for the entries.

An iteration, from one `update()` to the next, has one scale. A backward pass leaves gradients at
the scale of the iteration in which it runs, also if its loss was scaled before. Gradients that an
optimizer did not step keep their scale in its entry, and are brought to the scale of the next pass
when that begins. Nothing is added to unscaled gradients without notice: while an entry is unscaled,
its gradients are compared before and after every pass. In an ordinary iteration none of this does
anything.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError, caller_level
from gradscale.torch.grads.collect import with_grad
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.grads.scale import Scale, move, times
from gradscale.torch.state import HALF_LOSS_SCALE, LossId, ScaleState
from gradscale.torch.step.entries import UNSCALED, Entries, OptimizerEntry
from gradscale.torch.step.sharing import DroppablePass, Watched, forget_cleared, unscaled_ids

if TYPE_CHECKING:
    from gradscale.torch.step.own_losses import OwnLoss


class Iteration:
    """One scale, and what is known of the losses that were multiplied by it.

    Flags are plain bools where the scale is a number, and tensors where it is on a device.
    """

    half = False
    """Whether one of the losses was float16."""
    passes = 0
    """Backward passes that have begun in it."""
    own_passes = 0
    """How many of those were of losses with a scale of their own."""
    loss: Tensor | None = None
    """The only loss so far, on the device of the scale, not yet tested."""
    loss_finite: Any = None
    """bool: all losses but `loss` were finite; None if there were none."""
    first: Any = None
    """The first loss with one element, for logs: a number, or a tensor on a device."""
    uses_losses = True
    """Whether a loss that is not finite leaves the scale as it is."""
    penalty_finite: Any = None
    """bool: all gradients that `grad()` returned were finite; None if there were none."""
    finite: Any = None
    """bool: what an `update()` has reported of its gradients; None before the first."""
    blank: Any = None
    """bool: no loss was scaled and every gradient was 0; None where losses were scaled."""
    idle: Any = None
    """bool: no rank had a gradient; None where this one has, or is alone."""
    common: Any = None
    """bool: some rank had a pass of a loss with the common scale; None without ranks."""
    common_amax: Any = None
    """The largest magnitude of the gradients of loss 0 alone, where it was measured beside losses
    with their own scale."""
    unreduced = False
    """Whether a pass left gradients that were not reduced over ranks, as in no_sync()."""
    thread: int | None = None
    """The thread that scales its losses and steps."""

    def __init__(self, scale: Scale, captured: bool, number: int) -> None:
        self.scale = scale
        self.number = number
        """How many iterations had ended before it."""
        self.captured = captured
        """Whether it is inside a CUDA graph: then every replay copies the scale anew."""
        self.losses: dict[LossId, OwnLoss] = {}
        """The losses that have a scale of their own."""

    def note_loss(self, loss: Tensor) -> None:
        """Records whether `loss` was finite."""
        scale = self.scale
        if scale.number is not None:
            if loss.numel() == 1:
                value = loss.item()
                finite: Any = math.isfinite(value)
                self.first = value if self.first is None else self.first
            else:
                finite = _all_finite(loss).item()
            self.loss_finite = finite if self.loss_finite is None else self.loss_finite and finite
            return
        if self.first is None and loss.numel() == 1:
            self.first = loss
        plain = loss.dtype is torch.float32 and loss.numel() == 1
        if plain and loss.device == scale.tensor.device and self.loss_finite is None:
            if self.loss is None:
                self.loss = loss  # a kernel can test it, without operations of its own
                return
        self.loss_finite = _and(self.losses_finite(), _all_finite(loss), scale)
        self.loss = None

    def losses_finite(self) -> Any:
        """bool: all losses were finite; None if there were none, or the rule is off."""
        if not self.uses_losses:
            return None
        if self.loss is None:
            return self.loss_finite
        return _and(self.loss_finite, _all_finite(self.loss), self.scale)

    def set_losses_finite(self, finite: Any) -> None:
        """Takes over what ranks have agreed on."""
        self.loss, self.loss_finite = None, finite

    def note_penalty(self, grads: Any) -> None:
        """Records whether the scaled `grads` of a penalty were finite."""
        for grad in grads:
            if grad is not None:
                flag: Any = torch.isfinite(grad.detach()).all()
                flag = flag.item() if self.scale.number is not None else flag
                self.penalty_finite = _and(self.penalty_finite, flag, self.scale)


class Passes:
    """The iteration of now, and the passes that have begun.

    Args:
        state: Where scales come from.
        entries: Whose gradients passes add to.
    """

    def __init__(self, state: ScaleState, entries: Entries) -> None:
        self.state = state
        self.entries = entries
        self.iteration: Iteration | None = None
        """The iteration of now, once something has used its scale."""
        self.last: Iteration | None = None
        """The iteration in which the last pass began."""
        self.ended = 0
        """Iterations that have ended."""
        self.count = 0
        """Passes that have begun."""
        self.last_plain = 0
        """The count with the last pass that was not droppable."""
        self.aside = False
        """Whether gradients have been set aside for a pass that is checked on its own."""
        self.scaled = 0
        """Losses that were scaled."""
        self.last_scaled: Any = lambda: None
        self.unscaled: dict[int, weakref.ref[Tensor]] = {}
        """Gradients that were unscaled in place for one of several optimizers that share them, by
        the id of the parameter."""
        self.unscaled_now = False
        """Whether one of those was unscaled in the iteration of now."""
        self.added: set[int] = set()
        """Those that a pass has changed since: in the next iteration they are scaled ones."""
        self.droppable: list[DroppablePass] = []
        """The droppable passes whose gradients some optimizer has not stepped yet."""
        self.weighed: dict[int, int] = {}
        """The last droppable pass that was made up for in a gradient, by the parameter's id."""
        self._warned_half = False
        self._task = -1
        self.lock = threading.Lock()
        self.watched: list[Watched] = []
        """Unscaled gradients that a pass may change, until it has ended."""

    def current(self, half: bool = False) -> Iteration:
        """The iteration of now; a new one clears the gradients of skipped steps."""
        iteration = self.iteration
        captured = not self.state.on_host and capturing()
        if iteration is None or iteration.captured != captured:
            last = self.last
            # The first loss of an iteration need not be the one that is float16.
            limited = half or (last is not None and last.half)
            if captured:
                self.state.copy = None  # every replay must copy the scale anew
            iteration = self.iteration = Iteration(
                self.state.current(limited), captured, self.ended
            )
            for entry in self.entries.all:
                if entry.skipped is not False:
                    entry.clear_skipped(self.entries)
        return iteration

    def claim(self, half: bool = False) -> Iteration:
        """The iteration of now, for this thread alone: two would mix up their gradients.

        A CallOrderError if it is another thread's. `half` if one of its losses is float16.
        """
        thread = get_ident()
        if self.iteration is not None and self.iteration.thread == thread:
            return self.current(half)
        with self.lock:
            iteration = self.current(half)
            owner = iteration.thread
            if torch._C._current_graph_task_id() >= 0:  # a hook in a pass
                return iteration
            if owner not in (None, thread) and any(t.ident == owner for t in threading.enumerate()):
                raise CallOrderError(
                    "The scaler was used by a second thread before the first thread ended its "
                    "iteration with update() or apply(). Run whole iterations in turn, or use a "
                    "separate scaler for each thread."
                )
            iteration.thread = thread
            return iteration

    def end(self) -> None:
        """Ends the iteration: the next one has the scale that the state has by then."""
        if not self.entries.all and self.iteration is not None and self.iteration.passes:
            return  # no optimizer is known yet whose entry could keep the scale of its gradients
        iteration, self.iteration = self.iteration, None
        self.ended += 1
        self.unscaled_now = False
        while self.added:
            self.unscaled.pop(self.added.pop(), None)
        if iteration is not None and iteration.captured and capturing():
            self.last = None  # the next iteration has the scale of its own time
        for entry in self.entries.all:
            entry.end_iteration(self, iteration)

    def abandon(self) -> None:
        """Forgets the losses of this iteration: their gradients are gone."""
        if self.last is self.iteration:
            self.last = None
        self.iteration = None
        self.ended += 1
        self.droppable = []
        for entry in self.entries.all:
            if self.count:  # passes until now have left it nothing
                entry.stepped_at, entry.left = self.count, None

    def scale_of(self, entry: OptimizerEntry) -> Scale:
        """The scale of the gradients of an entry that is not unscaled."""
        if entry.unseen is not None:
            entry.check_unseen()
        if entry.left is not None:
            return entry.left
        last = self.last
        if last is not None and (last.captured or last is self.iteration):
            return last.scale
        # Gradients of a pass before the optimizer was known; a stage without a loss sees no pass.
        if (
            last is not None
            and not entry.known
            and not (last.passes == 0 and self.entries.consensus.groups.has_stages())
        ):
            return last.scale
        return self.current().scale

    def origin(self) -> Iteration:
        """The iteration whose passes made the gradients that are stepped now."""
        return self.current() if self.last is None else self.last

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """`loss` times the scale; its backward pass begins in `_begin()`."""
        half = loss.dtype is torch.float16
        if half:
            self.check_half()
        iteration = self.claim(half)
        iteration.half = iteration.half or half
        self.scaled += 1
        scale = iteration.scale
        if half or loss.get_device() != scale.tensor.get_device():
            scaled = times(loss, scale.tensor)
        else:
            scaled = loss * scale.tensor
        node = scaled.grad_fn
        if node is not None and not torch._C._functorch.is_functorch_wrapped_tensor(scaled):
            # A hook of the node: those of tensors, and functions in Python, take longer.
            node.register_prehook(partial(self._begin, loss.detach(), scale))
        self.last_scaled = weakref.ref(scaled)
        return scaled

    def check_half(self) -> None:
        """Warns once that a float16 loss limits the scale; raises where other ranks lack it."""
        if self.entries.consensus.groups.has_stages():
            raise SettingError(
                "The loss is float16, which limits the scale, but ranks without a loss do not "
                "have this limit. Pass loss.float() instead."
            )
        if not self._warned_half:
            self._warned_half = True
            warnings.warn(
                "The loss is float16, so its backward pass begins in float16 and the scale is "
                f"limited to {HALF_LOSS_SCALE:g}. Pass loss.float() instead to remove the limit.",
                stacklevel=caller_level(),
            )

    def _begin(
        self, loss: Tensor, then: Scale, grads: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """Begins the pass of a loss that was multiplied by `then`; called with its seed gradient.

        Where the pass runs in a later iteration, the gradient is brought to the scale of that one.
        """
        scale = self.begin(loss)
        if scale is then or (scale.number is not None and scale.number == then.number):
            return None
        ratio = scale.over(then)
        return tuple(grad * move(ratio, grad.device) for grad in grads)

    def begin(self, loss: Tensor) -> Scale:
        """The scale of the iteration in which the pass of `loss` runs, called from inside of it."""
        # Not `current()`: a pass is captured by the CUDA graph that has captured its loss.
        iteration = self.iteration or self.current()
        task = torch._C._current_graph_task_id()
        if task != self._task or task < 0:
            self._task = task
            self.begin_pass(iteration)
            if self.watched:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_soon)
        iteration.note_loss(loss)
        return iteration.scale

    def begin_pass(self, iteration: Iteration) -> None:
        """Prepares the entries for a pass of `iteration` that may add to their gradients."""
        if self.droppable and not self.aside:
            forget_cleared(self)
        self.count += 1
        self.last_plain = self.count
        iteration.passes += 1
        iteration.blank = None
        self.last = iteration
        if self.entries.consensus.groups.wrappers:
            iteration.unreduced |= not self.is_reducing()
        if self.watched:
            self.compare()
        self.entries.gone.clear()
        brought: set[int] = set()
        unscaled: list[Any] = []
        for entry in self.entries.all:
            entry.known = True
            if entry.skipped is not False:  # of a step in this very iteration
                entry.clear_skipped(self.entries)
            if entry.lacking is not None and not with_grad(entry.param_groups()):
                entry.lacking = None
            if entry.left is not None and entry.stage is not UNSCALED:
                brought = brought or unscaled_ids(self)
                entry.rescale(iteration.scale, brought)
            if entry.stage is UNSCALED or entry.mixed:
                groups = entry.param_groups()
                if with_grad(groups):
                    unscaled.append(([p for group in groups for p in group["params"]], entry))
                else:
                    entry.make_ready()
                    entry.left = None
        for each in unscaled:  # as they are once all is cleared and brought
            self.watched.append(Watched(*each))
        if not self.unscaled_now:
            self.unscaled.clear()
        if self.unscaled:
            params = [p for p in self.entries.params_in(self.unscaled) if self.is_unscaled(p)]
            self.unscaled = {id(p): self.unscaled[id(p)] for p in params}
            self.watched.append(Watched(params, None))

    def bring(self, scale: Scale) -> None:
        """Brings all gradients that were left to `scale`, before they are set aside."""
        brought: set[int] = set()
        for entry in self.entries.all:
            if entry.skipped is not False:
                entry.clear_skipped(self.entries)
            if entry.left is not None and entry.stage is not UNSCALED:
                brought = brought or unscaled_ids(self)
                entry.rescale(scale, brought)

    def _end_soon(self) -> None:
        """Compares after the callbacks that DDP and FSDP2 have queued, which copy gradients."""
        torch.autograd.Variable._execution_engine.queue_callback(self.compare)

    def compare(self) -> None:
        """Looks which unscaled gradients the last pass has changed.

        At its end, or later if the pass raised: then torch runs no callback at its end.
        """
        watched, self.watched = self.watched, []
        for each in watched:
            changed = each.changed()
            if changed and each.entry is not None:
                each.entry.added(self.last, self.entries)
            elif changed:
                self.entries.mark_mixed(changed)
                self.added.update(map(id, changed))

    def is_reducing(self) -> bool:
        """Whether all wrapped modules reduce the gradients of a pass: none is in no_sync()."""
        wrappers = self.entries.consensus.groups.wrappers
        return all(reduces(each) for ref, reduces in wrappers if (each := ref()) is not None)

    def refuse_unreduced(self, what: str) -> None:
        """Raises if gradients that are not reduced over ranks would be set aside, and stay so."""
        iteration = self.iteration
        left = iteration is not None and iteration.unreduced
        if left or not self.is_reducing():
            raise CallOrderError(
                f"The gradients of a loss with {what} are checked separately, so they must be "
                "reduced in every backward pass of the step. Do not use no_sync(), and call "
                "set_requires_gradient_sync(True)."
            )

    def refuse_capture(self, what: str) -> None:
        """Raises a CallOrderError if a CUDA graph is being captured, where `what` must not happen.

        What is made inside a graph is made anew by every replay, so it could not count or remember.
        """
        if capturing():
            raise CallOrderError(
                f"{what} inside a CUDA graph, so every replay would start from the initial values. "
                "Run a whole iteration, from the loss to update(), before the capture."
            )

    def is_unscaled(self, param: Tensor) -> bool:
        """Whether the gradient of `param`, which optimizers share, was unscaled in place."""
        ref = self.unscaled.get(id(param))
        return ref is not None and param.grad is not None and ref() is param.grad

    def note_unscaled(self, params: list[Tensor]) -> None:
        """Remembers that gradients which optimizers share are unscaled now."""
        self.unscaled_now = True
        self.added -= set(map(id, params))
        self.unscaled |= {id(p): weakref.ref(p.grad) for p in params if p.grad is not None}


def _all_finite(loss: Tensor) -> Tensor:
    """bool: whether all elements of `loss` are finite."""
    # Two kernels on a GPU, where `isfinite` takes four.
    finite = (loss.detach() * 0).eq(0)
    return finite.all() if loss.numel() != 1 else finite.reshape(())


def _and(known: Any, flag: Any, scale: Scale) -> Any:
    """Both flags, on the device of `scale`."""
    if isinstance(flag, Tensor):
        flag = move(flag, scale.tensor.device)
    return flag if known is None else known & flag
