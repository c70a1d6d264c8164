"""Which backend reads and writes gradients: "triton" kernels, or "reference" torch operations.

The kernels are for CUDA devices on which they work: see device_path.py. `use("triton")` asks for
them everywhere, untried, which works on the CPU only with Triton's interpreter. Tables of addresses
are kept on the device as long as the tensors have the same addresses, sizes and formats: sending
them again would cost a copy in every step.
"""

from __future__ import annotations

import functools
import importlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError
from gradscale.torch.grads import device_path
from gradscale.torch.grads.dtensor import all_plain
from gradscale.torch.grads.upload import capturing as capturing

if TYPE_CHECKING:
    from gradscale.torch.grads.triton.tables import Table

PATHS = ("auto", "triton", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Values = dict[tuple[torch.device, torch.dtype], list[Tensor]]
"""Dense real tensors by device and dtype: what a foreach operation takes at once."""
_DTYPE = attrgetter("dtype")
_KEPT_TABLES = 64

_path = "auto"
_located: OrderedDict[Any, TensorTable] = OrderedDict()


@contextmanager
def use(path: str) -> Iterator[None]:
    """Chooses "triton", "reference" or, as without this, "auto" inside the block."""
    global _path
    if path not in PATHS:
        raise SettingError(f"path must be one of {', '.join(PATHS)}, got {path!r}.")
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


def uses_triton(device: torch.device) -> bool:
    """Whether the kernels are used for tensors on `device`."""
    if _path == "reference" or torch.compiler.is_compiling():
        return False
    if device.type != "cuda":
        return _path == "triton"
    # Of torch._C, because torch.cuda looks first whether CUDA is in use, which it is.
    current = torch._C._cuda_getDevice()
    # A kernel is launched on the current device, whatever the addresses mean elsewhere.
    if device.index is not None and device.index != current:
        return False
    if _path == "triton":
        return True
    found = device_path.known.get(current)
    return device_path.kernels_work(current) if found is None else found.kernels


@functools.cache
def module(name: str) -> Any:
    """A module of `gradscale.torch.grads.triton`, imported when it is first used.

    The kernels are in "measure", "decide", "consensus", "rescale" and "fused_step".
    """
    return importlib.import_module(f"gradscale.torch.grads.triton.{name}")


def fit(values: Values) -> bool:
    """Whether the kernels can take all of `values`."""
    devices = {device for device, _ in values}
    if len(devices) != 1 or not all(dtype in DTYPES for _, dtype in values):
        return False
    if not uses_triton(next(iter(devices))):
        return False
    return all(all_plain(group) and all(map(dense, group)) for group in values.values())


def dense(tensor: Tensor) -> bool:
    """Whether the elements of `tensor` are adjacent in memory, each once, in whatever order."""
    return tensor.is_contiguous() or _covers(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=4096)
def _covers(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether such strides visit as many adjacent places as there are elements."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class TensorTable(NamedTuple):
    """Gradients that kernels can take, by their addresses."""

    groups: list[tuple[torch.dtype, Table]]
    """What the kernels take: a format and a table for each."""
    keys: list[tuple[torch.device, torch.dtype]]
    """Device and format of every group; one for all groups, if they have the same."""
    facts: Any = None
    """Formats, devices, sizes, layouts and addresses for which it was made, as `locate` compares
    them."""

    def rows(self, values: Tensor) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        """The rows of `values`, one for every tensor, by their keys."""
        if len(self.keys) == 1:
            return {self.keys[0]: values}
        parts = values.split([table.tensors for _, table in self.groups])
        return dict(zip(self.keys, parts, strict=True))


class Addresses(NamedTuple):
    """Where tensors are in memory."""

    pointers: list[int]
    layout: bool | list[tuple[int, ...]]
    """True if all are contiguous, else their strides."""


def addresses_of(tensors: Sequence[Any]) -> Addresses:
    """The addresses of `tensors`, which must be dense and of no subclass."""
    pointers = list(map(Tensor.data_ptr, tensors))
    flat = all(map(Tensor.is_contiguous, tensors))
    return Addresses(pointers, flat or [tensor.stride() for tensor in tensors])


def _stream(device: torch.device) -> int | None:
    """The current stream, which tables and their workspaces belong to.

    None while a CUDA graph is captured: what it uses must not be used by anything else.
    """
    if device.type != "cuda":
        return 0
    if capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def new_table(sizes: Sequence[int], device: torch.device) -> Table:
    """A table for lists of tensors of these `sizes`."""
    return module("tables").Table(sizes, device)


def locate(params: list[Tensor], grads: list[Any]) -> TensorTable | None:
    """The table of `grads`, those of `params`; None if kernels cannot take them.

    The one of the last call is returned if formats, devices, sizes, layouts and addresses are the
    same; if only addresses differ, its tables are sent the new ones.
    """
    # A subclass (DTensor, say) need not keep its numbers at its address.
    if not all_plain(grads):
        return None
    try:
        found = addresses_of(grads)
    except RuntimeError:  # sparse tensors have no address
        return None
    pointers = found.pointers
    # Lists of one kind of value, because pairs take twice as long to make.
    kinds = list(map(_DTYPE, grads)), list(map(Tensor.get_device, grads))
    facts = (*kinds, list(map(Tensor.numel, grads)), found.layout)
    stream = _stream(params[0].device)
    key = (stream, id(params[0]), len(params))
    known = None if stream is None else _located.get(key)
    if known is not None and known.facts[0] == facts:
        if known.facts[1] != pointers:
            for places, (_, table) in zip(known.facts[2], known.groups, strict=True):
                whole = len(places) == len(pointers)
                table.point_to(pointers if whole else [pointers[place] for place in places])
            known.facts[1][:] = pointers
        return known
    order: dict[Any, list[int]] = {}
    for place, grad in enumerate(grads):
        order.setdefault((grad.device, grad.dtype), []).append(place)
    if not fit({kind: [grads[place] for place in places] for kind, places in order.items()}):
        return None
    groups = []
    for (device, dtype), places in order.items():
        table = new_table([grads[place].numel() for place in places], device)
        table.point_to([pointers[place] for place in places])
        groups.append((dtype, table))
    made = TensorTable(groups, list(order), (facts, pointers, list(order.values())))
    if stream is not None:
        _located[key] = made
        if len(_located) > _KEPT_TABLES:
            _located.popitem(last=False)
    return made
