"""Functions of the user that cast their arguments while a handle is active.

That is from `amp.init`, or `amp.initialize` at O1, on, but not inside of `disable_casts()`. Nothing
of torch is replaced: autocast is torch's own. An attribute of a module is replaced only where
`register_*_function` asks for it, for as long as the handle is active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.compat.apex.session import SESSION, no_autocast
from gradscale.errors import SettingError
from gradscale.torch.mixed_precision.containers import mapped

CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What is cast: narrower formats were chosen on purpose, or are no floating-point numbers."""

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


def half_function(fn: Function) -> Function:
    """`fn`, called with float16 arguments."""
    return _casting(fn, lambda _: torch.float16)


def float_function(fn: Function) -> Function:
    """`fn`, called with float32 arguments and without autocast."""
    return _casting(fn, lambda _: torch.float32, no_autocast)


def promote_function(fn: Function) -> Function:
    """`fn`, called with arguments in the widest of their formats."""
    return _casting(fn, _widest)


def _casting(
    fn: Function,
    choose: Callable[[Any], torch.dtype | None],
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Function:
    """`fn`, called inside `context` with arguments cast to what `choose` returns; None: as is."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs)) if SESSION.casting else None
        if dtype is None:
            return fn(*args, **kwargs)
        with context():
            return fn(*cast_all(args, dtype), **cast_all(kwargs, dtype))

    return wrapper


def cast_all(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`.

    Goes through lists, tuples, dicts and dataclasses. An object with a method `to()` is given the
    format, as Apex asks of batches of a class of one's own.
    """
    return mapped(value, functools.partial(_cast, dtype=dtype), deep=True, whole=_has_to)


def _has_to(value: Any) -> bool:
    """Whether `value` is a tensor, a module, or of a class of the user's own that is cast."""
    # Those of torch by their classes: Dynamo cannot tell whether a method of theirs is callable.
    return isinstance(value, (Tensor, nn.Module)) or callable(getattr(value, "to", None))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value`, which has a method `to()`, in `dtype`; itself if that is not for us to cast."""
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.dtype not in CAST):
        return value
    return value.to(dtype)


def _widest(value: Any) -> torch.dtype | None:
    """The widest format of the tensors in `value` that would be cast; None if all have one."""
    found: set[torch.dtype] = set()

    def note(tensor: Tensor) -> Tensor:
        found.add(tensor.dtype)
        return tensor

    mapped(value, note, deep=True)
    formats = found.intersection(CAST)
    return functools.reduce(torch.promote_types, formats) if len(formats) > 1 else None


class Registry:
    """What was registered, and what it replaced."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Any, str, Wrapper]] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def add(self, module: Any, name: str, wrapper: Wrapper) -> None:
        """Notes that the function `name` of `module` is wanted in another form."""
        if not callable(getattr(module, name, None)):
            raise SettingError(
                f"name must be the name of a function of {getattr(module, '__name__', module)!r}, "
                f"got {name!r}."
            )
        self._wanted.append((module, name, wrapper))

    def apply(self) -> None:
        """Replaces what was registered so far."""
        self.restore()
        for module, name, wrapper in self._wanted:
            function = getattr(module, name)
            self._replaced.append((module, name, function))
            setattr(module, name, wrapper(function))

    def restore(self) -> None:
        """Puts back what was replaced."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def forget(self) -> None:
        """Puts back what was replaced, and registers nothing any more."""
        self.restore()
        self._wanted.clear()


REGISTRY = Registry()


def register_half_function(module: Any, name: str) -> None:
    """Has `module.name` called with float16 arguments while a handle is active."""
    REGISTRY.add(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Has `module.name` called with float32 arguments while a handle is active."""
    REGISTRY.add(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Has `module.name` called with the widest of its formats while a handle is active."""
    REGISTRY.add(module, name, promote_function)
