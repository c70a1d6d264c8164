"""Torch's rule: raise the scale after a number of finite steps, lower it at an overflow."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gradscale.formats import FLOAT32
from gradscale.policy.arrays import new, room_below, scalars, where_all
from gradscale.policy.settings import MAX_SCALE, MIN_SCALE, as_scale, call_of, check, store
from gradscale.policy.stats import GradStats

_DOUBLINGS = 20
"""The most often `slow_growth_above` doubles the interval: 2**20 times as long is for ever."""


class DynamicState(NamedTuple):
    """The state of `Dynamic`.

    Examples:
        >>> policy = Dynamic(init_scale=8.0, growth_interval=2)
        >>> state = policy.update(policy.init(), GradStats(finite=True))
        >>> state
        DynamicState(scale=8.0, good_steps=1, bad_steps=0)
        >>> policy.update(state, GradStats(finite=False))
        DynamicState(scale=4.0, good_steps=0, bad_steps=1)
    """

    scale: Any
    """The factor that the loss is multiplied by (float32)."""
    good_steps: Any
    """Consecutive finite steps since the scale last grew (int32)."""
    bad_steps: Any
    """Consecutive steps that were not finite (int32)."""


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Raises the scale after a number of finite steps and lowers it at an overflow: torch's rule.

        if not loss_finite:
            nothing changes
        elif finite:
            bad_steps = 0
            good_steps += 1
            if good_steps >= growth_interval:  # longer above slow_growth_above
                good_steps = 0
                scale = min(scale * growth_factor, max_scale)
        else:
            good_steps = 0
            bad_steps += 1
            if bad_steps >= hysteresis:
                scale = max(scale * backoff_factor, min_scale)

    The scale grows *on* the `growth_interval`-th consecutive finite step. It is lowered on the
    `hysteresis`-th consecutive step that is not finite and on every further one; a finite step
    resets this count.

    The gradients of large models often overflow soon after the scale has grown. With
    `slow_growth_above`, the interval is `growth_interval` up to that scale and doubles with each
    binade above it, so high scales are tried rarely and a scale that fell far recovers quickly.

    Examples:
        >>> policy = Dynamic(init_scale=2.0**16, growth_interval=1)
        >>> policy.update(policy.init(), GradStats(finite=True)).scale == 2.0**17
        True
        >>> policy.update(policy.init(), GradStats(finite=False)).scale == 2.0**15
        True
    """

    __repr__ = call_of
    goes_by: ClassVar[tuple[str, ...]] = ()
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    slow_growth_above: float | None = None
    """The scale above which `growth_interval` doubles with each binade; None: it is constant."""
    exact: bool = True
    """Whether scale, factors and bounds must be powers of two, so that unscaling is exact."""

    def __post_init__(self) -> None:
        factors = {"growth_factor": (1.0, FLOAT32.max), "backoff_factor": (0.0, 1.0)}
        check(self, ("growth_interval", "hysteresis"), factors)
        if self.slow_growth_above is not None:
            limit = as_scale("slow_growth_above", self.slow_growth_above, self.exact)
            store(self, "slow_growth_above", limit)

    @property
    def is_plain(self) -> bool:
        """Whether `growth_interval` is the same at every scale, as the Triton kernels assume."""
        return self.slow_growth_above is None

    def init(self, xp: Any = scalars, like: Any = None) -> DynamicState:
        """Returns the first state: numbers, or arrays of `xp` on the device of the 0-dim `like`."""
        return DynamicState(new(xp, like, self.init_scale), new(xp, like, 0), new(xp, like, 0))

    def update(self, state: DynamicState, stats: GradStats, xp: Any = scalars) -> DynamicState:
        """Returns the state after a step with these `stats`; this rule ignores `fits`."""
        if xp is scalars and stats.finite and stats.loss_finite and self.is_plain:
            # Almost every step of a scaler on the CPU. What follows takes 20 times as long.
            if state.good_steps + 1 < self.growth_interval:
                return DynamicState(state.scale, state.good_steps + 1, 0)
        # An array where the state is one, so that plain bools in `stats` are converted.
        always = state.scale > 0
        finite, loss_finite = always & stats.finite, always & stats.loss_finite
        zero, one = xp.full_like(state.good_steps, 0), xp.full_like(state.good_steps, 1)
        # Clamped, because one step beyond the end of int32 would make a counter negative.
        last = xp.full_like(zero, 2**31 - 2)
        good_steps = xp.where(finite, xp.minimum(state.good_steps, last) + one, zero)
        bad_steps = xp.where(finite, zero, xp.minimum(state.bad_steps, last) + one)
        grow = good_steps >= self._interval(state.scale, zero, xp)
        lower = bad_steps >= xp.full_like(zero, self.hysteresis)

        def constant(value: float) -> Any:
            return xp.full_like(state.scale, value)

        # Above `room` the product would overflow, and numpy would warn.
        ceiling, room = constant(self.max_scale), constant(room_below(self.growth_factor))
        raised = xp.minimum(state.scale, room) * constant(self.growth_factor)
        raised = xp.where(state.scale > room, ceiling, xp.minimum(raised, ceiling))
        lowered = xp.maximum(state.scale * constant(self.backoff_factor), constant(self.min_scale))
        moved = DynamicState(
            scale=xp.where(grow, raised, xp.where(lower, lowered, state.scale)),
            good_steps=xp.where(grow, zero, good_steps),
            bad_steps=bad_steps,
        )
        return where_all(loss_finite, moved, state, xp)

    def _interval(self, scale: Any, like: Any, xp: Any) -> Any:
        """Consecutive finite steps after which `scale` grows, in the type of `like` (int32)."""
        interval = xp.full_like(like, self.growth_interval)
        if self.slow_growth_above is None:
            return interval
        most, two = xp.full_like(interval, 2**30 - 1), xp.full_like(interval, 2)
        for binade in range(_DOUBLINGS):
            limit = min(self.slow_growth_above * 2.0**binade, FLOAT32.max)
            longer = xp.minimum(interval, most) * two
            interval = xp.where(scale > xp.full_like(scale, limit), longer, interval)
        return interval


def Lengthening(*, above: float = 1.0, **settings: Any) -> Dynamic:
    """Returns `Dynamic(slow_growth_above=above, ...)`. Deprecated; removed in the next version."""
    warnings.warn(
        f"gradscale.Lengthening is deprecated. Use gradscale.Dynamic(slow_growth_above={above}).",
        DeprecationWarning,
        stacklevel=2,
    )
    return Dynamic(slow_growth_above=above, **settings)


def for_pretraining() -> Dynamic:
    """Returns a policy for long runs with large batches: a low scale that grows rarely."""
    return Dynamic(init_scale=4.0, growth_interval=256, min_scale=2.0**-5, slow_growth_above=4.0)
