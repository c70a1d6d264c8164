"""Which path gradients take: kernels where Triton and the tensors allow, else torch operations.

The kernels are for CUDA; `use("triton")` asks for them everywhere, which works on the CPU only
with Triton's interpreter. Tables of addresses are kept while the sizes of the tensors stay the
same.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError

if TYPE_CHECKING:
    from gradscale.torch._triton.tables import Table
    from gradscale.torch.unscale import Values

PATHS = ("auto", "triton", "reference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KEPT_TABLES = 64

_path = "auto"
_tables: OrderedDict[Any, Table] = OrderedDict()
_places: OrderedDict[tuple[int, int], Place] = OrderedDict()


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


def fit(values: Values) -> bool:
    """Whether the kernels can take all of `values`."""
    devices = {device for device, _ in values}
    if len(devices) != 1 or not all(dtype in DTYPES for _, dtype in values):
        return False
    if not take(next(iter(devices))):
        return False
    # A subclass (DTensor, say) need not keep its numbers where its address says.
    return all(
        type(value) is Tensor and value.is_contiguous()
        for group in values.values()
        for value in group
    )


def take(device: torch.device) -> bool:
    """Whether kernels work on `device`."""
    if _path == "reference" or torch.compiler.is_compiling():
        return False
    if device.type != "cuda":
        return _path == "triton"
    # A kernel is launched on the current device, whatever the addresses mean elsewhere.
    return available() and device.index in (None, torch.cuda.current_device())


def tables(values: Values) -> list[tuple[torch.dtype, Table]]:
    """Where `values` lie, by their formats."""
    found = []
    for (device, dtype), group in values.items():
        sizes = tuple([value.numel() for value in group])
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            table = new_table(sizes, device)
        else:
            key = (device, dtype, sizes)
            table = _tables.pop(key) if key in _tables else new_table(sizes, device)
            _tables[key] = table
            if len(_tables) > _KEPT_TABLES:
                _tables.popitem(last=False)
        table.point_to(group)
        found.append((dtype, table))
    return found


def new_table(sizes: Sequence[int], device: torch.device) -> Table:
    """A table for lists of tensors of these `sizes`."""
    from gradscale.torch._triton.tables import Table

    return Table(sizes, device)


class Place(NamedTuple):
    """Where the gradients of certain parameters lie."""

    facts: list[tuple[int, int, torch.dtype]]
    """The address, size and format of each."""
    groups: list[tuple[torch.dtype, Table]]
    keys: list[tuple[torch.device, torch.dtype]]


def locate(params: list[Tensor]) -> Place | None:
    """Where the gradients of `params` lie; None if kernels cannot take them.

    As long as addresses, sizes and formats stay, what was found the last time is true.
    """
    from gradscale.torch.unscale import values_of

    grads = [param.grad for param in params]
    if not all(type(g) is Tensor and g.is_contiguous() for g in grads):
        return None
    facts = [(g.data_ptr(), g.numel(), g.dtype) for g in grads]  # type: ignore[union-attr]
    key = (id(params[0]), len(params))
    place = _places.get(key)
    if place is not None and place.facts == facts:
        return place
    values = values_of(params)
    if not fit(values):
        return None
    # Tables of its own: those in `_tables` belong to whoever came last with tensors of these sizes.
    same = place is not None and [fact[1:] for fact in place.facts] == [f[1:] for f in facts]
    old = place.groups if place is not None and same and place.keys == list(values) else []
    groups = []
    for number, ((device, dtype), group) in enumerate(values.items()):
        table = old[number][1] if old else new_table([value.numel() for value in group], device)
        table.point_to(group)
        groups.append((dtype, table))
    place = Place(facts, groups, list(values))
    _places[key] = place
    if len(_places) > _KEPT_TABLES:
        _places.popitem(last=False)
    return place


def reading() -> Any:
    """The module with the kernels that read."""
    from gradscale.torch._triton import reading

    return reading


def deciding() -> Any:
    """The module with the kernel that decides."""
    from gradscale.torch._triton import deciding

    return deciding


def adam() -> Any:
    """The module with the kernels of Adam and AdamW."""
    from gradscale.torch._triton import adam

    return adam


def writing() -> Any:
    """The module with the kernels that write."""
    from gradscale.torch._triton import writing

    return writing
