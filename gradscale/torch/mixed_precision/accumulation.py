"""Several backward passes that make the gradients of one step."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from torch import Tensor

from gradscale.errors import CallOrderError, SettingError

DROPS = ("window", "micro")


class Accumulation:
    """The backward passes within `accumulate()`, each of which is a part of the mean.

    Args:
        passes: How many there will be.
        drop: What a pass with gradients that are not finite costs: "window" or "micro".
    """

    def __init__(self, passes: int, drop: str) -> None:
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            raise SettingError(f"passes must be a whole number > 0, got {passes!r}.")
        if drop not in DROPS:
            raise SettingError(f"drop must be one of {', '.join(DROPS)}, got {drop!r}.")
        self.passes, self.drop, self.taken = passes, drop, 0
        self._thread = get_ident()

    def part(self, loss: Any) -> Any:
        """`loss`, or several, divided by the number of passes."""
        if self._thread != get_ident():
            raise CallOrderError(
                "backward() was called by a second thread while the first was inside "
                "accumulate(). Run whole iterations in turn."
            )
        if self.taken == self.passes:
            raise CallOrderError(
                f"accumulate({self.passes}) has had {self.passes} backward passes already. Pass "
                "the actual number of passes, and call step() after the block."
            )
        self.taken += 1
        if self.passes == 1:
            return loss
        if isinstance(loss, Tensor):
            return loss / self.passes
        return [one / self.passes for one in loss]

    def check_complete(self) -> None:
        """Raises a CallOrderError if there were fewer passes than announced."""
        if self.taken < self.passes:
            raise CallOrderError(
                f"accumulate({self.passes}) had only {self.taken} backward passes, so their mean "
                "would be too small. The gradients were cleared. Pass the actual number of passes."
            )
