"""Host values for a device, and small tensors on it, without waiting and in CUDA graphs."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_kept: list[object] = []
"""What captured CUDA graphs read in every replay: it must be neither freed nor written to."""


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    # Whether CUDA is available takes three times as long to find out as whether it is in use.
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()


def keep(*objects: object) -> None:
    """Keeps `objects` alive for as long as the process runs, if a CUDA graph is being captured."""
    if capturing():
        _kept.extend(objects)


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a vector on `device`, without waiting for the device.

    In a CUDA graph it is a copy from pinned memory that every replay repeats.
    """
    host = torch.tensor(values, dtype=dtype, device="cpu")
    return send(host, device)


def send(host: Tensor, device: torch.device) -> Tensor:
    """The CPU tensor `host` on `device`, as in `upload`."""
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
        keep(host)
    return host.to(device, non_blocking=True)


class Pool:
    """Small tensors on a device, each used once.

    An allocation takes 10 us among other work (H200's host), so many are allocated at a time.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device: torch.device | None = None
        self._next: Iterator[Tensor] = iter(())

    def take(self, device: torch.device, captured: bool) -> Tensor:
        """The next one, uninitialized; where a CUDA graph is `captured`, memory of the graph."""
        if captured:
            return torch.empty(self._shape, dtype=self._dtype, device=device)
        place = next(self._next, None) if self._device == device else None
        if place is None:
            self._device = device
            with torch.inference_mode(False):
                block = torch.empty((_BLOCK, *self._shape), dtype=self._dtype, device=device)
                self._next = iter(block.unbind())
            place = next(self._next)
        return place


_BLOCK = 256
"""Tensors of a pool that share one allocation."""


class AddressRing:
    """Sends lists of addresses to a device, through pinned memory that is allocated once.

    `upload` makes a tensor, pins it and copies it: 30 us for 40 addresses, where this takes 8 us
    (H200's host, in a tight loop). A place in the ring is written again after so many others that
    what reads it is over: fewer launches than that can be waiting for a device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = 0
        self._places: Iterator[tuple[Any, Tensor]] = iter(())

    def send(self, addresses: Sequence[int], copy: bool) -> Tensor:
        """`addresses` as int64, without waiting: on the device or, without `copy`, pinned."""
        size = len(addresses)
        if self._device.type != "cuda" or size > _LONGEST:
            return upload(addresses, torch.int64, self._device)
        if size != self._size:
            self._size = size
            ring = torch.empty((_PLACES, size), dtype=torch.int64, device="cpu", pin_memory=True)
            words = ctypes.c_int64 * size
            rows = [(words.from_address(row.data_ptr()), row) for row in ring.unbind()]
            self._places = itertools.cycle(rows)
        words, row = next(self._places)
        words[:] = addresses
        return row.to(self._device, non_blocking=True) if copy else row


_PLACES = 1024
_LONGEST = 512
"""Addresses of a list that goes through a ring, whose memory is 4 MB then."""
