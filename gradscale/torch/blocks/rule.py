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
_FAINT = -10
"""Below 2**-10, a gradient has less than 14 binades in which float16 can hold its elements."""
_SLACK = 4
"""The least number of binades in which a block may lie, also if gradients in it are faint."""
_ABOVE, _BELOW = 3, 1
"""Binades that are left free when blocks are put into runs: more above, since a gradient that
overflows costs a step, and one that shrinks only some of its smallest elements."""
_LEAST_ROOM = _ABOVE + _BELOW + 2
"""The least number of binades between low and high."""
_RISE = 2
"""The most binades by which blocks rise at once, if the last one would rise by more after the early
updates: weights in place stay below 2**16."""
_FAR = 1000
"""Beyond all exponents."""
_WEIGHTS = 2
"""Binades by which gradients of weights may be larger: nothing is computed from them."""


class BlockState(NamedTuple):
    """The state of the blocks, in the order of the forward pass."""

    exponents: Tensor
    """int32: log2 of the scale of each block."""
    resting: Tensor
    """int32: for how many more updates each block has a lower scale because of overflows."""


@dataclass(frozen=True, kw_only=True)
class BlockPolicy:
    """Keeps the largest gradient of every block between `2**low` and `2**high`.

        entering, leaving, weights = largest gradients of the block's outputs, inputs, weights,
            all at the scale of the block; amax is the largest of them, weights / 4
        if entering is 0 or not finite:     # it was lost in a later block
            move as the nearest later block whose gradient is neither
        elif leaving or weights is not finite:
            move by -drop                   # or more, or less: entering goes to 2**target at most,
            resting += rest                 # and not below 2**-14
        else:
            the block is in range if 2**low <= amax < 2**high, and no input or weight has its
            largest gradient below 2**-10, unless amax is near 2**high
            # while resting, low and target are lower by drop, and the scale does not rise

    If a block is out of range, or if fewer scales are enough, the blocks are divided, from the last
    to the first, into runs with one scale each: as many blocks as can be in range, with one spare
    binade below and three above. The last run has the scale 1, as has everything after it. The
    others have the scale that puts half of their gradients above `2**target` and half below.
    Nothing is multiplied between the blocks of a run. If all blocks are in range, nothing changes.

    If the last block would rise by more than 2 binades, after the early updates, then no block
    rises by more: the loss of this batch may be nearly zero, and the next ones must not overflow.

    The numbers are binades of float16, whose largest number is just below `2**16`. Repeated
    overflows add up, because something inside such a block is larger than the gradients at its
    border.
    """

    target: int = 4
    """log2 of the size at which the gradients of a run are placed."""
    low: int = -6
    """log2 of the smallest allowed largest gradient."""
    high: int = 12
    """log2 of the limit of the largest gradient."""
    drop: int = 8
    """Binades by which an overflow lowers a scale."""
    rest: int = 32
    """Updates for which an overflow keeps a scale lower."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise SettingError(f"{name} must be a whole number, got {value!r}.")
            if name in ("drop", "rest") and value < 1:
                raise SettingError(f"{name} must be >= 1, got {value}.")
        if not _FLOOR <= self.low <= self.target <= self.high <= 16:
            raise SettingError(
                f"low, target and high must increase and lie between -14 and 16, got {self.low}, "
                f"{self.target}, {self.high}."
            )
        if self.high - self.low < _LEAST_ROOM:
            raise SettingError(
                f"high must be at least low + {_LEAST_ROOM}, got {self.low} and {self.high}."
            )

    def init(self, num_blocks: int, device: torch.device) -> BlockState:
        """Returns the first state: every block at the scale 1."""
        none = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        return BlockState(none, none.clone())

    def update(self, state: BlockState, amax: Tensor, *, early: bool = True) -> BlockState:
        """Returns the state after gradients `amax`, whose rows are named above.

        Args:
            state: The state before.
            amax: In the last three rows 0 means that there is no gradient, VANISHED that it is 0.
            early: Whether the next batches are measured as well.
        """
        finite = torch.isfinite(amax)
        known = finite[ENTERING] & (amax[ENTERING] > TINY)
        fault = known & ~(finite[LEAVING] & finite[WEIGHTS])
        came = torch.frexp(amax[ENTERING]).exponent
        largest = torch.maximum(amax[ENTERING], amax[LEAVING])
        largest = torch.maximum(largest, amax[WEIGHTS] * 2.0**-_WEIGHTS)
        found = torch.frexp(largest).exponent

        num_faults = (state.resting + (self.rest - 1)).div(self.rest, rounding_mode="floor")
        lower = (num_faults * self.drop).clamp(max=max(0, self.low - _FLOOR))
        rests = state.resting > 0
        # By how much blocks may move and be in their places.
        least, most = self.low + 1 - lower - found, self.high - found
        smallest = torch.frexp(amax[SMALLEST]).exponent
        faint = torch.where(
            (amax[SMALLEST] > 0) & finite[SMALLEST] & ~rests, _FAINT - smallest, -_FAR
        )
        slack = min(_SLACK, self.high - self.low - _ABOVE - _BELOW - 1)
        in_place = (least <= 0) & (found <= self.high)
        in_place &= torch.minimum(faint, most - 1 - slack) <= 0
        fall = torch.minimum(
            (came - self.target).clamp(min=self.drop), (came - _FLOOR).clamp(min=0)
        )
        # And where they are put, if they are put anywhere.
        calm = self.target - lower - found
        calm = torch.where(most < 0, calm, calm.clamp(min=0))
        lifts = faint + _BELOW > most - _ABOVE - slack
        most = torch.where(rests, calm, torch.where(lifts, most - 1, most - _ABOVE))
        least = torch.maximum(least + _BELOW, torch.minimum(faint + _BELOW, most - slack))
        least = torch.where(rests, most - slack, least)
        least = torch.where(fault, -fall, torch.minimum(least, most))
        most = torch.where(fault, -fall, most)
        least = torch.where(known, state.exponents + least, -_FAR)
        most = torch.where(known, state.exponents + most, _FAR)
        bias = self.target - (self.low + _BELOW + self.high - _ABOVE) // 2
        bounds = torch.stack([least, most]).clamp(-MAX_EXPONENT, MAX_EXPONENT)
        placed = _in_runs(bounds[0], bounds[1], bias)

        places = torch.arange(len(placed), device=placed.device)
        above = torch.where(known, places, len(places)).flip(0).cummin(0).values.flip(0)
        move = (placed - state.exponents)[above.clamp(max=len(places) - 1)]
        move = torch.where(above < len(places), move, 0)
        if not early:
            move = torch.where(move[-1:] > _RISE, move.clamp(max=_RISE), move)
        exponents = (state.exponents + move).clamp(-MAX_EXPONENT, MAX_EXPONENT)
        stays = ((in_place & ~fault) | ~known).all()
        stays &= _num_changes(state.exponents) <= _num_changes(exponents)
        exponents = torch.where(stays, state.exponents, exponents)
        resting = (state.resting + torch.where(fault, self.rest, -1)).clamp(0, self.rest * _FAULTS)
        return BlockState(exponents.to(torch.int32), resting.to(torch.int32))


def _num_changes(exponents: Tensor) -> Tensor:
    """How often the exponent changes, also after the last block, where it is 0."""
    return torch.diff(exponents, append=torch.zeros_like(exponents[:1])).count_nonzero()


def _in_runs(least: Tensor, most: Tensor, bias: int) -> Tensor:
    """Exponents from `least` to `most`, with as few changes as there can be.

        run, low, high = [], 0, 0           # what comes after the last block has no scale
        for each block, from the last to the first:
            if max(low, least) > min(high, most):
                give the run the exponent (low + high) // 2 + bias, or the nearest that it may have
                run, low, high = [], -infinity, infinity
            run, low, high = [*run, block], max(low, least), min(high, most)

    That loop takes a step for each block. Here the run that would begin at each block is found at
    once, and then those that do begin, in as many steps as their number has binary digits.

    Args:
        least: The least exponent of each block.
        most: The most, at least that.
        bias: Added to the middle of what a run may have.
    """
    num = len(least)
    none = torch.zeros_like(least[:1])
    low, high = (torch.cat([row, none]).flip(0) for row in (least, most))
    places = torch.arange(num + 1, device=low.device)
    later = places < places[:, None]
    # Of a run from one place (row) to another (column).
    lows = torch.where(later, -_FAR, low).cummax(1).values
    highs = torch.where(later, _FAR, high).cummin(1).values
    end = (lows <= highs).sum(1)  # where the next run begins
    last = (end - 1)[:, None]
    low, high = lows.gather(1, last)[:, 0], highs.gather(1, last)[:, 0]
    middle = (low + high).div(2, rounding_mode="floor") + bias
    own = torch.minimum(torch.maximum(middle, low), high)
    begins = torch.zeros(num + 2, dtype=torch.int64, device=low.device)
    begins[:1] = 1  # begins[0] would copy a number from the host, and wait
    end = torch.cat([end, end.new_full((1,), num + 1)])
    for _ in range(num.bit_length() + 1):
        begins = begins.scatter_reduce(0, end, begins, "amax")
        end = end[end]
    first = torch.where(begins[:-1] > 0, places, 0).cummax(0).values
    return own[first].flip(0)[:num]
