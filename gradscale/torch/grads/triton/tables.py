"""Tables of the addresses of tensors, and of the part of them that each program takes.

A tensor is cut into chunks by its size alone, so the same tensors are always added up in the same
order. Sizes and chunks stay on the device as long as the sizes stay the same; addresses are sent
again only when they have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.grads.fields import DECISION
from gradscale.torch.grads.upload import AddressRing, Pool, capturing, keep, send, upload

CHUNK = 2**15
"""Elements that one program takes."""
ALIGNMENT = 16
"""Bytes that a load can take at once, if the address is a multiple of it."""


class Chunks(NamedTuple):
    """How tensors of certain sizes are cut, on a device."""

    sizes: Tensor
    """int64: the elements of every tensor."""
    firsts: Tensor
    """int32: the first chunk of every tensor, and one past the last."""
    owners: Tensor
    """int32: the tensor of every chunk."""
    total: int
    """How many chunks there are."""

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Chunks:
        """The chunks of tensors with these `sizes`."""
        numel = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        # One for an empty tensor as well, so that every tensor has a program.
        counts = torch.clamp((numel + (CHUNK - 1)) // CHUNK, min=1)
        firsts = torch.zeros(len(sizes) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=firsts[1:])
        owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
        return cls(
            sizes=send(numel, device),
            firsts=send(firsts.to(torch.int32), device),
            owners=send(owners.to(torch.int32), device),
            # Without reading a tensor, which whoever watches for waiting would take for that.
            total=sum([max(-(-size // CHUNK), 1) for size in sizes]),
        )


_KEPT = 16
"""Sets of addresses that a table keeps on the device."""
_FEW = 256
"""Chunks of tensors whose addresses programs read from pinned memory: the copy to the device would
take 50 us of the host's time (H200, among other work), and these reads a few of the device's."""


class Table:
    """Where lists of tensors lie: a row of addresses for each list, all of the same sizes."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.chunks = Chunks.of(sizes, device)
        self.device = device
        self._addresses: list[int] = []
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._ring = AddressRing(device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        """int64, on the device or in pinned memory."""
        self.tensors = len(sizes)
        """How many there are in a list."""
        self.workspace: dict[str, list[Tensor]] = {}
        """Where programs leave what others take; the owner of a kernel fills this."""
        self.counts = Pool((len(sizes), 2), torch.int64)
        """For the infinities and NaNs of every tensor."""
        self.decisions = Pool((len(DECISION),), torch.float32)
        self.aligned = False
        """Whether every address is a multiple of `ALIGNMENT`."""

    def point_to(self, addresses: list[int]) -> None:
        """Takes the `addresses` that the tensors have now, list by list."""
        captured = capturing()
        if addresses == self._addresses and not captured:
            return
        self._addresses = addresses
        self.aligned = reduce(or_, addresses, 0) % ALIGNMENT == 0
        if captured:
            # A copy that every replay repeats, to memory of the graph.
            self._addresses, self.addresses = [], upload(addresses, torch.int64, self.device)
            keep(self, self.addresses)
        elif self.chunks.total <= _FEW:
            self.addresses = self._ring.send(addresses, copy=False)
        else:
            self.addresses = self._uploaded(addresses)

    def _uploaded(self, addresses: list[int]) -> Tensor:
        """`addresses` on the device.

        An allocator gives the gradients of a loop few different sets of addresses, so some are
        kept.
        """
        key = tuple(addresses)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            found = self._kept[key] = self._ring.send(addresses, copy=True)
        return found
