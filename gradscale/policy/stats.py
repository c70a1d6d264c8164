"""What a backward pass tells a policy."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradscale.errors import SettingError


class GradStats(NamedTuple):
    """What one backward pass told us, in plain values or those of the framework that measured."""

    finite: Any
    """bool: every scaled gradient element is finite; if not, the scale was too high."""
    amax: Any = None
    """The largest magnitude among the scaled gradients; None where it is not measured."""
    loss_finite: Any = True
    """bool: the unscaled loss was finite; if not, no scale is to blame."""
    underflow: Any = None
    """Share of the nonzero elements below the smallest normal number; None = not measured."""
    fits: Any = True
    """bool: every unscaled element is finite where it is stored; if not, the scale was too low."""
    exponent: Any = None
    """int32: the frexp exponent of amax, taken by the engine (log2 differs between frameworks)."""
    upper: Any = None
    """Share of the elements above an eighth of the format's largest number; None = not measured."""


def demand(stats: GradStats, name: str, policy: str) -> None:
    """Raises if `stats` lack what a policy goes by."""
    if getattr(stats, name) is None:
        raise SettingError(
            f"{policy} goes by {name}, which must be measured at every step, got None. Take an "
            "engine that measures it, or Dynamic."
        )
