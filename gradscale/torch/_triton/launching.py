"""Launching kernels with little host time.

Triton looks at every argument of every launch to find the compiled form of a kernel that suits it:
21 us with ten arguments, against 12 us for the compiled form itself (host of an H200). So our
kernels are written such that the form depends on the formats of the arguments and on the constants
alone, and we keep it by those.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

_SMALL = range(-(2**31), 2**31)
"""Whole numbers that Triton passes in 32 bits."""


class Kernel:
    """A Triton kernel whose compiled forms are kept."""

    def __init__(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
        # Nothing may depend on the value of an argument, such as an address that is aligned.
        jit = triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)
        self._function = jit(function)
        self._forms: dict[Any, Any] = {}

    def __call__(
        self, programs: int, arguments: Sequence[Any], constants: Sequence[Any], **options: Any
    ) -> None:
        """Launches `programs` programs; `constants` are the last parameters of the kernel."""
        formats = [_format(argument) for argument in arguments]
        key = (torch.cuda.current_device() if _on_cuda(arguments) else -1, *formats, *constants)
        form = self._forms.get(key)
        if form is not None:
            form[(programs, 1, 1)](*arguments, *constants)
            return
        form = self._function[(programs,)](*arguments, *constants, **options)
        if form is not None:  # the interpreter compiles nothing
            self._forms[key] = form


def _format(argument: Any) -> Any:
    """What the compiled form of a kernel depends on."""
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument in _SMALL if isinstance(argument, int) else float


def _on_cuda(arguments: Sequence[Any]) -> bool:
    """Whether the kernel runs on a GPU; the first argument is always a tensor."""
    return bool(arguments[0].is_cuda)
