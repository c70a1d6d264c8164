"""A window: all backward passes between two steps, and what became of their gradients.

Gradients remember the scale they were made with by belonging to a window, which holds a snapshot of
it: an `update()` that comes early, late or twice cannot change what they are divided by. A `Mark`
remembers one gradient as it was when somebody used it or passed it by, so that nothing is divided
twice and nothing left over is added to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor

from gradscale.errors import CallOrderError
from gradscale.torch.unscale import move


class Fate(Enum):
    """What became of a gradient."""

    USED = "an optimizer has had it"
    PASSED = "its window closed without an optimizer using it"
    CLEARED = "its step was skipped, and it was set to 0"
    OPAQUE = "an optimizer has had it, which may or may not have unscaled it in place"


class Mark:
    """One gradient as it was when its fate was settled."""

    __slots__ = ("fate", "grad", "left", "param", "passes", "version")

    def __init__(self, param: Tensor, fate: Fate, passes: int, left: Tensor | None) -> None:
        self.param = weakref.ref(param)
        self.grad = weakref.ref(param.grad)
        self.version: int = param.grad._version  # type: ignore[union-attr]
        self.fate = fate
        self.passes = passes
        """How many losses its window had scaled by then."""
        self.left = left
        """What it must still be multiplied by; None if it is unscaled."""

    def is_of(self, param: Tensor) -> bool:
        """Whether `param` still has this very gradient tensor, whatever it holds now."""
        grad = self.grad()
        return grad is not None and param.grad is grad

    def untouched(self) -> bool:
        """Whether the gradient is still in its place and nobody wrote to it, even to clear it."""
        param, grad = self.param(), self.grad()
        return (
            param is not None
            and grad is not None
            and param.grad is grad
            and grad._version == self.version
        )


Marks = dict[int, Mark]


class Window:
    """One scale, the losses that were multiplied by it, and the gradients that came of them."""

    def __init__(self, scale: Tensor, before: Marks, captured: bool = False) -> None:
        self.scale = scale
        """A snapshot of the scale (float32)."""
        self.captured = captured
        """Whether it was opened inside a CUDA graph. Then every replay takes the snapshot anew, and
        writes gradients without a trace that Python could see: nothing is remembered of them."""
        self.inv_scale = scale.reciprocal()
        self.passes = 0
        """How many losses were scaled."""
        self.half = False
        """Whether one of the losses was float16."""
        self.closed = False
        """Whether an `update()` came after a use; the next loss opens another window."""
        self.loss_finite: Tensor | None = None
        """bool: every loss was finite; None where the rule about losses is off."""
        self.penalty_finite: Tensor | None = None
        """bool: every gradient that `grad()` handed out was finite; None if there were none."""
        self.finite: Tensor | None = None
        """bool: what an `update()` has reported of this window; None before the first."""
        self._users: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._marks: Marks = {}
        self._suspects = {
            key: mark
            for key, mark in before.items()
            if mark.fate is not Fate.CLEARED and mark.untouched()
        }
        self._stale: Marks = {}

    def watch(self, scaled: Tensor) -> None:
        """Looks, when the backward pass of `scaled` begins, which older gradients are still there.

        Not earlier: they may be cleared between `scale()` and `backward()`.
        """
        if self._suspects and scaled.requires_grad:
            scaled.register_hook(self._convict)

    def _convict(self, _: Tensor) -> None:
        self._stale.update((key, mark) for key, mark in self._suspects.items() if mark.untouched())
        self._suspects = {}

    def note_loss(self, loss: Tensor) -> None:
        """Remembers whether `loss` was finite."""
        self.loss_finite = _and(self.loss_finite, torch.isfinite(loss.detach()).all(), self.scale)

    def note_penalty(self, grads: Iterable[Tensor | None]) -> None:
        """Remembers whether the scaled `grads` of a penalty were finite."""
        for grad in grads:
            if grad is not None:
                flag = torch.isfinite(grad.detach()).all()
                self.penalty_finite = _and(self.penalty_finite, flag, self.scale)

    def used_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` has had the gradients of this window."""
        ref = self._users.get(id(optimizer))
        return ref is not None and ref() is optimizer

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that `optimizer` has the gradients of this window now."""
        self._users[id(optimizer)] = weakref.ref(optimizer)

    @property
    def used(self) -> bool:
        """Whether any optimizer has had its gradients."""
        return bool(self._users)

    def mark(
        self, params: Iterable[Tensor], left: Tensor | None = None, fate: Fate = Fate.USED
    ) -> None:
        """Remembers the gradients of `params` as they are now, with what is `left` in them."""
        for param in params if not self.captured else ():
            if param.grad is not None:
                self._marks[id(param)] = Mark(param, fate, self.passes, left)

    def forget(self, params: Iterable[Tensor]) -> None:
        """Drops what is remembered of the gradients of `params`, which are made anew."""
        for param in params:
            self._marks.pop(id(param), None)

    def still(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` whose gradients are still there as they were marked."""
        marks = self._marks
        return [p for p in params if id(p) in marks and marks[id(p)].untouched()]

    def edited(self, params: Iterable[Tensor]) -> bool:
        """Whether somebody may have written to the gradients of `params` since they were marked."""
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
        if not self._marks and not self._stale:
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
            if mark.left is self.inv_scale:
                return None
            if mark.fate is Fate.OPAQUE:
                raise CallOrderError(
                    "A parameter that two optimizers share was stepped by one that unscales by "
                    "itself. Call scaler.unscale_() for that optimizer before its step()."
                )
            if mark.passes == self.passes or mark.untouched():
                return mark
            raise CallOrderError(
                "A parameter that two optimizers share was unscaled for the first one, and then "
                "another backward pass may have added to it. Call zero_grad(set_to_none=True) "
                "before that backward pass."
            )
        mark = self._stale.get(id(param))
        if mark is None or not mark.is_of(param):
            return None
        if mark.fate is not Fate.PASSED:
            raise CallOrderError(
                "Gradients of an earlier step were left in .grad, unscaled, and scaled ones were "
                "added to them. Call optimizer.zero_grad() between step() and the next backward()."
            )
        if mark.untouched():
            return mark
        if mark.left is not None and bool(
            mark.left != self.inv_scale
        ):  # waits for the device, but only in this rare case
            raise CallOrderError(
                "Gradients made with another scale were left in .grad and added to. Call "
                "optimizer.zero_grad() before the backward pass, or step this optimizer before "
                "every update()."
            )
        return None

    def close(self, seen: Iterable[torch.optim.Optimizer]) -> None:
        """Ends the window if it was used; remembers gradients that `seen` optimizers passed by."""
        if self.captured or not self.used:
            return
        self.closed = True
        for optimizer in seen:
            if self.used_by(optimizer):
                continue
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is None or id(param) in self._marks:
                        continue
                    older = self._stale.get(id(param)) or self._suspects.get(id(param))
                    if older is not None and older.fate is Fate.PASSED and older.untouched():
                        self._marks[id(param)] = older
                    else:
                        self._marks[id(param)] = Mark(
                            param, Fate.PASSED, self.passes, self.inv_scale
                        )

    def leftovers(self) -> Marks:
        """The marks of all gradients that this window knows of."""
        return self._marks


def _and(known: Tensor | None, flag: Tensor, like: Tensor) -> Tensor:
    """Both flags, on the device of `like`."""
    flag = move(flag, like.device)
    return flag if known is None else known & flag
