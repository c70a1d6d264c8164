"""A window: all backward passes between two steps, and what became of their gradients.

Gradients remember the scale they were made with by belonging to a window, which holds a snapshot of
it: an `update()` that comes early, late or twice cannot change what they are divided by. A hook on
the scaled loss tells which window a backward pass belongs to. A `Mark` remembers one gradient as it
was when somebody used it or passed it by, so that nothing is divided twice and gradients of two
scales are not added up unnoticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError
from gradscale.torch.losses import OwnLoss
from gradscale.torch.unscale import move, params_with_grad


class Fate(Enum):
    """What became of a gradient."""

    USED = "an optimizer has had it"
    PASSED = "its window closed without an optimizer using it"
    CLEARED = "its step was skipped, and it was set to 0"
    OPAQUE = "an optimizer has had it, which may or may not have unscaled it in place"


class Mark:
    """One gradient as it was when its fate was settled."""

    __slots__ = ("begun", "conflict", "fate", "grad", "left", "nonzero", "param", "version")

    def __init__(self, param: Tensor, fate: Fate, begun: int, left: Tensor | None) -> None:
        self.param = weakref.ref(param)
        self.grad: weakref.ref[Any] = weakref.ref(param.grad)
        self.nonzero: Tensor | None = None
        """bool: it had something in it when the last backward pass began."""
        self.conflict: Tensor | None = None
        """bool: backward passes of different scales have added to it; None if none has added."""
        self.renew(fate, begun, left)

    def renew(self, fate: Fate, begun: int, left: Tensor | None) -> None:
        """Takes the gradient as it is now."""
        self.version = self._version()
        self.fate = fate
        self.begun = begun
        """How many backward passes of its window had begun by then."""
        self.left = left
        """What it must still be multiplied by; None if it is unscaled."""

    def _version(self) -> int:
        """What changes with every write to the gradient; -1 if it is gone."""
        grad = self.grad()
        return -1 if grad is None else grad._version

    def is_of(self, param: Tensor) -> bool:
        """Whether `param` still has this very gradient tensor, whatever it holds now."""
        grad = self.grad()
        return grad is not None and param.grad is grad

    def untouched(self) -> bool:
        """Whether the gradient is still in its place and nobody wrote to it, even to clear it."""
        param = self.param()
        return param is not None and self.is_of(param) and self._version() == self.version


Marks = dict[int, Mark]


class _Marked:
    """Many gradients that were marked at once, which is quicker than one by one."""

    def __init__(self, params: list[Tensor], fate: Fate, begun: int, left: Tensor | None) -> None:
        grads: list[Any] = [param.grad for param in params]
        self._params = list(map(weakref.ref, params))
        self._grads = list(map(weakref.ref, grads))
        self._versions = [grad._version for grad in grads]
        self._facts = fate, begun, left

    def marks(self) -> Marks:
        """A mark for each that is still there."""
        marks = {}
        for param_ref, grad_ref, version in zip(
            self._params, self._grads, self._versions, strict=True
        ):
            param, grad = param_ref(), grad_ref()
            if param is not None and grad is not None and param.grad is not None:
                mark = marks[id(param)] = Mark(param, *self._facts)
                mark.grad, mark.version = grad_ref, version
        return marks

    def ids(self) -> set[int]:
        """The ids of their parameters."""
        return {id(param) for ref in self._params if (param := ref()) is not None}

    def are(self, params: list[Tensor]) -> bool:
        """Whether they are those of `params`."""
        return len(params) == len(self._params) and all(
            param is ref() for param, ref in zip(params, self._params, strict=True)
        )

    def untouched(self, params: list[Tensor]) -> bool:
        """Whether the gradients of `params`, whose they are, are as they were or gone."""
        for param, ref, version in zip(params, self._grads, self._versions, strict=True):
            grad: Any = param.grad
            if grad is None:
                continue
            same: bool = grad is ref()
            if not same or grad._version != version:
                return False
            # The values of a sparse gradient can change without its version.
            if grad.layout is not torch.strided:
                return False
        return True


class Window:
    """One scale, the losses that were multiplied by it, and the gradients that came of them."""

    def __init__(self, scale: Tensor, before: Marks, captured: bool = False) -> None:
        self.scale = scale
        """A snapshot of the scale (float32)."""
        self.captured = captured
        """Whether it was opened inside a CUDA graph. Then every replay takes the snapshot anew, and
        writes gradients without a trace that Python could see: nothing is remembered of them."""
        # Every replay makes it anew, so it must be part of the capture.
        self._inv_scale = scale.reciprocal() if captured else None
        self.begun = 0
        """How many backward passes have begun."""
        self.unreduced = False
        """Whether one of them left gradients that other ranks have not heard of, in no_sync()."""
        self.half = False
        """Whether one of the losses was float16."""
        self.closed = False
        """Whether an `update()` has ended it; the next loss opens another window."""
        self.loss_finite: Tensor | None = None
        """bool: every loss was finite; None where the rule about losses is off."""
        self.penalty_finite: Tensor | None = None
        """bool: every gradient that `grad()` handed out was finite; None if there were none."""
        self.finite: Tensor | None = None
        """bool: what an `update()` has reported of this window; None before the first."""
        self.blank: Tensor | None = None
        """bool: no loss was scaled, and every gradient was 0: nobody's backward pass, but somebody
        who makes an optimizer allocate its state. None where losses were scaled."""
        self.own_passes = 0
        """How many of the backward passes were of losses with a scale of their own."""
        self.idle: Tensor | None = None
        """bool: whether no rank had a gradient; None where this one has, or is alone."""
        self.common: Tensor | None = None
        """bool: whether any rank had a backward pass of a loss with the common scale; None where
        this rank alone decides."""
        self.losses: dict[int | str, OwnLoss] = {}
        """The losses that have a scale of their own."""
        self.spared = 0
        """How many of the backward passes are left out, and not the whole step, if they are bad."""
        self.spared_begun = 0
        """How many of `begun` were these."""
        self.dropped: Tensor | None = None
        """int32: how many of them were bad; None without any."""
        self._weighed: Marks = {}
        self._users: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        self._one_by_one: Marks = {}
        self._at_once: _Marked | None = None
        self._waiting = {
            key: mark
            for key, mark in before.items()
            if mark.fate is Fate.PASSED and mark.untouched()
        }

    def begin(self) -> None:
        """Notes that a backward pass of this window has begun; called from inside it."""
        self.begun += 1
        self.blank = None
        self.look_at_waiting()
        if self._waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self.note_added)

    def look_at_waiting(self) -> None:
        """Looks at gradients that were passed by, before a backward pass may add to them."""
        # Whoever wrote to a waiting gradient before the pass, say to clear it, made it his own.
        self._waiting = {key: mark for key, mark in self._waiting.items() if mark.untouched()}
        for mark in self._waiting.values():
            # For those who clear through `.grad.data`, which leaves no trace.
            mark.nonzero = mark.grad().any()  # type: ignore[union-attr]

    def note_added(self) -> None:
        """Notes, when a backward pass has ended, which waiting gradients it added to."""
        for mark in self._waiting.values():
            if not mark.untouched():
                left = self.inv_scale if mark.left is None else mark.left
                conflict = left.ne(self.inv_scale)
                if mark.nonzero is not None:
                    conflict = conflict & mark.nonzero
                mark.conflict = conflict if mark.conflict is None else conflict | mark.conflict
                mark.renew(mark.fate, self.begun, self.inv_scale)

    def add_loss(self, loss_id: int | str, scale: Tensor) -> OwnLoss:
        """Takes in a loss with a `scale` of its own, which stays as it is in this window."""
        self.losses[loss_id] = OwnLoss(scale)
        return self.losses[loss_id]

    def take_losses(self) -> list[tuple[int | str, OwnLoss]]:
        """The losses with a scale of their own that have not been judged yet."""
        new = [(key, own) for key, own in self.losses.items() if own.passes and not own.judged]
        for _, own in new:
            own.judged = True
        return new

    @property
    def inv_scale(self) -> Tensor:
        """What its gradients must be multiplied by (float32); always the same tensor."""
        if self._inv_scale is None:
            with torch.inference_mode(False):
                self._inv_scale = self.scale.reciprocal()
        return self._inv_scale

    def note_spared(self, finite: Tensor, begun: int) -> None:
        """Counts a backward pass of so many losses that is left out if it was not `finite`."""
        self.spared += 1
        self.spared_begun += begun
        bad = (~move(finite, self.scale.device)).to(torch.int32)
        self.dropped = bad if self.dropped is None else self.dropped + bad

    def weigh(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` whose gradients nobody has asked for here; each comes once."""
        there = [p for p in params if p.grad is not None]
        new = [p for p in there if id(p) not in self._weighed or not self._weighed[id(p)].is_of(p)]
        self._weighed |= {id(p): Mark(p, Fate.USED, self.begun, None) for p in new}
        return new

    def note_loss(self, loss: Tensor) -> None:
        """Remembers whether `loss` was finite."""
        # Two kernels on a GPU, where `isfinite` takes four.
        finite = (loss.detach() * 0).eq(0)
        self.loss_finite = _and(
            self.loss_finite, finite.all() if loss.numel() != 1 else finite.reshape(()), self.scale
        )

    def note_penalty(self, grads: Iterable[Tensor | None]) -> None:
        """Remembers whether the scaled `grads` of a penalty were finite."""
        for grad in grads:
            if grad is not None:
                flag = torch.isfinite(grad.detach()).all()
                self.penalty_finite = _and(self.penalty_finite, flag, self.scale)

    def is_unjudged(self) -> bool:
        """Whether no `update()` has had it yet, and its gradients alone decide about the scale."""
        odd = self.losses or self.spared or self.blank is not None
        odd = odd or self.penalty_finite is not None
        return self.finite is None and not odd

    def is_plain(self) -> bool:
        """Whether all gradients are this window's own, and nobody has had or judged them yet."""
        return self.is_unjudged() and not (self._has_marks() or self._waiting or self._users)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that `optimizer` has the gradients of this window now."""
        self._users[id(optimizer)] = (weakref.ref(optimizer), self.begun)

    def used_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` has had gradients of this window."""
        ref, _ = self._users.get(id(optimizer), (None, 0))
        return ref is not None and ref() is optimizer

    def begun_since(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a backward pass has begun since `optimizer` had the gradients."""
        return self.used_by(optimizer) and self._users[id(optimizer)][1] != self.begun

    def mark(
        self, params: Iterable[Tensor], left: Tensor | None = None, fate: Fate = Fate.USED
    ) -> None:
        """Remembers the gradients of `params` as they are now, with what is `left` in them."""
        if self.captured:
            return
        several = [param for param in params if param.grad is not None]
        at_once = self._at_once
        if not self._one_by_one and (at_once is None or at_once.are(several)):
            self._at_once = _Marked(several, fate, self.begun, left)
            return
        for param in several:
            mark = self._marks.get(id(param))
            if mark is not None and mark.is_of(param):
                mark.renew(fate, self.begun, left)
            else:
                self._marks[id(param)] = Mark(param, fate, self.begun, left)

    @property
    def _marks(self) -> Marks:
        """What is remembered of every gradient, by the id of its parameter."""
        if self._at_once is not None:
            self._one_by_one |= self._at_once.marks()
            self._at_once = None
        return self._one_by_one

    def _has_marks(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._one_by_one) or self._at_once is not None

    def forget(self, params: Iterable[Tensor]) -> None:
        """Drops what is remembered of the gradients of `params`, which are made anew."""
        for param in params:
            self._marks.pop(id(param), None)

    def still(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` whose gradients are still there as they were marked."""
        params = list(params)
        marks = self._marks if params else {}
        return [p for p in params if id(p) in marks and marks[id(p)].untouched()]

    def had(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` whose gradients an optimizer has had, and nobody wrote to since."""
        return [p for p in self.still(params) if self._used(p) is not None]

    def _used(self, param: Tensor) -> Mark | None:
        """The mark of the gradient of `param`, if an optimizer has had it."""
        mark = self._marks.get(id(param))
        if mark is None or mark.fate is Fate.PASSED or not mark.is_of(param):
            return None
        return mark

    def unscaled(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` is there that an optimizer has had, and not cleared."""
        used = (self._used(param) for param in params)
        return any(mark is not None and mark.fate is not Fate.CLEARED for mark in used)

    def known(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` that still have the gradient tensor that an optimizer has had."""
        return [p for p in params if self._used(p) is not None]

    def fresh(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` with another gradient tensor than the marked one, or never marked."""
        marks = self._marks
        return [p for p in params if id(p) not in marks or not marks[id(p)].is_of(p)]

    def edited(self, params: Iterable[Tensor]) -> bool:
        """Whether somebody may have written to the gradients of `params` since they were marked."""
        params = list(params)
        if self._at_once is not None and self._at_once.are(params):
            return not self._at_once.untouched(params)
        for param in params:
            mark = self._marks.get(id(param))
            if param.grad is None:
                continue
            # The values of a sparse gradient can change without its version.
            if mark is None or not mark.untouched() or param.grad.layout is not torch.strided:
                return True
        return False

    def split(self, params: list[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Mark]]]:
        """The `params` whose gradients have this window's scale, and those with something else.

        Raises:
            CallOrderError: gradients of different scales were added up, which nothing can undo.
        """
        if not self._has_marks() and not self._waiting:
            return params, []
        fresh, other = [], []
        for param in params:
            mark = self._other(param)
            if mark is None:
                fresh.append(param)
            else:
                other.append((param, mark))
        return fresh, other

    def _other(self, param: Tensor) -> Mark | None:
        """The mark that says what is left in this gradient; None if it is this window's scale."""
        mark = self._marks.get(id(param))
        if mark is not None and mark.is_of(param):
            if mark.fate is Fate.PASSED:
                _refuse_conflict(mark)
                return None if mark.left is self.inv_scale else mark
            if mark.fate is Fate.OPAQUE:
                raise CallOrderError(
                    "A parameter that two optimizers share was stepped by one that unscales by "
                    "itself. Call scaler.unscale_() for that optimizer before its step()."
                )
            if mark.begun == self.begun or mark.untouched():
                return mark
            raise CallOrderError(
                "A parameter that two optimizers share was unscaled for the first one, and then "
                "another backward pass may have added to it. Call zero_grad(set_to_none=True) "
                "before that backward pass."
            )
        mark = self._waiting.get(id(param))
        if mark is None or not mark.untouched():
            return None
        _refuse_conflict(mark)
        return None if mark.left is self.inv_scale else mark

    def close(self, seen: Iterable[torch.optim.Optimizer | None]) -> None:
        """Ends the window, unless it has gradients that nobody has used yet.

        Remembers the gradients that `seen` optimizers passed by.
        """
        pending = self.begun and not self._users
        if self.captured or pending:
            return
        self.closed = True
        for optimizer in seen:
            if optimizer is None or self.used_by(optimizer):
                continue
            for param in params_with_grad(optimizer):
                mark = self._marks.get(id(param))
                if mark is not None and mark.is_of(param):
                    continue
                older = self._waiting.get(id(param))
                if older is not None and older.untouched():
                    self._marks[id(param)] = older
                else:
                    self._marks[id(param)] = Mark(param, Fate.PASSED, self.begun, self.inv_scale)

    def leftovers(self) -> Marks:
        """The marks of all gradients that were passed by, in this window or before."""
        # Those marked at once have been used, also where they were waiting before.
        used = self._at_once.ids() if self._at_once is not None and self._waiting else set()
        waiting = {key: mark for key, mark in self._waiting.items() if key not in used}
        return {**waiting, **self._one_by_one}


def _refuse_conflict(mark: Mark) -> None:
    """Raises if gradients of different scales were added up. Reading that waits for the device."""
    if mark.conflict is not None and mark.untouched() and bool(mark.conflict):
        raise CallOrderError(
            "Gradients made with another scale were left in .grad and added to. Call "
            "optimizer.zero_grad() before the backward pass, or step this optimizer before "
            "every update()."
        )


def _and(known: Tensor | None, flag: Tensor, like: Tensor) -> Tensor:
    """Both flags, on the device of `like`."""
    flag = move(flag, like.device)
    return flag if known is None else known & flag
