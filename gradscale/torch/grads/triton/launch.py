"""Launching kernels with little host time.

Triton looks at every argument of every launch to find the compiled form of a kernel that suits it:
21 us with ten arguments, against 6 us for the launch itself (host of an H200, in a tight loop;
three times that among other work). So our kernels are compiled such that their form depends on the
formats of the arguments and on the constants alone, and a form is kept by what decides about those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

_KEPT = 256
"""Launchers of forms that are kept."""


class Kernel:
    """A Triton kernel whose compiled forms are kept.

    Its constants come last, and an argument has the same format in every call with the same
    constants and the same `formats`; a whole number is always below 2**31.
    """

    def __init__(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
        # Nothing may depend on the value of an argument, such as an address that is aligned.
        jit = triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)
        self._function = jit(function)
        self._launchers: dict[Any, Callable[..., object]] = {}

    def __call__(
        self,
        programs: int,
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        formats: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        """Launches `programs` programs on the device of the first argument, the current one."""
        cuda = arguments[0].is_cuda
        key = (torch._C._cuda_getDevice() if cuda else -1, programs, formats, constants)
        launch = self._launchers.get(key)
        if launch is not None:
            launch(*arguments, *constants)
            return
        form = self._function[(programs,)](*arguments, *constants, **options)
        if cuda and form is not None:  # the interpreter compiles nothing
            if len(self._launchers) >= _KEPT:
                self._launchers.clear()
            self._launchers[key] = form[(programs, 1, 1)]


def formats_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """The `formats` of a launch with one argument that may have several, or be missing."""
    return () if tensor is None else (tensor.dtype,)
