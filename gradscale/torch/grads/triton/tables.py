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

from gradscale.torch.grads.upload import AddressRing, capturing, keep, send, upload

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
        # One for an empty tensor as well, so that each has a program that speaks for it.
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


class Table:
    """Where lists of tensors lie: a row of addresses for each list, all of the same sizes."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.chunks = Chunks.of(sizes, device)
        self.device = device
        self._addresses: list[int] = []
        self._kept: dict[tuple[int, ...], tuple[Tensor, bool]] = {}
        self._ring = AddressRing(device)
        self.addresses = torch.empty(0, dtype=torch.int64, device=device)
        """int64, on the device."""
        self.tensors = len(sizes)
        """How many there are in a list."""
        self.workspace: dict[str, list[Tensor]] = {}
        """Where programs leave what others take; the owner of a kernel fills this."""
        self.aligned = False
        """Whether every address is a multiple of `ALIGNMENT`."""

    def point_to(self, addresses: list[int]) -> None:
        """Takes the `addresses` that the tensors have now, list by list."""
        if addresses != self._addresses:
            self._addresses = addresses
            self.addresses, self.aligned = self._uploaded(addresses)
        if self.device.type == "cuda":
            keep(self, self.addresses)

    def _uploaded(self, addresses: list[int]) -> tuple[Tensor, bool]:
        """`addresses` on the device, and whether all are aligned.

        An allocator gives the gradients of a loop few different sets of addresses, so some are
        kept. Not in a CUDA graph, where they are a copy that every replay repeats.
        """
        key = tuple(addresses)
        found = None if capturing() else self._kept.get(key)
        if found is None:
            aligned = reduce(or_, addresses, 0) % ALIGNMENT == 0
            if capturing():
                return upload(addresses, torch.int64, self.device), aligned
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            found = self._kept[key] = self._ring.send(addresses), aligned
        return found
