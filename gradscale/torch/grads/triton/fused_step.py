"""What the steps of all optimizers share: the piece that a program takes, and where weights are.

A weight in float16 or bfloat16 has a master of 32 bits: either a float32 of its own beside it, or
16 more bits that make one together with it. For bfloat16 those bits are exactly the missing half of
a float32; the weight is then the nearest one, ties away from 0. For float16 they count 2**-15 parts
of the distance to the next float16 number: exact from 2**-16 up to 65504, and below 2**-16 within
2**-40. A float16 weight is at most 65504: there a split master ends as well, and a float32 master
beyond it keeps its value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.chunks import ELEMENTS, chunk_of, load, power_of_two, store
from gradscale.torch.grads.triton.tables import CHUNK, Table

BLOCK = tl.constexpr(1024)
"""Elements that a program has in hand at a time: fewer than for reading, because there are four
lists."""
SIZE = 4096
"""Elements that a program takes."""

MASTERS = {None: 0, "float32": 1, "split": 2}
"""How a kernel is told where the master of a weight is."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""How the kernels of steps are compiled. A product that is rounded before it is added is the same
on every machine and in the interpreter; the step waits for memory anyway."""
_FLOAT32 = tl.constexpr(1)
_SPLIT = tl.constexpr(2)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2**22, it leaves no room for a fraction."""


@triton.jit
def piece_of(sizes, firsts, owners, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Whose piece this is, where it begins, and how many elements are left from there."""
    pieces = CHUNK // SIZE
    owner, start, left = chunk_of(sizes, firsts, owners, tl.program_id(0) // pieces, CHUNK)
    begin = (tl.program_id(0) % pieces) * SIZE
    return owner, start + begin, left - begin


@triton.jit
def gradient(
    pointer, offsets, left, divisor, DIVIDE: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr
):
    """A gradient without its scale; `BACK` leaves it so where it is."""
    g = load(pointer, offsets, left, WHOLE)
    if DIVIDE:
        g = tl.div_rn(g, divisor)
        if BACK:
            store(pointer, offsets, left, g, WHOLE)
    return g


@triton.jit
def weight(param, master, offsets, left, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Weights as float32."""
    if MASTER == _FLOAT32:
        return load(master, offsets, left, WHOLE)
    if MASTER == _SPLIT:
        if WHOLE:
            low = tl.load(master + offsets)
            high = tl.load(param + offsets)
        else:
            low = tl.load(master + offsets, mask=offsets < left, other=0)
            high = tl.load(param + offsets, mask=offsets < left, other=0.0)
        return _joined(high, low)
    return load(param, offsets, left, WHOLE)


@triton.jit
def put_weight(param, master, offsets, left, p, MASTER: tl.constexpr, WHOLE: tl.constexpr):
    """Writes weights, rounded, and their masters."""
    if MASTER == _SPLIT:
        high, low = _parted(p, param.dtype.element_ty)
        if WHOLE:
            tl.store(param + offsets, high)
            tl.store(master + offsets, low)
        else:
            tl.store(param + offsets, high, mask=offsets < left)
            tl.store(master + offsets, low, mask=offsets < left)
    else:
        if MASTER == _FLOAT32:
            store(master, offsets, left, p, WHOLE)
            p = _saturated(p, param.dtype.element_ty)
        store(param, offsets, left, p, WHOLE)


@triton.jit
def _saturated(p, element: tl.constexpr):
    """Numbers within the range of float16, where `element` is that; NaN stays."""
    if element == tl.float16:
        p = tl.where(p > 65504.0, 65504.0, tl.where(p < -65504.0, -65504.0, p))
    return p


@triton.jit
def _binade(high):
    """The exponent of float16 numbers; that of the smallest normal one for all below it."""
    bits = high.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum(((bits >> 23) & 0xFF) - 127, -14)


@triton.jit
def _joined(high, low):
    """The float32 that a weight and its 16 more bits are."""
    if high.dtype == tl.bfloat16:
        top = high.to(tl.int16, bitcast=True).to(tl.int32)
        rest = low.to(tl.int32)
        # Beside a 0 they are never below 0, unless somebody has set the weight to 0.
        rest = tl.where((top & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
        return ((top << 16) + rest).to(tl.float32, bitcast=True)
    return high.to(tl.float32) + low.to(tl.float32) * power_of_two(_binade(high) - 25)


@triton.jit
def _parted(p, element: tl.constexpr):
    """A float32 as a weight and its 16 more bits."""
    if element == tl.bfloat16:
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        low = (bits - (high << 16)).to(tl.int16)
        return high.to(tl.int16).to(tl.bfloat16, bitcast=True), low
    p = _saturated(p, element)
    high = p.to(element)
    rest = tl.where(p == p, (p - high.to(tl.float32)) * power_of_two(25 - _binade(high)), 0.0)
    return high, ((rest + _ROUNDER) - _ROUNDER).to(tl.int32).to(tl.int16)


@triton.jit
def count(count_at, arrivals, owner, size, SIZE: tl.constexpr):
    """Counts the step, once for a tensor: by the last of its pieces, when all have read it."""
    pieces = tl.maximum((size + SIZE - 1) // SIZE, 1)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + owner, 1, sem="acq_rel") == pieces - 1:
        tl.store(arrivals + owner, 0)
        tl.store(count_at, tl.load(count_at) + 1.0)


class Step(NamedTuple):
    """What the steps of all optimizers are told."""

    table: Table
    """Rows of gradients, weights, the states of the rule, step counters where it counts, and
    masters where there are some."""
    dtype: torch.dtype
    """The format of weights and gradients; states and counters are float32."""
    master: str | None
    """Where the masters are: "float32", "split", or None."""
    lr: float | Tensor
    weight_decay: float
    maximize: bool
    divisor: Tensor | None
    """float32: what the gradients are divided by; None if they are not."""
    skip: Tensor | None
    """float32: not 0 skips."""
    back: bool
    """Whether to leave the gradients divided."""

    @property
    def programs(self) -> int:
        """How many the kernel of the step needs."""
        return self.table.chunks.total * (CHUNK // SIZE)

    @property
    def rate(self) -> float:
        """The learning rate, if it is a number."""
        return 0.0 if isinstance(self.lr, Tensor) else float(self.lr)

    def arguments(self) -> tuple[Any, ...]:
        """The first ones of every kernel of a step."""
        table, chunks, divisor, skip = self.table, self.table.chunks, self.divisor, self.skip
        anywhere = chunks.sizes  # stands for what is not there
        return (
            table.addresses,
            table.tensors,
            chunks.sizes,
            chunks.firsts,
            chunks.owners,
            anywhere if divisor is None else divisor,
            anywhere if skip is None else skip,
            self.lr if isinstance(self.lr, Tensor) else anywhere,
            self.rate,
            float(self.weight_decay),
            1.0 - self.rate * self.weight_decay,
            self._arrivals(),
        )

    @property
    def formats(self) -> tuple[Any, ...]:
        """What the form of a kernel depends on besides its constants."""
        return (self.lr.dtype,) if isinstance(self.lr, Tensor) else ()

    def _arrivals(self) -> Tensor:
        """Counters, at 0 between launches, of the pieces of every tensor that are done."""
        workspace, table = self.table.workspace, self.table
        if "arrivals" not in workspace:
            none = torch.zeros(table.tensors, dtype=torch.int32, device=table.device)
            workspace["arrivals"] = [none]
        return workspace["arrivals"][0]

    def constants(self) -> tuple[Any, ...]:
        """The first ones of every kernel of a step."""
        return (
            ELEMENTS[self.dtype],
            MASTERS[self.master],
            self.maximize,
            self.weight_decay != 0,
            self.divisor is not None,
            self.back,
            self.skip is not None,
            isinstance(self.lr, Tensor),
            self.table.aligned,
            SIZE,
            CHUNK,
        )
