"""Counts of elements by exponent, on the device: one row for every tensor that is sampled.

A row has 258 numbers: how many elements have each of the 256 exponent fields of float32, then zeros
and NaNs, which fields 0 and 255 include. All other formats convert to float32 without a loss, so
subnormal float16 numbers have binades of their own; below 2**-126 there is one bin for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.torch.grads import dispatch
from gradscale.torch.grads.dtensor import local
from gradscale.torch.telemetry.transport import Sent

FIELDS = 256
COLUMNS = FIELDS + 2
BIAS = 127
MOST = 2**20
"""Elements of an activation that are counted: of a larger one, every so many. 2**20 give shares
to 0.1 percentage points, and keep the time of a sample from growing with the batch."""
_CHUNK = 2**24
"""Elements that torch operations take at once: their indices are 8 bytes each."""
_LANES = 1024
"""Rows over which atomic additions are spread where there is no kernel: most elements have one of
a dozen exponents, and additions to one address wait for each other."""
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Counts:
    """A table of rows on one device, filled by a sample and sent to the host."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.table = torch.zeros(rows, COLUMNS, dtype=torch.int64, device=device)
        self.numels = [0] * rows
        """How many elements were counted in every row."""

    def clear(self) -> None:
        """Begins a new sample."""
        self.table.zero_()
        self.numels = [0] * len(self.numels)

    def clear_row(self, row: int) -> None:
        """Begins a row anew."""
        if self.numels[row]:
            self.table[row].zero_()
            self.numels[row] = 0

    def add(self, row: int, values: Tensor, step: int = 1) -> None:
        """Counts every `step`-th of the flat, dense `values`."""
        numel = -(-values.numel() // step)
        self.numels[row] += numel
        here = self.table[row]
        small = values.numel() < 2**31  # a kernel takes numbers of 32 bits
        if small and values.dtype in dispatch.DTYPES and dispatch.uses_triton(values.device):
            dispatch.module("exponents").count(values, here, numel, step)
        else:
            _count(values[::step], here)

    def send(self) -> Sent:
        """The table, on its way to the host."""
        return Sent.away(self.table.clone() if self.table.is_cpu else self.table)


def _count(values: Tensor, row: Tensor) -> None:
    """Adds the exponents of `values` to `row`, by torch operations, without waiting."""
    for part in values.split(_CHUNK) if len(values) > _CHUNK else (values,):
        size = part.float().view(torch.int32) & 0x7FFFFFFF
        field = (size >> 23).long()
        if part.is_cpu:
            found = torch.bincount(field, minlength=FIELDS)
            row[:FIELDS] += found
            row[FIELDS] += len(part) - torch.count_nonzero(size)
            if found[-1]:
                row[FIELDS + 1] += torch.count_nonzero(size > 0x7F800000)
            continue
        # Elsewhere bincount waits for the device, and so does a look at what it found.
        lanes = torch.zeros(_LANES * FIELDS, dtype=torch.int32, device=row.device)
        lane = torch.arange(len(part), device=row.device) % _LANES
        one = torch.ones((), dtype=torch.int32, device=row.device)
        lanes.scatter_add_(0, field + FIELDS * lane, one.expand(len(part)))
        row[:FIELDS] += lanes.view(_LANES, FIELDS).sum(0)
        row[FIELDS] += (size == 0).sum()
        row[FIELDS + 1] += (size > 0x7F800000).sum()


def flat(tensor: Any) -> Tensor | None:
    """The numbers of `tensor` that this rank has, in one dimension; None if there are none.

    Shares its memory if that is dense. Integers, sparse, quantized and empty tensors have none.
    """
    value = local(tensor.detach())
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    plain = value.layout is torch.strided and value.dtype in FLOATING and not value.is_nested
    if not plain or not value.numel() or value.is_meta:
        return None
    if not value.is_contiguous() and dispatch.dense(value):
        return value.as_strided((value.numel(),), (1,))
    return value.reshape(-1)


def gradient(param: Tensor) -> Tensor | None:
    """The numbers of the gradient of `param` that this rank has, in one dimension; None if none.

    Of summands that ranks have not added up yet, its own: nothing is communicated, because ranks
    need not sample the same iterations. `param.grad` is left as it is.
    """
    grad = local(param.grad)
    if grad is None:
        return None
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout is not torch.strided:
        grad = grad.values()
    return flat(grad)


def step_for(tensor: Tensor, most: int) -> int:
    """How many places apart elements are counted, so that there are at most `most`.

    Without a divisor in common with the last dimension, else some channels would never be counted.
    """
    step = -(-tensor.numel() // most)
    if step > 1:
        while math.gcd(step, tensor.shape[-1]) > 1:
            step += 1
    return step


class Histogram(NamedTuple):
    """The elements of one row."""

    low: int = 0
    """The exponent of the first bin."""
    counts: tuple[int, ...] = ()
    zeros: int = 0
    infs: int = 0
    nans: int = 0


def histograms(table: Tensor, numels: Sequence[int]) -> list[Histogram]:
    """What is in every row of a `table` on the host, of so many elements each.

    By operations on the whole table: in Python it takes 0.2 ms for a row.
    """
    fields = table[:, :FIELDS].clone()
    zeros, nans = table[:, FIELDS], table[:, FIELDS + 1]
    # A kernel also counts what is past the end, as zero.
    fields[:, 0] -= zeros + fields.sum(1) - torch.tensor(numels, dtype=torch.int64)
    infs = fields[:, -1] - nans
    fields[:, -1] = 0
    used = (fields != 0).int()
    firsts = used.argmax(1).tolist()
    ends = (FIELDS - used.flip(1).argmax(1)).tolist()
    rest = zip(zeros.tolist(), infs.tolist(), nans.tolist(), strict=True)
    return [
        Histogram(first - BIAS, tuple(row[first:end].tolist()), *others)
        if first < end and row[first]
        else Histogram(0, (), *others)
        for row, first, end, others in zip(fields, firsts, ends, rest, strict=True)
    ]
