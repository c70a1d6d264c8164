"""Triton's interpreter prepares its language once for a launch, not at every call of a function.

For each function that a kernel calls, it looks through all names of the language and finds them
prepared already: half of the time of a kernel, and no difference to what it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class _Nothing:
    """What there is to put back after a call for which nothing was prepared."""

    def restore(self) -> None: ...


def install() -> None:
    """Has the interpreter leave alone what is prepared. Without an interpreter, does nothing."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    plain: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if plain is None or getattr(plain, "looks_first", False):
        return
    language = interpreter.tl
    nothing, is_builtin = _Nothing(), language.core.is_builtin

    @functools.cache
    def modules(function: Any) -> list[Any]:
        """Those of the language that `function` may use, and the first in any case."""
        names = list(function.__globals__.values())
        return [language, *(each for each in [language.core] if any(each is n for n in names))]

    def patch(function: Any) -> Any:
        # What is prepared is marked as a builtin no longer. Functions of the language's own library
        # use the second module, and a launch puts back the first alone.
        if not any(is_builtin(each.load) for each in modules(function)):
            return nothing
        return plain(function)

    patch.looks_first = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
