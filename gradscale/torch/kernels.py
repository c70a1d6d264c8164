"""Which path gradients take: kernels where Triton and the tensors allow, else torch operations.

The kernels are for CUDA; `use("triton")` asks for them everywhere, which works on the CPU only
with Triton's interpreter. Tables of addresses are kept while the sizes of the tensors stay the
same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError
from gradscale.torch.shards import all_plain

if TYPE_CHECKING:
    from gradscale.torch._triton.tables import Table
    from gradscale.torch.unscale import Values

PATHS = ("auto", "triton", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KEPT_TABLES = 64

_path = "auto"
_tables: OrderedDict[Any, Table] = OrderedDict()
_places: OrderedDict[Any, Place] = OrderedDict()


@contextmanager
def use(path: str) -> Iterator[None]:
    """Takes "triton", "reference" or, as without this, "auto" inside the block."""
    global _path
    if path not in PATHS:
        raise SettingError(f"path must be one of {', '.join(PATHS)}, got {path!r}.")
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def take(device: torch.device) -> bool:
    """Whether kernels work on `device`."""
    if _path == "reference" or torch.compiler.is_compiling():
        return False
    if device.type != "cuda":
        return _path == "triton"
    # A kernel is launched on the current device, whatever the addresses mean elsewhere.
    return available() and device.index in (None, torch.cuda.current_device())


def fit(values: Values) -> bool:
    """Whether the kernels can take all of `values`."""
    devices = {device for device, _ in values}
    if len(devices) != 1 or not all(dtype in DTYPES for _, dtype in values):
        return False
    if not take(next(iter(devices))):
        return False
    return all(all_plain([value]) and dense(value) for group in values.values() for value in group)


def dense(tensor: Tensor) -> bool:
    """Whether the elements of `tensor` lie side by side, each once, in whatever order."""
    return tensor.is_contiguous() or _covers(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=4096)
def _covers(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether such strides visit every one of as many places as there are elements."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Place(NamedTuple):
    """Where gradients lie that kernels can take."""

    facts: Any
    """What it is true of, where that is asked again: addresses, layouts, sizes and formats."""
    groups: list[tuple[torch.dtype, Table]]
    keys: list[tuple[torch.device, torch.dtype]]
    """Device and format of every group; one for all groups, if they have the same."""

    def rows(self, values: Tensor) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        """The rows of `values`, one for every tensor, by their keys."""
        if len(self.keys) == 1:
            return {self.keys[0]: values}
        parts = values.split([table.tensors for _, table in self.groups])
        return dict(zip(self.keys, parts, strict=True))


class Spots(NamedTuple):
    """Where tensors lie."""

    addresses: list[int]
    layout: bool | list[tuple[int, ...]]
    """True if all are contiguous, else their strides."""


def spots_of(tensors: Sequence[Any]) -> Spots | None:
    """Where `tensors` lie; None if one is missing, sparse, or of a kind of its own."""
    # A subclass (DTensor, say) need not keep its numbers where its address says.
    if not all_plain(tensors):
        return None
    try:
        return spots_of_plain(tensors)
    except RuntimeError:  # sparse tensors have no address
        return None


def spots_of_plain(tensors: Sequence[Any]) -> Spots:
    """Where `tensors` lie, which are known to be dense and of no kind of their own."""
    addresses = list(map(Tensor.data_ptr, tensors))
    flat = all(map(Tensor.is_contiguous, tensors))
    return Spots(addresses, flat or [tensor.stride() for tensor in tensors])


def placed(values: Values | Place) -> Values | Place:
    """Where `values` lie, if the kernels can take them; else themselves."""
    if isinstance(values, Place) or not fit(values):
        return values
    return Place(None, tables(values), list(values))


def tables(values: Values) -> list[tuple[torch.dtype, Table]]:
    """Where `values` lie, by their formats."""
    found = []
    for (device, dtype), group in values.items():
        sizes = tuple([value.numel() for value in group])
        stream = _stream(device)
        if stream is None:
            table = new_table(sizes, device)
        else:
            key = (device, stream, dtype, sizes)
            table = _tables.pop(key) if key in _tables else new_table(sizes, device)
            _tables[key] = table
            if len(_tables) > _KEPT_TABLES:
                _tables.popitem(last=False)
        table.point_to([value.data_ptr() for value in group])
        found.append((dtype, table))
    return found


def _stream(device: torch.device) -> int | None:
    """The current stream, which tables and their workspaces belong to.

    None while a CUDA graph is captured: what it uses is used by nobody else.
    """
    if device.type != "cuda":
        return 0
    if capturing():
        return None
    return int(torch.cuda.current_stream().cuda_stream)


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    # Whether there is a GPU takes three times as long to tell as whether somebody uses it.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def new_table(sizes: Sequence[int], device: torch.device) -> Table:
    """A table for lists of tensors of these `sizes`."""
    from gradscale.torch._triton.tables import Table

    return Table(sizes, device)


def locate(params: list[Tensor], grads: list[Any]) -> Place | None:
    """Where `grads`, those of `params`, lie; None if kernels cannot take them.

    As long as addresses, sizes, formats and layouts stay, what was found the last time is true.
    """
    spots = spots_of(grads)
    if spots is None:
        return None
    facts = (spots.layout, [(grad.numel(), grad.dtype) for grad in grads], spots.addresses)
    stream = _stream(params[0].device)
    key = (stream, id(params[0]), len(params))
    place = None if stream is None else _places.get(key)
    if place is not None and place.facts == facts:
        return place
    values: Values = {}
    for grad in grads:
        values.setdefault((grad.device, grad.dtype), []).append(grad)
    if not fit(values):
        return None
    # Tables of its own: those in `_tables` belong to whoever came last with tensors of these sizes.
    same = place is not None and place.facts[:2] == facts[:2]
    old = place.groups if place is not None and same and place.keys == list(values) else []
    groups = []
    for number, ((device, dtype), group) in enumerate(values.items()):
        table = old[number][1] if old else new_table([value.numel() for value in group], device)
        table.point_to([value.data_ptr() for value in group])
        groups.append((dtype, table))
    place = Place(facts, groups, list(values))
    if stream is not None:
        _places[key] = place
        if len(_places) > _KEPT_TABLES:
            _places.popitem(last=False)
    return place


def reading() -> Any:
    """The module with the kernel that reads, and decides."""
    from gradscale.torch._triton import reading

    return reading


def agreeing() -> Any:
    """The module with the kernels of what ranks tell one another."""
    from gradscale.torch._triton import agreeing

    return agreeing


def writing() -> Any:
    """The module with the kernels that write."""
    from gradscale.torch._triton import writing

    return writing


def headroom() -> Any:
    """The module with the kernel that is `Headroom`."""
    from gradscale.torch._triton import headroom

    return headroom


def stepping(rule: str) -> Any:
    """The module with the kernel of an optimizer: "adam", "sgd" or "lion"."""
    return importlib.import_module(f"gradscale.torch._triton.{rule}")
