"""Trajectories of a dynamic scale, in plain Python, for the libraries whose names we have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

FLOAT32_TINY = 2.0**-126


class Walk(NamedTuple):
    """The settings of a rule that grows on the `interval`-th consecutive finite step."""

    scale: float
    interval: int
    factor: float = 2.0
    floor: float = FLOAT32_TINY
    highest: float = 2.0**127
    """The rule does not grow beyond this, but stays."""

    def over(self, history: Iterable[bool]) -> list[tuple[float, int]]:
        """Scale and counter after each step of `history`, whose flags say finite or not."""
        scale, counter, found = self.scale, 0, []
        for finite in history:
            counter = counter + 1 if finite else 0
            if not finite:
                scale = max(scale / self.factor, self.floor)
            elif counter == self.interval:
                counter = 0
                scale = scale * self.factor if scale * self.factor <= self.highest else scale
            found.append((scale, counter))
        return found
