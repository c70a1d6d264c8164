"""Doubling and halving: torch's rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gradscale.formats import FLOAT32
from gradscale.policy.arrays import new, room_below, scalars, where_all
from gradscale.policy.settings import (
    MAX_SCALE,
    MIN_SCALE,
    as_count,
    as_factor,
    as_flag,
    as_scale,
    settle,
    settle_scales,
)
from gradscale.policy.stats import GradStats


class DynamicState(NamedTuple):
    """The state of `Dynamic`.

    >>> policy = Dynamic(init_scale=8.0, growth_interval=2)
    >>> state = policy.update(policy.init(), GradStats(finite=True))
    >>> state
    DynamicState(scale=8.0, good_steps=1, bad_steps=0)
    >>> policy.update(state, GradStats(finite=False))
    DynamicState(scale=4.0, good_steps=0, bad_steps=1)
    """

    scale: Any
    """The loss is multiplied by this (float32)."""
    good_steps: Any
    """Consecutive finite steps since the scale last grew (int32)."""
    bad_steps: Any
    """Consecutive steps that were not finite (int32)."""


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Raise the scale while gradients stay finite, lower it when they do not.

        if not loss_finite:
            nothing changes
        elif finite:
            bad_steps = 0
            good_steps += 1
            if good_steps >= growth_interval:
                good_steps = 0
                scale = min(scale * growth_factor, max_scale)
        else:
            good_steps = 0
            bad_steps += 1
            if bad_steps >= hysteresis:
                scale = max(scale * backoff_factor, min_scale)

    So it grows *on* the n-th consecutive finite step, and backs off on the n-th consecutive bad one
    and on every further one; a finite step refills the patience.

    >>> policy = Dynamic(init_scale=2.0**16, growth_interval=1)
    >>> policy.update(policy.init(), GradStats(finite=True)).scale == 2.0**17
    True
    >>> policy.update(policy.init(), GradStats(finite=False)).scale == 2.0**15
    True
    """

    goes_by: ClassVar[tuple[str, ...]] = ()
    """What must be measured besides the flags."""
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    exact: bool = True
    """Whether scale, factors and bounds must be powers of two, so that unscaling is exact."""

    def __post_init__(self) -> None:
        as_flag("exact", self.exact)
        settle_scales(self, self.exact)
        for name, above, below in (
            ("growth_factor", 1.0, FLOAT32.max),
            ("backoff_factor", 0.0, 1.0),
        ):
            settle(self, name, as_factor(name, getattr(self, name), above, below, self.exact))
        for name in ("growth_interval", "hysteresis"):
            settle(self, name, as_count(name, getattr(self, name)))

    def init(self, xp: Any = scalars, like: Any = None) -> DynamicState:
        """The first state: plain Python, or arrays of `xp` on the device of the 0-dim `like`."""
        return DynamicState(new(xp, like, self.init_scale), new(xp, like, 0), new(xp, like, 0))

    def update(self, state: DynamicState, stats: GradStats, xp: Any = scalars) -> DynamicState:
        """The state after a step with these `stats`; `fits` does not matter to this rule."""
        # An array where the state is one, so that a plain bool in `stats` becomes one as well.
        always = state.scale > 0
        finite, loss_finite = always & stats.finite, always & stats.loss_finite
        zero, one = xp.full_like(state.good_steps, 0), xp.full_like(state.good_steps, 1)
        # Held below the end of int32, where one more step would make a counter negative.
        last = xp.full_like(zero, 2**31 - 2)
        good_steps = xp.where(finite, xp.minimum(state.good_steps, last) + one, zero)
        bad_steps = xp.where(finite, zero, xp.minimum(state.bad_steps, last) + one)
        grow = good_steps >= self._interval(state, xp)
        lower = bad_steps >= xp.full_like(zero, self.hysteresis)

        def constant(value: float) -> Any:
            return xp.full_like(state.scale, value)

        # Beyond `room` the product would overflow, which numpy warns of.
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

    def _interval(self, state: DynamicState, xp: Any) -> Any:
        """After how many finite steps in a row the scale grows (int32)."""
        return xp.full_like(state.good_steps, self.growth_interval)


_DOUBLINGS = 20
"""So often can an interval be doubled: a million times as long is for ever."""


@dataclass(frozen=True, kw_only=True)
class Lengthening(Dynamic):
    """`Dynamic` that waits the longer the higher the scale: large models break where it creeps up.

    The interval is `growth_interval` for scales up to `above`, and twice as long for every binade
    more, so that the scale still comes back quickly from far below.

    >>> policy = Lengthening(init_scale=8.0, growth_interval=1, above=4.0)
    >>> state = policy.update(policy.init(), GradStats(finite=True))
    >>> state.scale, policy.update(state, GradStats(finite=True)).scale
    (8.0, 16.0)
    """

    above: float = 1.0
    """The highest scale at which the interval is `growth_interval`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, "above", as_scale("above", self.above, self.exact))

    def _interval(self, state: DynamicState, xp: Any) -> Any:
        interval = super()._interval(state, xp)
        most, two = xp.full_like(interval, 2**30 - 1), xp.full_like(interval, 2)
        for binade in range(_DOUBLINGS):
            limit = min(self.above * 2.0**binade, FLOAT32.max)
            longer = xp.minimum(interval, most) * two
            interval = xp.where(state.scale > xp.full_like(state.scale, limit), longer, interval)
        return interval


def for_pretraining() -> Lengthening:
    """A policy for long runs with large batches: a low scale that rises ever more slowly."""
    return Lengthening(init_scale=4.0, growth_interval=256, min_scale=2.0**-5, above=4.0)
