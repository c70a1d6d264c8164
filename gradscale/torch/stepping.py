"""The part of the scaler that steps an optimizer or skips it, as torch's `step()`, and says so."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, caller_level
from gradscale.torch import compiled
from gradscale.torch.checking import Checking
from gradscale.torch.closure import ClosureStep
from gradscale.torch.contract import is_capable, step_on_device, takes_scaler, writes_back
from gradscale.torch.events import Events, Record
from gradscale.torch.follow import Followers, innermost
from gradscale.torch.kernels import capturing
from gradscale.torch.outcome import Blame, Measured, StepOutcome, event_on, told_by
from gradscale.torch.scaling import refuse_capture
from gradscale.torch.unscale import Reading, gradients_of, params_with_grad, read, readable
from gradscale.torch.window import Fate, Window


class Stepping(Checking):
    """Steps that take place or do not, and what became of them."""

    _events: Events
    _followers: Followers

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps `optimizer` unless a gradient is not finite; what its `step()` returned, or None.

        A closure, by position or as `closure=`, computes the loss, calls `scaler.backward(loss)`
        and returns the unscaled loss. All its evaluations have one scale, and the step is undone if
        one of them overflows.

        **Waits for the device** unless the optimizer can skip by itself (`fused=True` in
        torch.optim).
        """
        if torch.compiler.is_compiling():
            return compiled.outside(self, "step", optimizer, *args, **kwargs)
        self._followers.catch_up()
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._tell_of_plain_step([optimizer], result)
            return result
        closure, others, named = _take_closure(args, kwargs)
        if closure is not None:
            return self._step_with_closure(optimizer, closure, others, named)
        window = self._use(optimizer, "step", (OptState.READY, OptState.UNSCALED))
        params = params_with_grad(optimizer)
        if not params and not self._groups[id(optimizer)]:
            self._step_nothing([optimizer], window)
            return None
        if takes_scaler(optimizer):
            return self._step_with_scaler(optimizer, window, args, kwargs)
        capable = is_capable(optimizer)
        scale = None
        if self._stage(optimizer) is OptState.UNSCALED:
            self._recheck(optimizer, window)
        elif capable and not window.split(params)[1]:
            values = gradients_of(params)
            self._measure_underflow([optimizer], values, window)
            self._record(optimizer, read(values, window.inv_scale), OptState.READY)
            scale = window.scale
        else:
            self._unscale(optimizer, window)
        self._settle([optimizer], window)
        skipped = self._skipped(optimizer)
        if capable:
            result = step_on_device(optimizer, scale, skipped, args, kwargs)
            if scale is not None:
                self._mark_stepped(optimizer, window, skipped)
        else:
            result = None if bool(skipped) else optimizer.step(*args, **kwargs)
        self._finish([optimizer], window, skipped)
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
            stacklevel=caller_level(),
        )
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        self._finish([optimizer], window, self._found(self._found_inf_per_device(optimizer)))
        return result

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        edit: Callable[[], None] | None = None,
    ) -> Any:
        """Steps with one scale for every evaluation of `closure`, wholly or not at all.

        `edit` may change the unscaled gradients after every evaluation.
        """
        if self._stage(optimizer) is OptState.STEPPED:
            self._use(optimizer, "step", ())  # says what is wrong
        window = self._pending()
        if window is not None and self._stage(optimizer) is OptState.UNSCALED:
            self._recheck(optimizer, window)
        elif window is not None and not window.closed and not window.used_by(optimizer):
            if params_with_grad(optimizer):
                self.unscale_(optimizer)  # gradients from before the step, as SAM wants them
        ready = self._stage(optimizer) is OptState.UNSCALED
        run = ClosureStep(self, optimizer, closure, ready, edit)
        held = run.anywhere(ready and bool(self._skipped(optimizer)))[0]
        result = None if held else run.step(args, kwargs)
        if run.reading is not None:
            self._record(optimizer, run.reading, OptState.UNSCALED)
        elif not ready:  # the gradients of another rank were bad before it began
            none = Reading({}, torch.ones((), dtype=torch.bool))
            self._record(optimizer, none, OptState.UNSCALED)
        window = self._use(optimizer, "step", (OptState.UNSCALED,))
        window.mark(params_with_grad(optimizer))
        self._settle([optimizer], window)
        self._finish([optimizer], window, self._skipped(optimizer), returned=result)
        return result

    def _step_nothing(self, optimizers: Sequence[Optimizer], window: Window) -> None:
        """Ends the step of `optimizers` that have no gradients, with a warning."""
        total = sum(len(group["params"]) for o in optimizers for group in o.param_groups)
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        warnings.warn(
            f"The step did nothing: 0 of the {total} parameters of this {names} have a gradient. "
            "If that is not meant, is the loss detached, are all parameters frozen, or was the "
            "optimizer built before the model was moved or rebuilt?",
            stacklevel=caller_level(),
        )
        skipped = torch.ones_like(window.scale, dtype=torch.bool)
        self._finish(optimizers, window, skipped, nothing=True)
        del self._skips[-len(optimizers) :]  # there is nothing to clear

    def _end_iteration(self, record: Record) -> None:
        """Makes every optimizer ready again, and tells of `record`, or logs it in a capture."""
        self._reset()
        for window in {self._window, self._made}:
            if window is not None:
                window.close([ref() for ref in self._seen.values()])
        self._clear_skipped(wait=False)
        if not capturing():
            self._announce(record)
            return
        # Nothing has happened yet, and it will without Python. The window is no longer the last
        # one: another iteration, in this graph or in another, takes the scale of its own day.
        self._window = self._made = None
        self._events.log(record)

    def _announce(self, record: Record) -> None:
        """Tells whoever listens or follows; the last thing to do, because they may raise."""
        self._events.take(record)
        self._followers.take(record)
        self._events.deliver()

    # Saying so.

    def _finish(
        self,
        optimizers: Sequence[Optimizer],
        window: Window,
        skipped: Tensor,
        nothing: bool = False,
        returned: Any = None,
    ) -> None:
        """Ends a step that all of `optimizers` took together, and says what became of it."""
        measured = self._measured[id(optimizers[0])]
        loss_finite = window.loss_finite
        finite = _all([self._finite(optimizer) for optimizer in optimizers])
        known = [self._fits[id(one)] for one in optimizers if id(one) in self._fits]
        fits = _all(known) if known else torch.ones_like(skipped)
        for loss in window.losses.values():
            mine = loss.loss_finite
            loss_finite = mine if loss_finite is None else loss_finite & mine
        norm = measured.grad_norm
        own = [loss for loss in window.losses.values() if any(map(loss.reaches, optimizers))]
        outcome = StepOutcome(
            applied=~skipped,
            finite=finite,
            fits=fits,
            loss_finite=torch.ones_like(skipped) if loss_finite is None else loss_finite,
            scale=window.scale,
            grad_norm=None if norm is None else norm.float(),
            amax=measured.amax,
            underflow=measured.underflow,
            skipped_in_a_row=self._count_row(optimizers, skipped),
            _format=self._format,
            _floor=getattr(self._policy, "min_scale", 0.0),
            loss=returned,
            dropped=window.dropped,
            bad_rank=measured.bad_rank,
            _own=tuple((loss.finite, loss.scale) for loss in own),
            _blame=self._blame(optimizers, window, skipped),
            _nothing=nothing,
            _done=mark_in_stream(skipped),
        )
        self._tell(optimizers, outcome)
        for optimizer in optimizers:
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
            window.use(optimizer)
            self._remember_skip(optimizer, window, skipped)

    def _remember_skip(self, optimizer: Optimizer, window: Window, skipped: Tensor) -> None:
        """Remembers to clear the gradients of `optimizer` if its step was skipped."""
        self._skips.append((weakref.ref(optimizer), window, skipped))

    def _count_row(self, optimizers: Sequence[Optimizer], skipped: Tensor) -> Tensor:
        """int32: how many steps in a row are skipped by now; the count of the first counts."""
        rows = [self._row(optimizer, skipped) for optimizer in optimizers]
        count = torch.where(skipped, rows[0] + 1, 0)
        for row in rows:
            row.copy_(count)  # in place, so that a CUDA graph counts on
        return count

    def _row(self, optimizer: Optimizer, like: Tensor) -> Tensor:
        """int32, on the device of `like`: how many steps of `optimizer` in a row were skipped."""
        row = self._rows.get(optimizer)
        if row is None:
            refuse_capture("An optimizer is stepped for the first time")
            row = torch.zeros_like(like, dtype=torch.int32)
            self._rows.set(optimizer, row)
        return row

    def _blame(
        self, optimizers: Sequence[Optimizer], window: Window, skipped: Tensor
    ) -> Callable[[], Blame]:
        """What finds the parameters to blame, now where the host knows, else when it is asked."""
        if readable(skipped):
            blame = self._blame_now(optimizers, window) if skipped else Blame([], None)
            return partial(Blame, *blame)
        params = [param for optimizer in optimizers for param in params_with_grad(optimizer)]
        measured = self._measured[id(optimizers[0])]
        return self._blame_later(optimizers, params, lambda: measured)

    def _blame_later(
        self, optimizers: Sequence[Optimizer], params: list[Tensor], look: Callable[[], Measured]
    ) -> Callable[[], Blame]:
        """What finds the parameters to blame when it is asked, from what was measured.

        `params` are those that have gradients; `look` says what was measured.
        """
        refs = [weakref.ref(optimizer) for optimizer in optimizers]
        total = sum([len(group["params"]) for o in optimizers for group in o.param_groups])
        # Ids rather than references: of most outcomes nobody asks whom to blame.
        chosen = None if len(params) == total else set(map(id, params))
        all_names = self._names  # and not the scaler, which an outcome must not keep alive

        def find() -> Blame:
            measured = look()
            alive = [optimizer for ref in refs if (optimizer := ref()) is not None]
            owners = [all_names.seen(p) for o in alive for g in o.param_groups for p in g["params"]]
            unique = {id(p): p for p in owners if chosen is None or id(p) in chosen}
            names = all_names.of(alive)
            first = told_by(measured.peaks, measured.counts, names, unique.values())
            if first.culprits:
                known = measured.finite_amax
                return first if known is None else first._replace(finite_amax=float(known))
            return told_by(measured.edited, measured.edited_counts, names, unique.values())

        return find

    def _blame_now(self, optimizers: Sequence[Optimizer], window: Window) -> Blame:
        """What the gradients of a step that is skipped say."""
        kept = [self._measured[id(optimizer)].blame for optimizer in optimizers]
        found = [blame for blame in kept if blame is not None and blame.culprits]
        if found:
            amaxes = [blame.finite_amax or 0.0 for blame in found]
            return Blame([bad for blame in found for bad in blame.culprits], max(amaxes))
        unscaled = self._stage(optimizers[0]) is OptState.UNSCALED
        return self._look(optimizers, window, unscaled)

    def _tell_of_plain_step(self, optimizers: Sequence[Optimizer], returned: Any = None) -> None:
        """Says that a disabled scaler has stepped."""
        yes = torch.ones((), dtype=torch.bool)
        outcome = StepOutcome(
            applied=yes, finite=yes, fits=yes, loss_finite=yes, scale=torch.ones(()), loss=returned
        )
        self._tell(optimizers, outcome)

    def _tell(self, optimizers: Sequence[Optimizer], outcome: StepOutcome) -> None:
        """Keeps `outcome` for whoever asks, as long as an optimizer lives."""
        for optimizer in optimizers:
            self._outcomes.set(optimizer, outcome)
        self._iteration.append((frozenset(id(innermost(o)) for o in optimizers), outcome))
        self._last_outcome = outcome

    def outcome(self, optimizer: Optimizer | None = None) -> StepOutcome:
        """What became of the last step, of `optimizer` or of any."""
        if torch.compiler.is_compiling():
            return compiled.outside(self, "outcome", optimizer)
        outcome = self._last_outcome if optimizer is None else self._outcomes.get(optimizer)
        if outcome is None:
            raise CallOrderError(
                "outcome() was called before a step. Call scaler.apply(optimizer) or "
                "scaler.step(optimizer) first."
            )
        return outcome


def _take_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """The closure among the arguments of `step`, if there is one, and the other arguments."""
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, {k: v for k, v in kwargs.items() if k != "closure"}
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def _all(flags: list[Tensor]) -> Tensor:
    """bool: whether all of `flags` hold."""
    return flags[0] if len(flags) == 1 else torch.stack(flags).all()


def mark_in_stream(value: Tensor) -> torch.Event | None:
    """An event that is done when `value` is; None where there can be none."""
    event = None if capturing() else event_on(value.device)
    if event is not None:
        event.record()
    return event
