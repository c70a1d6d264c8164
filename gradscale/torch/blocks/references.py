"""References: whether somebody else has a tensor."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

uses: Any = getattr(Tensor, "_use_count", None)
"""How often Python (once) and saved graphs refer to a tensor; None if this torch does not say."""
_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors have the memory of a tensor, by its address; None if this torch does not say."""


def is_held(cell: list[Tensor], known: int = 0) -> bool:
    """Whether something in Python refers to the tensor in `cell`, also weakly, besides `cell`.

    Args:
        cell: A list of one tensor.
        known: How many other references there are that do not count.
    """
    saved = uses(cell[0]) > 1
    count = sys.getrefcount(cell[0])
    return count > 2 + known + (extra() or 0) * saved or weakref.getweakrefcount(cell[0]) > 0


@functools.cache
def extra() -> int | None:
    """How much higher Python counts the references to a tensor that a saved graph refers to.

    None if this torch or this Python counts in a way that is not known here.
    """
    if uses is None:
        return None
    with torch.enable_grad():
        cell = [torch.ones(1, requires_grad=True) * 1]
        if sys.getrefcount(cell[0]) != 2 or uses(cell[0]) != 1:
            return None
        square = cell[0].square()
        if uses(cell[0]) <= 1:
            return None
        found = sys.getrefcount(cell[0]) - 2
        del square
    return found if found in (0, 1) else None


class Counts(NamedTuple):
    """How often something refers to a gradient, and to its memory."""

    python: int
    saved: int
    memory: int
    storage: int


def counts_of(grads: Sequence[Tensor]) -> list[Counts]:
    """The references to each of `grads`, the tuple that `backward()` of a function was given."""
    count = sys.getrefcount
    return [
        Counts(
            count(grad),
            uses(grad),
            _storage_uses((storage := grad.untyped_storage())._cdata),
            count(storage),
        )
        for grad in grads
    ]


def lone(grads: Sequence[Tensor | None], counts: Counts | None) -> list[bool]:
    """Whether nobody but autograd's engine and this call has the memory of each of `grads`.

    Called from `backward()` of a function, with the tuple that it was given. False for a tensor
    that is not plain and contiguous.

    Args:
        grads: Gradients.
        counts: Those of a gradient that nobody else has; None if they are not known.
    """
    if counts is None:
        return [False] * len(grads)
    python, saved, memory, of_storage = counts
    count = sys.getrefcount
    return [
        type(grad) is Tensor
        and count(grad) == python
        and uses(grad) == saved
        and not grad.is_sparse
        and not grad._is_view()
        and grad.is_contiguous()
        and _storage_uses((storage := grad.untyped_storage())._cdata) == memory
        and count(storage) == of_storage
        for grad in grads
    ]


@functools.cache
def counts_of_lone() -> Counts | None:
    """The references to a gradient that nobody else has.

    None if there are references that this torch or this Python does not count.
    """
    if uses is None or _storage_uses is None:
        return None
    fresh = _count(None)
    others = {way: _count(way) for way in ("kept", "saved", "shared", "storage")}
    is_counted = (
        others["kept"].python > fresh.python
        and others["saved"].saved > fresh.saved
        and others["shared"].memory > fresh.memory
        and others["storage"][2:] > fresh[2:]
    )
    return fresh if is_counted else None


class _Counted(torch.autograd.Function):
    """The identity; the references to its gradient are counted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Counts]) -> Tensor:
        ctx.found = found
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.found += counts_of(grads)
        return None, None


class _Given(torch.autograd.Function):
    """The identity; its gradient is a new tensor, to which something else refers too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: str | None, held: list[Any]) -> Tensor:
        ctx.way, ctx.held = way, held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        new = grad * 2
        if ctx.way == "kept":
            ctx.held.append(new)
        elif ctx.way == "saved":
            with torch.enable_grad():
                ctx.held.append(torch.ones(2, requires_grad=True) * new)
        elif ctx.way == "shared":
            ctx.held.append(new.detach())
        elif ctx.way == "storage":
            ctx.held.append(new.untyped_storage())
        return new, None, None


def _count(way: str | None) -> Counts:
    """The references to a gradient that something else has too, in some `way`."""
    found: list[Counts] = []
    counted: Callable[..., Tensor] = _Counted.apply
    given: Callable[..., Tensor] = _Given.apply
    with torch.enable_grad():
        x = counted(torch.ones(2, requires_grad=True), found)
        given(x, way, []).backward(torch.ones(2))
    return found[0]
