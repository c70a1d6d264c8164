"""The rule that moves the scale of every block, by the largest gradients at its border.

A pure function of whole numbers, for all blocks at once and without waiting for the device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError

NUM_ROWS = 4
ENTERING, LEAVING, WEIGHTS, SMALLEST = range(NUM_ROWS)
"""The rows of `amax`: gradients of a block's outputs, of its inputs and of its weights; and of
that input or weight whose largest gradient is the smallest."""
VANISHED = 2.0**-126
"""The largest of gradients that are all zero; 0 if there were no gradients."""
TINY = 2.0**-118
"""What is smaller has vanished: amax is a sum over backward passes."""
MAX_EXPONENT = 60
"""Two neighbours differ by a factor that float32 holds, and so does every factor."""
_FLOOR = -14
"""2**-14 is the smallest normal number of float16: no block falls below it because of a fault."""
_FAULTS = 4
"""The most faults of a block that count at a time."""
_FAINT = -8
"""Below 2**-8, a gradient has less than 16 binades in which float16 can hold its elements."""
_WEIGHTS = 2
"""Binades by which gradients of weights may be larger: nothing is computed from them."""


class BlockState(NamedTuple):
    """The state of the blocks, in the order of the forward pass."""

    exponents: Tensor
    """int32: inside of the block, gradients are larger by two to the power of this."""
    resting: Tensor
    """int32: for how many more updates the block is kept lower, because of faults."""


@dataclass(frozen=True, kw_only=True)
class BlockPolicy:
    """Keeps the largest gradient of a block between 2**low and 2**high.

        entering, leaving, weights = largest gradients of the block's outputs, inputs, weights,
            all at the scale that the block has; amax is the largest of them, weights / 4
        if entering is 0 or not finite:     # it was lost in a later block
            move as the nearest later block whose gradient is neither
        elif leaving or weights is not finite:
            move by -drop                   # or more, or less: entering goes to 2**target at most,
            resting += rest                 # and not below 2**-14
        else:
            if not 2**low <= amax < 2**high:
                move amax to 2**target      # while resting, low and target are lower by drop
            if an input or a weight has no gradient above 2**-8 and the block is not resting:
                move up until it has one, or until amax is near 2**high

    A block that is in its place is left alone, so most blocks of most models keep the scale 1. A
    block that is moved gets an exponent that is a multiple of `grid`, and a block whose gradients
    allow it, with a binade to spare, gets the exponent of the block after it. So neighbours mostly
    have the same scale, and nothing has to be done between them. The numbers are binades of
    float16, whose largest number is just below 2**16. Several faults add up: something inside of
    such a block is larger than what is seen at its border.
    """

    target: int = 6
    low: int = 0
    high: int = 12
    drop: int = 8
    rest: int = 32
    grid: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise SettingError(f"{name} must be a whole number, got {value!r}.")
            if name in ("drop", "rest", "grid") and value < 1:
                raise SettingError(f"{name} must be >= 1, got {value}.")
        if not _FLOOR <= self.low <= self.target <= self.high <= 16:
            raise SettingError(
                f"low, target and high must rise from -14 to 16, got {self.low}, {self.target}, "
                f"{self.high}."
            )

    def init(self, num_blocks: int, device: torch.device) -> BlockState:
        """Every block at the scale 1."""
        none = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        return BlockState(none, none.clone())

    def update(self, state: BlockState, amax: Tensor) -> BlockState:
        """The state after gradients as large as `amax`, whose rows are named above.

        In the last three rows 0 is a gradient that does not exist, and VANISHED one that is zero.
        """
        finite = torch.isfinite(amax)
        known = finite[ENTERING] & (amax[ENTERING] > TINY)
        fault = known & ~(finite[LEAVING] & finite[WEIGHTS])
        came = torch.frexp(amax[ENTERING]).exponent
        largest = torch.maximum(amax[ENTERING], amax[LEAVING])
        largest = torch.maximum(largest, amax[WEIGHTS] * 2.0**-_WEIGHTS)
        found = torch.frexp(largest).exponent

        num_faults = (state.resting + (self.rest - 1)).div(self.rest, rounding_mode="floor")
        lower = (num_faults * self.drop).clamp(max=self.low - _FLOOR)
        outside = (found > self.high) | (found <= self.low - lower)
        wanted = self._on_grid(state.exponents + self.target - lower - found + self._grid // 2)
        move = torch.where(outside, wanted - state.exponents, 0)
        smallest = torch.frexp(amax[SMALLEST]).exponent
        faint = (amax[SMALLEST] > 0) & finite[SMALLEST] & (state.resting == 0)
        faint &= smallest + move < _FAINT
        wanted = self._on_grid(state.exponents + _FAINT - smallest + self._grid - 1)
        lift = torch.minimum(wanted - state.exponents, self.high - found)
        move = torch.where(faint, torch.maximum(move, lift), move)
        fall = torch.minimum(
            (came - self.target).clamp(min=self.drop), (came - _FLOOR).clamp(min=0)
        )
        fallen = self._on_grid(state.exponents - fall) - state.exponents
        move = torch.where(fault & (fall > 0), fallen, torch.where(fault, 0, move))

        places = torch.arange(len(move), device=move.device)
        above = torch.where(known, places, len(move)).flip(0).cummin(0).values.flip(0)
        move = torch.where(above < len(move), move[above.clamp(max=len(move) - 1)], 0)
        own = (state.exponents + move).clamp(-MAX_EXPONENT, MAX_EXPONENT)
        # Where a block may go for the sake of its neighbour: not to the edge of its place, and not
        # higher than a move puts it, nor so low that something becomes faint.
        most = state.exponents - found + min(self.high - 1, self.target + self._grid // 2)
        least = state.exponents - found + self.low + 2
        seen = (amax[SMALLEST] > 0) & finite[SMALLEST]
        kept = torch.minimum(state.exponents - smallest + _FAINT, own)
        least = torch.where(seen, torch.maximum(least, kept), least)
        free = known & ~fault & (state.resting == 0)
        exponents = _merged(own, least, torch.where(free, most, least - 1))
        resting = (state.resting + torch.where(fault, self.rest, -1)).clamp(0, self.rest * _FAULTS)
        return BlockState(exponents.to(torch.int32), resting.to(torch.int32))

    @property
    def _grid(self) -> int:
        """The grid, or a narrower one on which every block has a place between low and high."""
        return max(1, min(self.grid, 2 * min(self.target - self.low, self.high - self.target)))

    def _on_grid(self, exponents: Tensor) -> Tensor:
        """The multiples of the grid that are not above `exponents`."""
        return exponents.div(self._grid, rounding_mode="floor") * self._grid


def _merged(own: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Exponents, where every block has that of the block above it, if that may be, or its own.

        above = 0                           # what comes after the last block has no scale
        for each block, from the last to the first:
            above = above if least <= above <= most else own

    That loop takes a step for each block. Here the blocks that keep their own are found in as many
    steps as their number has binary digits: each is the first one below another that cannot have
    the exponent of that one.

    Args:
        own: The exponent of every block.
        least: The least that it may be instead.
        most: The most that it may be instead.
    """
    num = len(own)
    own = torch.cat([own, torch.zeros_like(own[:1])])
    places = torch.arange(num, device=own.device)
    above = torch.arange(num + 1, device=own.device)[:, None]
    parts = ((own[:, None] < least) | (own[:, None] > most)) & (places < above)
    # Places plus one, so that 0 is the end.
    below = torch.where(parts, places + 1, 0).amax(1)
    below = torch.cat([torch.zeros_like(below[:1]), below])
    keeps = torch.zeros_like(below)
    keeps[-1:] = 1
    for _ in range(num.bit_length()):
        keeps = keeps.scatter_reduce(0, below, keeps, "amax")
        below = below[below]
    first = torch.where(keeps[1:] > 0, torch.arange(num + 1, device=own.device), num)
    return own[first.flip(0).cummin(0).values.flip(0)[:num]]
