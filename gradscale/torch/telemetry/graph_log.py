"""A log on the device: what CUDA graphs have to tell, because a replay runs no Python.

While a graph is captured, `log()` adds a few operations that write numbers into the next rows of a
ring and count them. Every replay runs these again, with the numbers of that replay; `fetch()` reads
on the host what was written since it was last called.

The ring is made with the scaler's state, so before any capture, and is never replaced: what is
allocated inside a capture belongs to that graph, and what is set to 0 there is set to 0 again by
every replay. Graphs write to it as they write to the scale itself, so it has to live as long as the
graphs are replayed, and it does, because the scaler has to as well.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradscale.torch.telemetry.transport import Sent

ROWS = 4096
"""How many rows are kept for a host that does not look: 256 KB."""
WIDTH = 16
"""Numbers in a row; the first says whose entry begins here."""
_GOES_ON = -1
"""The first number of a row that goes on with the entry of the row before."""


class Entry(NamedTuple):
    """What one replay wrote in one place."""

    kind: Hashable
    """As `log()` was told in the capture."""
    numbers: list[int]


class Fetched(NamedTuple):
    """What was written since the last look."""

    entries: list[Entry]
    """Oldest first."""
    lost: int
    """How many entries before these have been written over."""


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
    # Last, so that whoever reads meanwhile finds every row that is counted.
    num_rows.add_(parts)
    num_entries.add_(1)


class GraphLog:
    """The log of one scaler, and how much of it the host has seen."""

    def __init__(self) -> None:
        self._log: Tensor | None = None
        self._kinds: dict[tuple[Hashable, int], int] = {}
        """The number in the log of every kind and size of entries."""
        self._rows = self._entries = 0
        """How many of them were fetched."""
        self._sent: Sent | None = None

    def prepare(self, device: torch.device) -> None:
        """Makes the log, outside of any capture."""
        if self._log is None or self._log.device != device:
            self._log = new_log(device)
            self._rows = self._entries = 0

    def captured(self) -> bool:
        """Whether there are graphs that may have written something."""
        return bool(self._kinds)

    def log(self, numbers: Tensor, kind: Hashable) -> None:
        """Makes the graph that is being captured add an entry in every replay.

        `kind` comes back with the entry.
        """
        if self._log is None:
            raise RuntimeError("prepare() must be called before a capture.")
        known = self._kinds
        append(self._log, numbers, known.setdefault((kind, numbers.numel()), len(known)))

    def fetch(self, wait: bool = False) -> Fetched | None:
        """What replays have written since the last call; None if it is still on its way.

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
        """Drops what has been written, in place: it is of another run. Graphs go on writing."""
        self._rows = self._entries = 0
        self._sent = None
        if self._log is not None:
            self._log[0].zero_()

    def _read(self, log: Tensor) -> Fetched:
        """What is new in a copy of the log."""
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
        return Fetched([Entry(kind, numbers[:size]) for kind, size, numbers in known], lost)
