"""Functions of the user that cast their arguments, at O1 and inside of no `disable_casts()`.

Nothing of torch is replaced: autocast, around the models' forward passes, is torch's own. An
attribute of a module is replaced only where `register_*_function` asks for it, from
`amp.initialize` on and until `uninstall()`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.compat.apex.session import SESSION, no_autocast
from gradscale.errors import SettingError

CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What is cast: narrower formats were chosen on purpose, or are no floating-point numbers."""

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


def half_function(fn: Function) -> Function:
    """`fn`, called with float16 arguments."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not SESSION.casting:
            return fn(*args, **kwargs)
        return fn(*cast_all(args, torch.float16), **cast_all(kwargs, torch.float16))

    return wrapper


def float_function(fn: Function) -> Function:
    """`fn`, called with float32 arguments and without autocast."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not SESSION.casting:
            return fn(*args, **kwargs)
        with no_autocast():
            return fn(*cast_all(args, torch.float32), **cast_all(kwargs, torch.float32))

    return wrapper


def promote_function(fn: Function) -> Function:
    """`fn`, called with arguments in the widest of their formats."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        dtypes = set(_formats((args, kwargs))) if SESSION.casting else set()
        if len(dtypes) < 2:
            return fn(*args, **kwargs)
        widest = functools.reduce(torch.promote_types, dtypes)
        return fn(*cast_all(args, widest), **cast_all(kwargs, widest))

    return wrapper


def cast_all(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`.

    Goes through lists, tuples and dicts. An object with a method `to()` is given the format, as
    Apex asks of batches of a class of one's own.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CAST else value
    if isinstance(value, nn.Module):
        return value
    if callable(getattr(value, "to", None)):
        return value.to(dtype)
    if isinstance(value, dict):
        changed = {key: cast_all(item, dtype) for key, item in value.items()}
        return changed if type(value) is dict else _same_kind(value, changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_all(item, dtype) for item in value))
    if type(value) in (list, tuple):
        return type(value)(cast_all(item, dtype) for item in value)
    return value


def _same_kind(value: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of `value`, a dict of another kind (an OrderedDict, a model's output)."""
    same = copy.copy(value)
    same.update(changed)
    return same


def _formats(value: Any) -> Iterator[torch.dtype]:
    """The formats of the tensors in `value` that would be cast."""
    if isinstance(value, Tensor):
        yield from (dtype for dtype in CAST if value.dtype is dtype)
    elif isinstance(value, dict):
        yield from _formats(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _formats(item)


class Registry:
    """What was registered, and what it replaced."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Any, str, Wrapper]] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def add(self, module: Any, name: str, wrapper: Wrapper) -> None:
        """Notes that the function `name` of `module` is wanted in another form."""
        if not callable(getattr(module, name, None)):
            raise SettingError(
                f"name must be that of a function of {getattr(module, '__name__', module)!r}, got "
                f"{name!r}."
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
    """Has `module.name` called with float16 arguments from `amp.initialize` on."""
    REGISTRY.add(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Has `module.name` called with float32 arguments from `amp.initialize` on."""
    REGISTRY.add(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Has `module.name` called with the widest of its formats from `amp.initialize` on."""
    REGISTRY.add(module, name, promote_function)
