"""The rule of Graphcore's PopART: keep the top of the format's range empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gradscale.formats import format_named
from gradscale.policy.arrays import new, scalars, where_all
from gradscale.policy.settings import MAX_SCALE, MIN_SCALE, call_of, check
from gradscale.policy.stats import GradStats, demand

EDGE = 0.125
"""Where the upper bin begins, as a share of the format's largest number."""


class HistogramState(NamedTuple):
    """The state of `Histogram`."""

    scale: Any
    """The factor that the loss is multiplied by (float32)."""
    clear_steps: Any
    """Consecutive steps in which twice the scale would have been possible (int32)."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Halves the scale if too many gradients are near the ceiling; doubles it if none would be.

        if not finite or upper > threshold:
            scale = max(scale / 2, min_scale)
        elif 2 * amax < max / 8 for interval steps in a row:
            scale = min(scale * 2, max_scale)

    `upper` is the share of the elements above an eighth of the format's largest number. If it is
    not measured, one such element is enough: `amax > max / 8`. This is the rule of Graphcore's
    PopART with two changes: where the published rule alternates between doubling and halving, this
    one keeps the scale; and a step that is not finite lowers the scale.

    Examples:
        >>> policy = Histogram(interval=1)
        >>> policy.update(policy.init(), GradStats(finite=True, amax=9000.0)).scale
        32768.0
        >>> policy.update(policy.init(), GradStats(finite=True, amax=9.0)).scale
        131072.0
    """

    __repr__ = call_of
    goes_by: ClassVar[tuple[str, ...]] = ("amax",)
    init_scale: float = 2.0**16
    threshold: float = 1e-7
    """Largest allowed share of elements above the edge, if `upper` is measured."""
    interval: int = 50
    """Consecutive steps with room for twice the scale after which it is doubled."""
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    format: str = "float16"
    """Narrowest format of the backward pass, which gives the ceiling."""

    def __post_init__(self) -> None:
        check(self, ("interval",), {"threshold": (0.0, 1.0)})

    def init(self, xp: Any = scalars, like: Any = None) -> HistogramState:
        """Returns the first state: numbers, or arrays of `xp` on the device of the 0-dim `like`."""
        return HistogramState(new(xp, like, self.init_scale), new(xp, like, 0))

    def update(self, state: HistogramState, stats: GradStats, xp: Any = scalars) -> HistogramState:
        """Returns the state after a step with these `stats`, which must include `amax`."""
        demand(stats, "amax", "Histogram")

        def number(value: float) -> Any:
            return xp.full_like(state.scale, value)

        always = state.scale > 0
        finite, loss_finite = always & stats.finite, always & stats.loss_finite
        zero, one = xp.full_like(state.clear_steps, 0), xp.full_like(state.clear_steps, 1)
        edge = format_named(self.format).max * EDGE
        half_edge = number(edge / 2)
        if stats.upper is None:
            crowded = number(0.0) + stats.amax > number(edge)
        else:
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
