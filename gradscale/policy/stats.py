"""The statistics of a backward pass, from which policies move the scale."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradscale.errors import SettingError


class GradStats(NamedTuple):
    """Statistics of the gradients of one backward pass: plain values or arrays of a framework."""

    finite: Any
    """bool: every scaled gradient element is finite; if not, the scale was too high."""
    amax: Any = None
    """The largest magnitude of the scaled gradients; None: not measured."""
    loss_finite: Any = True
    """bool: the unscaled loss was finite; if not, the scale is not the cause."""
    underflow: Any = None
    """Share of the nonzero elements below the smallest normal number; None: not measured."""
    fits: Any = True
    """bool: every unscaled element is finite where it is stored; if not, the scale was too low."""
    exponent: Any = None
    """int32: the frexp exponent of amax, from the engine (log2 differs between frameworks)."""
    upper: Any = None
    """Share of the elements above an eighth of the format's largest number; None: not measured."""
    norm: Any = None
    """2-norm of the unscaled gradients; None: not measured."""


def demand(stats: GradStats, name: str, policy: str) -> None:
    """Raises a SettingError if the field `name`, which `policy` needs, is None."""
    if getattr(stats, name) is None:
        raise SettingError(
            f"{policy} needs {name}, which must be measured at every step, got None. Use an engine "
            "that measures it, or the policy Dynamic."
        )
