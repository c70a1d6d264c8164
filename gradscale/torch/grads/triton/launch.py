"""Launching kernels with little host time.

Triton looks at every argument of every launch to find the compiled form of a kernel that suits it:
21 us with ten arguments, against 6 us for the launch itself (host of an H200, in a tight loop;
three times that among other work). So our kernels are compiled such that their form depends on the
formats of the arguments and on the constants alone, and a form is kept by what decides about those.
Triton also calls the hooks of profilers in every launch; where there are none, that is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs

_KEPT = 256
"""Launchers of forms that are kept."""


class Kernel:
    """A Triton kernel whose compiled forms are kept.

    Its arguments are pointers, then numbers, then constants. An argument has the same format in
    every call with the same constants and the same `formats`; a whole number is below 2**31.
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
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        formats: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        """Launches `programs` programs on the device of the last tensor, the current one."""
        cuda = tensors[-1].is_cuda  # others may be in pinned memory
        device = torch._C._cuda_getDevice() if cuda else -1
        key = (device, programs, formats, constants)
        launch = self._launchers.get(key)
        if launch is not None:
            # As addresses: of a tensor, Triton asks the driver what it is, for every argument.
            addresses = map(torch.Tensor.data_ptr, tensors)
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch(stream, *addresses, *numbers, *constants)
            return
        form = self._function[(programs,)](*tensors, *numbers, *constants, **options)
        if cuda and form is not None:  # the interpreter compiles nothing
            if len(self._launchers) >= _KEPT:
                self._launchers.clear()
            self._launchers[key] = launcher(form, programs)


def launcher(form: Any, programs: int) -> Callable[..., object]:
    """A function that launches a compiled kernel, given the stream and all arguments."""
    with_hooks = form[(programs, 1, 1)]
    run, function, metadata = form.run, form.function, form.packed_metadata

    def launch(stream: int, *arguments: Any) -> None:
        if _has_hooks():
            with_hooks(*arguments, stream=stream)
        else:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def _has_hooks() -> bool:
    """Whether a profiler wants to be called when a kernel is launched."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def formats_of(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """The `formats` of a launch with one argument that may have several, or be missing."""
    return () if tensor is None else (tensor.dtype,)
