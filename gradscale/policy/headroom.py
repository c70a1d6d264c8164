"""Placing the largest gradient a margin below the ceiling, from what the last steps have shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gradscale.errors import SettingError
from gradscale.formats import format_named
from gradscale.policy.arrays import log2_of, new, power_of_two, scalars, where_all
from gradscale.policy.settings import (
    MAX_SCALE,
    MIN_SCALE,
    as_count,
    settle,
    settle_scales,
)
from gradscale.policy.stats import GradStats, demand

REACH = 10
"""Binades that a single step can be above the others and still be taken seriously."""
WIDEST = 12
"""The most binades that overflows which nobody saw coming can add to the margin."""
RECENT = 64
"""Finite steps after which an overflow that nobody saw coming is no longer part of the last one."""
LONG = 16
"""How many times as long a raise by a single binade has to wait."""
CURABLE = 2
"""Bad steps in a row after which the scale is no longer thought to be the reason."""
BLIND = 24
"""Binades that a scale can be raised by if every gradient has vanished: float16 keeps what is above
2**-25, so afterwards everything is below 1/2."""
_LAST = 2**31 - 2


class HeadroomState(NamedTuple):
    """The state of `Headroom`. Exponents are those of frexp, of the largest unscaled gradient."""

    scale: Any
    """The loss is multiplied by this (float32)."""
    last: Any
    """The exponent one step ago; after bad steps, log2 of the scale that failed last (int32)."""
    before: Any
    """The exponent two steps ago (int32)."""
    peak: Any
    """The largest exponent lately, in parts of a binade: `memory` of them make one (int32)."""
    crest: Any
    """The largest median lately, in the same parts (int32)."""
    spread: Any
    """Binades that were added to the margin because of overflows nobody saw coming (int32)."""
    kept: Any
    """What `spread` was before the bad steps that go on now (int32)."""
    seen: Any
    """Steps whose gradients told something, counted up to 1 (int32)."""
    bad_steps: Any
    """Steps that were not finite since the last that showed something (int32)."""
    calm: Any
    """Finite steps since `spread` was moved last (int32)."""
    patience: Any
    """Finite steps in which a binade of `spread` is forgotten (int32)."""
    rest: Any
    """Steps since the scale was raised last (int32)."""


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Keep the largest gradient a margin of binades below the format's ceiling.

    Every finite step shows the exponent of the largest gradient. The *level* is the median of the
    last three, which one spike or one odd batch does not move. The highest exponent of the last
    steps is the *peak*, the highest level the *crest*; both are forgotten at a binade in `memory`
    steps. The scale that is wanted has

        max(crest + spread, peak) + log2(scale) == exponent of the ceiling - margin

    and the scale jumps there: down at once; up at most once in `pause` steps if it is two binades
    or more, and once in 16 times as many if it is one. It is raised only into room that gradients
    have shown.

    A step that is not finite although its gradients should have fitted shows that something else
    overflows, such as the gradient of an activation, or a spike: `spread` becomes two binades more
    than the scale had to spare; six, and twice what it was, if it was widened lately or never. The
    last of them is forgotten in `forget` finite steps, the one before in half as many and so on,
    and all take twice as many after every further such step. If the bad steps go on, the scale
    falls by 8, 16, 16, ... binades; if more than two were needed, it was not the scale's fault, and
    if the next gradients are larger, it was theirs: then `spread` is what it was before.

    A step whose loss is not finite changes nothing; nor does one with `fits` false. Before anything
    is known, the first bad step lowers the scale to at most 1 and the next one by 14 binades, and
    gradients that have all vanished raise it by 24. `spread` begins at two binades, or four after
    bad steps, which are forgotten eight times as quickly.

    >>> policy = Headroom(init_scale=2.0**16)
    >>> policy.update(policy.init(), GradStats(finite=True, amax=2.0**-9, exponent=-8)).scale
    137438953472.0
    >>> policy.update(policy.init(), GradStats(finite=False, amax=0.0, exponent=0)).scale
    1.0
    """

    goes_by: ClassVar[tuple[str, ...]] = ("amax", "exponent")
    """What must be measured besides the flags."""
    init_scale: float = 2.0**8
    """Low enough for almost any model: from there the first step shows the way up."""
    margin: int = 1
    """Binades between the largest gradient and the ceiling."""
    memory: int = 64
    """Steps in which a binade of the peak is forgotten."""
    forget: int = 500
    """Finite steps in which a binade of `spread` is forgotten, the first time."""
    pause: int = 16
    """Steps between two raises of the scale, at the least."""
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    format: str = "float16"
    """The narrowest format of the backward pass, whose ceiling is meant."""

    def __post_init__(self) -> None:
        settle_scales(self, exact=True)
        for name in ("margin", "memory", "forget", "pause"):
            settle(self, name, as_count(name, getattr(self, name)))
        for name, most in (("margin", 100), ("memory", 2**20), ("pause", 2**20)):
            if getattr(self, name) > most:
                raise SettingError(f"{name} must be at most {most}, got {getattr(self, name)}.")
        format_named(self.format)

    def init(self, xp: Any = scalars, like: Any = None) -> HeadroomState:
        """The first state: plain Python, or arrays of `xp` on the device of the 0-dim `like`."""
        # Each its own: who moves a state in place must not move another field with it.
        zeros = [new(xp, like, 0) for _ in HeadroomState._fields[1:]]
        state = HeadroomState(new(xp, like, self.init_scale), *zeros)
        early, pause = max(self.forget // 8, 1), self.pause
        return state._replace(patience=new(xp, like, early), rest=new(xp, like, pause))

    def update(self, state: HeadroomState, stats: GradStats, xp: Any = scalars) -> HeadroomState:
        """The state after a step with these `stats`, which must have `amax` and `exponent`."""
        demand(stats, "amax", "Headroom")
        demand(stats, "exponent", "Headroom")
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
        # What is unheard of cannot come from gradients, and must not overflow the sums below.
        exponent = zero + stats.exponent
        exponent = xp.maximum(xp.minimum(exponent, whole(256)), whole(-256)) - log2_scale
        room = whole(format_named(self.format).ceiling - self.margin)
        parts = whole(self.memory)

        # What is known after this step.
        fresh = shows & (unseen | hurt)
        first = xp.where(fresh, exponent, state.last)
        second = xp.where(fresh, exponent, state.before)
        low, high = xp.minimum(exponent, first), xp.maximum(exponent, first)
        level = xp.maximum(low, xp.minimum(high, second))
        top = (level + whole(REACH)) * parts

        def faded(known: Any, now: Any) -> Any:
            """The largest of `known`, a part of a binade forgotten, and `now`."""
            kept = xp.where(some, xp.minimum(known - one, top), now)
            return xp.where(shows, xp.maximum(kept, now), known)

        peak = faded(state.peak, xp.minimum(exponent * parts, top))
        crest = faded(state.crest, level * parts)
        above, ground = (zero - (zero - each) // parts for each in (peak, crest))

        # Finite: the place that is wanted, and whether it is far enough to go there.
        # How much room the scale that failed last should have had, as it looks now. If these
        # gradients would have overflowed as well, they explain it all: they have grown.
        spare = room - exponent - state.last
        explained = shows & hurt & some & (spare < whole(-self.margin))
        spread = xp.where(incurable | explained, state.kept, state.spread)
        doubt = xp.minimum(xp.maximum(spare, zero) + whole(4), whole(WIDEST))
        spread = xp.where(shows & unseen, xp.where(hurt, doubt, whole(2)), spread)
        calm = xp.minimum(state.calm, last) + one
        forgets = xp.minimum(calm, whole(2**24)) * spread >= state.patience
        spread = xp.where(forgets, spread - one, spread)
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

        # Not finite: further down every time, and by more than it seemed to need.
        gap = room - ground - log2_scale
        recent = state.calm < whole(RECENT)
        again = xp.where(recent, state.spread + state.spread, zero)
        more = xp.where(recent, whole(6), whole(2))
        wider = xp.maximum(xp.maximum(gap, zero) + more, again)
        wider = xp.minimum(xp.maximum(wider, state.spread), whole(WIDEST))
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
        worse = xp.minimum(state.bad_steps, last) + one
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
            calm=xp.where(finite & (spread == state.spread), calm, zero),
            patience=xp.where(finite, state.patience, longer),
            rest=xp.where(rose, zero, xp.minimum(state.rest, last) + one),
        )
        takes = always & stats.loss_finite & xp.where(finite, fits, always)
        return where_all(takes, after, state, xp)


def for_short_runs() -> Headroom:
    """A policy for hundreds of steps, such as fine-tuning and reinforcement learning.

    It forgets peaks and overflows sooner: there is no time to be careful for long.
    """
    return Headroom(memory=32, forget=100, pause=8)
