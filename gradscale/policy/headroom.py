"""A predictive rule: place the largest gradient a margin below the format's ceiling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from gradscale.errors import SettingError
from gradscale.formats import format_named
from gradscale.policy.arrays import log2_of, new, power_of_two, scalars, where_all
from gradscale.policy.settings import MAX_SCALE, MIN_SCALE, call_of, check
from gradscale.policy.stats import GradStats, demand

REACH = 14
"""The most binades above the level at which a single step counts towards the peak."""
WIDEST = 15
"""The most binades that unpredicted overflows can add to the margin."""
LONE = 16
"""Finite steps that earn one overflow which counts as a lone spike."""
LONG = 16
"""How many times `pause` a raise by a single binade has to wait."""
CURABLE = 2
"""Bad steps in a row after which the scale is no longer considered the cause."""
BLIND = 24
"""Binades by which the scale is raised if every gradient is zero: float16 flushes what is below
2**-25, so after the raise everything is below 1/2."""
SPIKES = ("fit", "skip")
_LAST = 2**31 - 2


class HeadroomState(NamedTuple):
    """The state of `Headroom`. Exponents are frexp exponents of the largest unscaled gradient."""

    scale: Any
    """The factor that the loss is multiplied by (float32)."""
    last: Any
    """The exponent one step ago; after bad steps, log2 of the last scale that failed (int32)."""
    before: Any
    """The exponent two steps ago (int32)."""
    peak: Any
    """The largest recent exponent, in units of 1 / `memory` binade (int32)."""
    crest: Any
    """The largest recent median, in the same units (int32)."""
    spread: Any
    """Binades added to the margin because of unpredicted overflows (int32)."""
    kept: Any
    """`spread` before the current run of bad steps (int32)."""
    seen: Any
    """1 after the first finite step with a nonzero gradient, otherwise 0 (int32)."""
    bad_steps: Any
    """Steps that were not finite since the last finite step with a nonzero gradient, except lone
    spikes; -1 right after a lone spike (int32)."""
    calm: Any
    """Finite steps since the last that was not finite or exceeded crest and `spread` (int32)."""
    patience: Any
    """Number of such steps after which `spread` is 0 (int32)."""
    rest: Any
    """Steps since the scale was last raised (int32)."""
    credit: Any
    """Finite steps, up to four times `LONE`, minus `LONE` for every lone spike (int32)."""


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Keeps the largest gradient a margin of binades below the format's largest number.

    Every finite step gives the exponent of the largest unscaled gradient. The *level* is the median
    of the last three, which a single spike does not change. The *peak* is the highest recent
    exponent and the *crest* the highest recent level. Both decay by one binade in `memory` steps,
    and the crest rises by at most one binade per step. The scale is set so that

        max(crest + spread, peak) + log2(scale) == exponent of the ceiling - margin

    It is lowered at once. It is raised by two or more binades at most once in `pause` steps, and by
    one binade at most once in 16 times as many; never above what recent gradients leave room for.

    A step that is not finite although its gradients should have fitted has another cause, such as
    the gradient of an activation or a spike. Then `spread` becomes twice its value plus two (the
    first time, four times its value plus two), and at least two more than the scale had to spare.
    After n finite steps that did not exceed crest and spread, it is at most `forget` / n; `forget`
    doubles after every such overflow except the first. If further steps are not finite, the scale
    falls by 8, 16, 16, ... binades. If there are more than two, or if the gradients after them are
    large enough to explain the overflow, `spread` is set back to its earlier value.

    With `spikes="skip"` an overflow after a finite step is a lone spike and changes nothing. On
    average at most one in 16 steps is treated so, and at most four within a few steps.

    A step with `loss_finite` or `fits` false changes nothing. Before the first finite step, the
    first bad step lowers the scale to at most 1 and each further one by 14 binades; gradients that
    are all zero raise it by 24. `spread` starts at two binades, or at four or more after bad steps,
    and decays eight times as fast at first.

    Examples:
        >>> policy = Headroom(init_scale=2.0**16)
        >>> policy.update(policy.init(), GradStats(finite=True, amax=2.0**-9, exponent=-8)).scale
        68719476736.0
        >>> policy.update(policy.init(), GradStats(finite=False, amax=0.0, exponent=0)).scale
        1.0
    """

    __repr__ = call_of
    goes_by: ClassVar[tuple[str, ...]] = ("amax", "exponent")
    """Fields of `GradStats` that `update` reads besides the flags; `exponent` may be None."""
    added: ClassVar[tuple[str, ...]] = ("credit",)
    """Fields of the state that older checkpoints do not have; they start as in `init`."""
    init_scale: float = 2.0**8
    """The first scale, low enough for almost any model; the first finite step raises it."""
    margin: int = 2
    """Binades between the largest gradient and the ceiling."""
    memory: int = 64
    """Steps in which the peak decays by one binade."""
    forget: int = 1000
    """Finite steps after which `spread` is 0, the first time."""
    pause: int = 16
    """Smallest number of steps between two raises of the scale."""
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    format: str = "float16"
    """Narrowest format of the backward pass, which gives the ceiling."""
    spikes: str = "fit"
    """What happens after a lone step with far larger gradients: "fit" lowers the scale, so that the
    next such step fits; "skip" keeps the scale, so that the next such step is skipped too."""

    def __post_init__(self) -> None:
        if self.spikes not in SPIKES:
            raise SettingError(f"spikes must be one of {', '.join(SPIKES)}, got {self.spikes!r}.")
        check(self, ("margin", "memory", "forget", "pause"))
        for name, most in (("margin", 100), ("memory", 2**20), ("pause", 2**20)):
            if getattr(self, name) > most:
                raise SettingError(f"{name} must be at most {most}, got {getattr(self, name)}.")

    def init(self, xp: Any = scalars, like: Any = None) -> HeadroomState:
        """Returns the first state: numbers, or arrays of `xp` on the device of the 0-dim `like`."""
        # A tensor for each: an engine that updates a state in place must not change other fields.
        zeros = [new(xp, like, 0) for _ in HeadroomState._fields[1:]]
        state = HeadroomState(new(xp, like, self.init_scale), *zeros)
        begin = {"patience": max(self.forget // 8, 1), "rest": self.pause, "credit": 4 * LONE}
        return state._replace(**{name: new(xp, like, value) for name, value in begin.items()})

    def update(self, state: HeadroomState, stats: GradStats, xp: Any = scalars) -> HeadroomState:
        """Returns the state after a step with these `stats`, which must include `amax`."""
        if xp is scalars and stats.finite and stats.loss_finite and stats.fits:
            shown = stats.amax is not None and stats.amax > 0
            if shown and state.seen > 0 >= state.bad_steps:
                # Almost every step of a scaler on the CPU. What follows takes 30 times as long.
                mantissa, power = math.frexp(state.scale)
                if mantissa == 0.5:
                    found = stats.exponent
                    found = math.frexp(stats.amax)[1] if found is None else found
                    return self._after_finite(state, found, power - 1)
        demand(stats, "amax", "Headroom")
        always = state.scale > 0
        zero = xp.full_like(state.last, 0)

        def whole(value: int) -> Any:
            return xp.full_like(zero, value)

        one, last = whole(1), whole(_LAST)
        finite, fits = always & stats.finite, always & stats.fits
        nonzero = always & (stats.amax > 0)
        some, unseen = state.seen > zero, state.seen <= zero
        hurt = state.bad_steps > zero
        incurable = state.bad_steps > whole(CURABLE)
        shows = finite & nonzero
        log2_scale = log2_of(state.scale, xp, zero)
        # Clamped, so that the sums below cannot overflow; gradients stay far within.
        exponent = zero + self._exponent(stats, state.scale, xp, zero)
        exponent = xp.maximum(xp.minimum(exponent, whole(256)), whole(-256)) - log2_scale
        room = whole(self._room)
        parts = whole(self.memory)

        # Level, peak and crest after this step.
        fresh = shows & (unseen | hurt)
        first = xp.where(fresh, exponent, state.last)
        second = xp.where(fresh, exponent, state.before)
        low, high = xp.minimum(exponent, first), xp.maximum(exponent, first)
        level = xp.maximum(low, xp.minimum(high, second))
        top = (level + whole(REACH)) * parts

        # Two spikes within three steps are a level. They raise the crest by a binade each, because
        # `spread` is room for spikes already.
        steep = xp.minimum(level * parts, state.crest + parts)
        raised = xp.where(fresh, level * parts, steep)

        def faded(known: Any, now: Any) -> Any:
            """The larger of `now` and `known`, decayed by one part of a binade."""
            kept = xp.where(some, xp.minimum(known - one, top), now)
            return xp.where(shows, xp.maximum(kept, now), known)

        peak = faded(state.peak, xp.minimum(exponent * parts, top))
        crest = faded(state.crest, raised)
        above, ground = (zero - (zero - each) // parts for each in (peak, crest))

        # Finite: the scale that is wanted, and whether to move there now.
        # The room that the scale which failed last would have left for these gradients. If they
        # would have overflowed as well, gradients have grown, and that explains the overflow.
        spare = room - exponent - state.last
        explained = shows & hurt & some & (spare < whole(-self.margin))
        spread = xp.where(incurable | explained, state.kept, state.spread)
        doubt = xp.minimum(xp.maximum(spare, zero) + whole(4), whole(WIDEST))
        spread = xp.where(shows & unseen, xp.where(hurt, doubt, whole(2)), spread)
        needed = shows & (exponent > ground + spread)
        calm = xp.where(needed, one, xp.minimum(state.calm, last) + one)
        spread = xp.minimum(spread, state.patience // calm)
        wanted = room - xp.maximum(ground + spread, above)
        rested = (state.rest >= whole(self.pause)) | hurt | unseen
        long_rested = state.rest >= whole(LONG * self.pause)
        rises = (wanted >= log2_scale + whole(2)) & rested
        rises = rises | ((wanted > log2_scale) & long_rested)
        falls = wanted < log2_scale
        vanished = finite & (stats.amax <= 0)
        moves = ((rises | falls) & shows) | (vanished & hurt & some & (wanted > log2_scale))
        blind = vanished & unseen
        wanted = xp.where(blind, log2_scale + whole(BLIND), wanted)
        good = xp.where(moves | blind, wanted, log2_scale)

        # Not finite: lower the scale by more at each step, and by more than seemed necessary.
        gap = room - ground - log2_scale
        # Before the first overflow nothing is known about the height of spikes.
        early = state.patience < whole(self.forget)
        more = state.spread * xp.where(early, whole(4), whole(2))
        wider = xp.minimum(xp.maximum(xp.maximum(gap, zero), more) + whole(2), whole(WIDEST))
        drop = xp.where(hurt, xp.where(state.bad_steps > one, whole(16), whole(8)), whole(2))
        known = xp.minimum(room - xp.maximum(ground + wider, above), log2_scale - drop)
        unknown = xp.minimum(log2_scale - whole(16), zero)
        unknown = xp.where(log2_scale > zero, unknown, log2_scale - whole(14))
        bad = xp.where(some, known, unknown)
        wider = xp.where(some, wider, zero)
        longer = xp.minimum(state.patience, whole(2**20)) * whole(2)
        longer = xp.maximum(longer, whole(self.forget))
        longer = xp.where(some & (state.bad_steps <= zero), longer, state.patience)

        exponent_after = xp.where(finite, good, bad)
        exponent_after = xp.minimum(xp.maximum(exponent_after, whole(-126)), whole(127))
        scale = power_of_two(exponent_after, xp, xp.full_like(state.scale, 1.0))
        scale = xp.where(exponent_after == log2_scale, state.scale, scale)
        scale = xp.maximum(scale, xp.full_like(scale, self.min_scale))
        scale = xp.minimum(scale, xp.full_like(scale, self.max_scale))
        rose = scale > state.scale
        worse = xp.minimum(xp.maximum(state.bad_steps, zero), last) + one
        after = HeadroomState(
            scale=scale,
            last=xp.where(shows, exponent, xp.where(finite, state.last, log2_scale)),
            before=xp.where(shows, first, state.before),
            peak=peak,
            crest=crest,
            spread=xp.where(finite, spread, wider),
            kept=xp.where(finite, spread, xp.where(hurt, state.kept, state.spread)),
            seen=xp.where(shows, one, state.seen),
            bad_steps=xp.where(finite, xp.where(shows, zero, state.bad_steps), worse),
            calm=xp.where(finite, calm, zero),
            patience=xp.where(finite, state.patience, longer),
            rest=xp.where(rose, zero, xp.minimum(state.rest, last) + one),
            credit=xp.where(finite, xp.minimum(state.credit + one, whole(4 * LONE)), state.credit),
        )
        takes = always & stats.loss_finite & xp.where(finite, fits, always)
        after = where_all(takes, after, state, xp)
        if self.spikes == "fit":
            return after
        # A lone spike moves nothing, and a second one in a row is none.
        lone = some & (state.bad_steps == zero) & (state.credit >= whole(LONE))
        lone = lone & takes & xp.where(finite, state.seen < zero, always)
        spent = state._replace(bad_steps=whole(-1), credit=state.credit - whole(LONE))
        return where_all(lone, spent, after, xp)

    @cached_property
    def _room(self) -> int:
        """The exponent that the largest scaled gradient should have."""
        return format_named(self.format).ceiling - self.margin

    @staticmethod
    def _exponent(stats: GradStats, scale: Any, xp: Any, zero: Any) -> Any:
        """The frexp exponent of `amax`; where that is 0 or not finite, it does not matter."""
        if stats.exponent is not None:
            return stats.exponent
        if xp is scalars:
            return math.frexp(stats.amax)[1] if math.isfinite(stats.amax) else 0
        amax = xp.full_like(scale, 0.0) + stats.amax
        return log2_of(amax, xp, zero) + xp.full_like(zero, 1)

    def _after_finite(self, state: HeadroomState, exponent: int, log2_scale: int) -> HeadroomState:
        """The same rule in plain numbers, for a finite step that follows another.

        `exponent` is that of the scaled gradients, and the scale is 2 to the power of `log2_scale`.
        """
        parts, rest = self.memory, state.rest
        exponent = max(min(exponent, 256), -256) - log2_scale
        level = sorted((exponent, state.last, state.before))[1]
        top = (level + REACH) * parts
        peak = max(min(state.peak - 1, top), min(exponent * parts, top))
        crest = max(min(state.crest - 1, top), min(level * parts, state.crest + parts))
        ground, above = -(-crest // parts), -(-peak // parts)
        calm = 1 if exponent > ground + state.spread else min(state.calm, _LAST) + 1
        spread = min(state.spread, state.patience // calm)
        wanted = self._room - max(ground + spread, above)
        scale = state.scale
        rises = wanted > log2_scale and rest >= LONG * self.pause
        rises = rises or (wanted >= log2_scale + 2 and rest >= self.pause)
        if rises or wanted < log2_scale:
            scale = math.ldexp(1.0, min(max(wanted, -126), 127))
        scale = float(min(max(scale, self.min_scale), self.max_scale))
        return HeadroomState(
            scale=scale,
            last=exponent,
            before=state.last,
            peak=peak,
            crest=crest,
            spread=spread,
            kept=spread,
            seen=1,
            bad_steps=0,
            calm=calm,
            patience=state.patience,
            rest=0 if scale > state.scale else min(rest, _LAST) + 1,
            credit=min(state.credit + 1, 4 * LONE),
        )


def for_short_runs() -> Headroom:
    """Returns a policy for runs of hundreds of steps: fine-tuning and reinforcement learning.

    Peaks and overflows decay sooner, so less of a short run is spent at a low scale.
    """
    return Headroom(memory=32, forget=200, pause=8)
