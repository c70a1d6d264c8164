"""A log on the device of what replays of CUDA graphs did, since a replay runs no Python.

While a graph is captured, `log()` adds a few operations that write numbers into the next rows of a
ring buffer and count them. Every replay runs these again, with the numbers of that replay;
`fetch()` reads on the host what was written since the last call.

The ring is allocated with the scaler's state, so before any capture, and is never replaced: memory
that is allocated inside a capture belongs to that graph, and what is zeroed there is zeroed again
by every replay. Like the scale, it must live as long as the graphs are replayed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradscale.torch.telemetry.transport import Sent

ROWS = 4096
"""Rows of the ring buffer, which is 256 KB."""
WIDTH = 16
"""Numbers in a row; the first is the kind of the entry that begins here, or `_GOES_ON`."""
_GOES_ON = -1
"""The first number of a row that continues the entry of the row before."""


class Fetched(NamedTuple):
    """What was written since the last call."""

    entries: list[tuple[Hashable, list[int]]]
    """Kind and numbers, oldest first."""
    lost: int
    """How many entries before these have been overwritten."""


def new_log(device: torch.device) -> Tensor:
    """An empty log, int32: a row with the numbers of rows and of entries so far, then the ring."""
    with torch.inference_mode(False):  # the first loss may be that of an evaluation
        return torch.zeros((1 + ROWS, WIDTH), dtype=torch.int32, device=device)


def append(log: Tensor, numbers: Tensor, kind: int) -> None:
    """Adds an entry of int32 `numbers`; in place and on the device alone, so it can be captured."""
    ring, (num_rows, num_entries) = log[1:], log[0, :2].unbind()
    parts = -(-numbers.numel() // (WIDTH - 1))
    rows = log.new_full((parts, WIDTH), _GOES_ON)
    rows[0, 0].fill_(kind)
    filled = pad(numbers, (0, parts * (WIDTH - 1) - numbers.numel()))
    rows[:, 1:].copy_(filled.view(parts, WIDTH - 1))
    places = (num_rows + torch.arange(parts, device=log.device)) % len(ring)
    ring.index_copy_(0, places, rows)
    # Last, so that a concurrent read finds every row that is counted.
    num_rows.add_(parts)
    num_entries.add_(1)


class GraphLog:
    """The log of one scaler, and how much of it was fetched."""

    def __init__(self) -> None:
        self._log: Tensor | None = None
        self._kinds: dict[tuple[Hashable, int], int] = {}
        """The number in the log of every kind and size of entries."""
        self._rows = self._entries = 0
        """How many of them were fetched."""
        self._sent: Sent | None = None

    def prepare(self, device: torch.device) -> None:
        """Allocates the log, outside of any capture."""
        if self._log is None or self._log.device != device:
            self._log = new_log(device)
            self._rows = self._entries = 0

    def captured(self) -> bool:
        """Whether there are graphs that may have written something."""
        return bool(self._kinds)

    def log(self, numbers: Tensor, kind: Hashable) -> None:
        """Captures the operations that add an entry of this `kind` in every replay."""
        if self._log is None:
            raise RuntimeError("prepare() must be called before a capture.")
        known = self._kinds
        append(self._log, numbers, known.setdefault((kind, numbers.numel()), len(known)))

    def fetch(self, wait: bool = False) -> Fetched | None:
        """What replays have written since the last call; None if it has not arrived.

        With `wait` it **waits for the device**, for all that was queued before, on any stream.
        """
        if self._log is None or not self._kinds:
            return Fetched([], 0)
        if wait:
            if self._log.device.type == "cuda":
                torch.cuda.synchronize(self._log.device)  # graphs may run on streams of their own
            self._sent = None
            return self._read(self._log.cpu())
        if self._sent is None:
            self._sent = Sent.away(self._log)
        if not self._sent.arrived():
            return None
        sent, self._sent = self._sent, None
        return self._read(sent.read())

    def forget(self) -> None:
        """Drops what has been written, in place, since graphs go on writing to the same memory."""
        self._rows = self._entries = 0
        self._sent = None
        if self._log is not None:
            self._log[0].zero_()

    def _read(self, log: Tensor) -> Fetched:
        """The new entries in a copy of the log."""
        num_rows, num_entries = log[0, :2].tolist()
        places = torch.arange(max(self._rows, num_rows - ROWS), num_rows, device="cpu") % ROWS
        found: list[tuple[int, list[int]]] = []
        for kind, *numbers in log[1:][places].tolist():
            if kind != _GOES_ON:
                found.append((kind, numbers))
            elif found:  # else its beginning has been written over
                found[-1][1].extend(numbers)
        lost = num_entries - self._entries - len(found)
        self._rows, self._entries = num_rows, num_entries
        kinds = list(self._kinds)
        known = [(*kinds[number], numbers) for number, numbers in found]
        return Fetched([(kind, numbers[:size]) for kind, size, numbers in known], lost)
