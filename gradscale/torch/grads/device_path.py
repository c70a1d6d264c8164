"""Which backend a device takes, found out by running a kernel on it.

Neither the compute capability nor the version of Triton says whether kernels work: below 8.0 Triton
promises nothing, and above it a machine may lack a C compiler, or have an old driver. So one kernel
is run once per device and process, before the first step there, and its results are compared with
torch's. Where it fails, torch operations take its place, and a line of the log says so; that is a
warning, because steps are slower then and the user may be able to repair it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import torch

from gradscale.torch.grads.upload import capturing

_LOG = logging.getLogger("gradscale")
_SUPPORTED = (8, 0)
"""The compute capability from which on Triton is supported: every format compiles if one does."""
_trying = Lock()


class DevicePath(NamedTuple):
    """Which backend is used on a device."""

    kernels: bool
    """Whether it is "triton"; else it is "reference"."""
    why: str

    @property
    def name(self) -> str:
        """The name of the backend."""
        return "triton" if self.kernels else "reference"


known: dict[int, DevicePath] = {}
"""What was found out about CUDA devices, by their numbers."""
_captured: set[int] = set()
"""CUDA devices on which a graph was captured before that."""


def kernels_work(index: int) -> bool:
    """Whether kernels are used on a CUDA device; False in a capture if that is not known yet."""
    if not capturing():
        return path_of(torch.device("cuda", index)).kernels
    if index not in _captured:
        _captured.add(index)
        _LOG.warning(
            "cuda:%d: a CUDA graph is captured before the first step on this device, so the graph "
            "uses torch operations in place of kernels. Run a step before the capture.",
            index,
        )
    return False


def path_of(device: torch.device) -> DevicePath:
    """The backend for tensors on `device`, and why.

    The first call for a CUDA device runs a kernel, **waits for the device**, and logs a warning if
    the kernels do not work.
    """
    if device.type != "cuda":
        return DevicePath(False, "the kernels are for CUDA")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _trying:
        if index not in known:
            # In a thread of its own: a mode that is active in this one, such as that of fake
            # tensors, is not active there, and the stream is another.
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(_tried, torch.device("cuda", index)).result()
            if not found.kernels:
                name = torch.cuda.get_device_name(index)
                _LOG.warning(
                    "cuda:%d (%s) uses torch operations in place of kernels: %s.",
                    index,
                    name,
                    found.why,
                )
            known[index] = found
    return known[index]


def _tried(device: torch.device) -> DevicePath:
    """The path of a CUDA `device`, by running a kernel there."""
    if torch.version.hip is not None:
        return DevicePath(False, "the kernels are for NVIDIA GPUs, and this torch is for ROCm")
    if importlib.util.find_spec("triton") is None:
        return DevicePath(False, "Triton is not installed")
    capability = torch.cuda.get_device_capability(device)
    where = f"compute capability {capability[0]}.{capability[1]}"
    formats = (torch.float32, torch.float16, torch.bfloat16)
    # Where waiting for the device is an error, this must wait all the same. Elsewhere the mode is
    # left alone: torch warns when it is set for the first time, also to what it is.
    watched = torch._C._cuda_get_sync_debug_mode()
    if watched:
        torch._C._cuda_set_sync_debug_mode(0)
    try:
        with torch.cuda.device(device):
            return run_kernel(device, where, formats[: 1 if capability >= _SUPPORTED else None])
    finally:
        if watched:
            torch._C._cuda_set_sync_debug_mode(watched)


def run_kernel(device: torch.device, where: str, formats: Sequence[torch.dtype]) -> DevicePath:
    """The path that follows from the results of a kernel on `device`, the current one.

    Args:
        device: Where it runs.
        where: The kind of device, for the reason.
        formats: Those of the gradients that it is given.
    """
    try:
        probe = importlib.import_module("gradscale.torch.grads.triton.probe")
        where = f"{where}, Triton {probe.VERSION}"
        wrong = probe.fault(device, formats)
    except torch.cuda.OutOfMemoryError:  # says nothing about kernels, and the step has no memory
        raise
    except Exception as error:  # of the import, the compiler, ptxas, the C compiler, the driver
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return DevicePath(False, f"a kernel fails ({where}): {text:.300}")
    if wrong is not None:
        return DevicePath(False, f"a kernel gives wrong results ({where}): {wrong}")
    return DevicePath(True, f"the kernels compile and give the right results ({where})")
