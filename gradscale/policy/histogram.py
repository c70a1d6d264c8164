"""Keeping the top of the format empty, as the compilers of Graphcore do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gradscale.formats import format_named
from gradscale.policy.arrays import new, scalars, where_all
from gradscale.policy.settings import (
    MAX_SCALE,
    MIN_SCALE,
    as_count,
    as_factor,
    settle,
    settle_scales,
)
from gradscale.policy.stats import GradStats, demand

EDGE = 0.125
"""Where the upper bin begins, as a share of the format's largest number."""


class HistogramState(NamedTuple):
    """The state of `Histogram`."""

    scale: Any
    """The loss is multiplied by this (float32)."""
    clear_steps: Any
    """Consecutive steps on which the scale could have been raised (int32)."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Halve the scale when too many gradients are near the ceiling, double it when none would be.

        if not finite or upper > threshold:
            scale = max(scale / 2, min_scale)
        elif 2 * amax < max / 8 for interval steps in a row:
            scale = min(scale * 2, max_scale)

    where `upper` is the share of the elements above an eighth of the format's largest number. The
    rule of PopART. Two things are mended: it holds the scale still where the published one doubles
    and halves for ever, and it hears of steps that are not finite.

    >>> policy = Histogram(interval=1)
    >>> policy.update(policy.init(), GradStats(finite=True, amax=9000.0, upper=0.01)).scale
    32768.0
    >>> policy.update(policy.init(), GradStats(finite=True, amax=9.0, upper=0.0)).scale
    131072.0
    """

    goes_by: ClassVar[tuple[str, ...]] = ("amax", "upper")
    """What must be measured besides the flags."""
    init_scale: float = 2.0**16
    threshold: float = 1e-7
    """The share of the elements that may be above the edge."""
    interval: int = 50
    """Steps in a row on which there must have been room, before the scale is raised."""
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    format: str = "float16"
    """The narrowest format of the backward pass, whose ceiling is meant."""

    def __post_init__(self) -> None:
        settle_scales(self, exact=True)
        settle(self, "threshold", as_factor("threshold", self.threshold, 0.0, 1.0, exact=False))
        settle(self, "interval", as_count("interval", self.interval))
        format_named(self.format)

    def init(self, xp: Any = scalars, like: Any = None) -> HistogramState:
        """The first state: plain Python, or arrays of `xp` on the device of the 0-dim `like`."""
        return HistogramState(new(xp, like, self.init_scale), new(xp, like, 0))

    def update(self, state: HistogramState, stats: GradStats, xp: Any = scalars) -> HistogramState:
        """The state after a step with these `stats`, which must have `amax` and `upper`."""
        demand(stats, "amax", "Histogram")
        demand(stats, "upper", "Histogram")

        def number(value: float) -> Any:
            return xp.full_like(state.scale, value)

        always = state.scale > 0
        finite, loss_finite = always & stats.finite, always & stats.loss_finite
        zero, one = xp.full_like(state.clear_steps, 0), xp.full_like(state.clear_steps, 1)
        half_edge = number(format_named(self.format).max * (EDGE / 2))
        crowded = number(0.0) + stats.upper > number(self.threshold)
        empty = xp.where(finite, number(0.0) + stats.amax, half_edge) < half_edge
        lower = xp.where(finite, crowded, always)
        clear = finite & empty & xp.where(lower, state.scale <= 0, always)
        clear_steps = xp.where(
            clear, xp.minimum(state.clear_steps, xp.full_like(zero, 2**31 - 2)) + one, zero
        )
        grow = clear_steps >= xp.full_like(zero, self.interval)
        lowered = xp.maximum(state.scale * number(0.5), number(self.min_scale))
        raised = xp.minimum(state.scale, number(2.0**126)) * number(2.0)
        raised = xp.minimum(raised, number(self.max_scale))
        after = HistogramState(
            xp.where(lower, lowered, xp.where(grow, raised, state.scale)),
            xp.where(grow, zero, clear_steps),
        )
        takes = loss_finite & xp.where(finite, always & stats.fits, always)
        return where_all(takes, after, state, xp)
