"""Meters: where backward passes add up the largest gradients of blocks and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradscale.torch.blocks.rule import (
    ENTERING,
    LEAVING,
    NUM_ROWS,
    SMALLEST,
    TINY,
    VANISHED,
    WEIGHTS,
)

if TYPE_CHECKING:
    from gradscale.torch.blocks.units import Unit

__all__ = ["ENTERING", "LEAVING", "Log", "Meters"]

OUTSIDE = -1
"""The place of what belongs to no block."""
_PATIENCE = 4
"""So many times a weight may be without a gradient before that counts as vanished."""


class Log:
    """The largest gradients at borders, as they come in; the meters add them up all at once."""

    def __init__(self) -> None:
        self._routes: list[tuple[int, int, int]] = []
        """The block that a gradient has left, the block whose scale it has, and where it goes."""
        self._found: list[Tensor] = []
        self._indices: dict[tuple[tuple[int, int, int], ...], Tensor] = {}

    def came(self, place: int, largest: Tensor) -> None:
        """A gradient has entered the block at `place`."""
        self._routes.append((OUTSIDE, place, place))
        self._found.append(largest)

    def left(self, place: int, to: int, largest: Tensor) -> None:
        """A gradient has left a block, and goes to the block at `to`, or OUTSIDE."""
        self._routes.append((place, place, to))
        self._found.append(largest)

    def flush(self, borders: Tensor, factors: Tensor) -> None:
        """Adds what has come in to `borders`; `factors` are those into blocks and out of them."""
        if not self._found:
            return
        found = torch.stack(self._found).clamp(min=VANISHED)
        num, key = borders.shape[1], tuple(self._routes)
        if key not in self._indices:
            columns = zip(*key, strict=True)
            rows = [[num if each == OUTSIDE else each for each in column] for column in columns]
            on_host = torch.tensor(rows, pin_memory=borders.device.type == "cuda")
            self._indices = {key: on_host.to(borders.device, non_blocking=True)}
        left, scaled_by, to = self._indices[key]
        opened, shut = torch.nn.functional.pad(factors, (0, 1), value=1.0)
        sums = torch.zeros(2, num + 1, device=borders.device)
        sums[LEAVING].index_add_(0, left, found)
        sums[ENTERING].index_add_(0, to, found * (shut[scaled_by] * opened[to]))
        borders += sums[:, :num]
        self.clear()

    def clear(self) -> None:
        """Forgets what has come in."""
        self._routes, self._found = [], []


class Meters:
    """Numbers on the device: two for every block, one for every weight.

    0 if there was no gradient, `rule.VANISHED` if all of it was zero; of several passes the sum.

    Args:
        num_blocks: The number of blocks.
        units: The weights; each unit has its own slots.
        factors: Into blocks and out of them, on the device of the weights.
    """

    def __init__(self, num_blocks: int, units: Sequence[Unit], factors: Tensor) -> None:
        device = factors.device
        self.log = Log()
        self._factors = factors
        num_weights = sum(len(unit.owners) for unit in units)
        self._all = torch.zeros(2 * num_blocks + num_weights, device=device)
        self._borders = self._all[: 2 * num_blocks].view(2, num_blocks)
        self.weights = self._all[2 * num_blocks :]
        places = [unit.place for unit in units for _ in unit.owners]
        self.alive = torch.zeros(num_weights, dtype=torch.bool, device=device)
        """Which weights had a gradient that was not zero."""
        self.zeros = torch.zeros_like(self.alive)
        """Which weights had a gradient that was all zero."""
        self.num_reads = 0
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self.borders_of = [
            [_meter(place) for place in row.unbind()] for row in self._borders.unbind()
        ]
        """A meter for every block, in two rows."""
        self._weights: dict[tuple[int, int], Tensor] = {}
        for unit in units:
            self.of_weights(unit.start, unit.start + len(unit.owners), True)

    @property
    def borders(self) -> Tensor:
        """Gradients of the outputs and of the inputs of blocks."""
        self.log.flush(self._borders, self._factors)
        return self._borders

    def of_weights(self, start: int, end: int, measures: bool) -> Tensor | None:
        """The meter of the weights in some slots, or None if gradients are not measured."""
        if not measures:
            return None
        if (start, end) not in self._weights:
            self._weights[start, end] = _meter(self.weights[start:end])
        return self._weights[start, end]

    def ids(self) -> set[int]:
        """The ids of all meters."""
        meters = (meter for row in self.borders_of for meter in row)
        return {id(meter) for meter in (*meters, *self._weights.values())}

    def read(self) -> Tensor:
        """The rows that `BlockPolicy.update()` takes."""
        borders = self.borders
        rows = torch.zeros(NUM_ROWS, borders.shape[1], device=self._all.device)
        rows[: len(borders)] = borders
        none = float("inf")
        weights = self.weights.nan_to_num(nan=none, posinf=none)
        rows[WEIGHTS].scatter_reduce_(0, self._places, weights, "amax")
        # A weight that once had a gradient may have none for good reasons, and many have none in
        # the very first steps. But all weights of a block, or its inputs: those have vanished.
        self.num_reads += 1
        self.alive |= weights > TINY
        self.zeros |= (weights > 0) & (weights <= TINY)
        ignored = self.alive if self.num_reads > _PATIENCE else torch.ones_like(self.alive)
        counts = (weights > TINY) | ((weights > 0) & ~ignored)
        rows[SMALLEST].fill_(none)
        rows[SMALLEST].scatter_reduce_(0, self._places, weights.where(counts, none), "amin")
        for row in (LEAVING, WEIGHTS):
            rows[SMALLEST] = torch.minimum(rows[SMALLEST], rows[row].where(rows[row] > 0, none))
        return rows

    def clear(self) -> None:
        """Begins anew."""
        self.log.clear()
        self._all.zero_()


def _meter(place: Tensor) -> Tensor:
    """Numbers whose gradient is added up in `place`."""
    meter = torch.zeros_like(place).requires_grad_()
    meter.grad = place
    return meter
