"""`Dynamic.update` and `Headroom.update` in kernels: each rule a second time; tests compare them.

Both move a packed state in place and return the scale after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscale.policy.headroom import BLIND, CURABLE, LONE, LONG, REACH, WIDEST
from gradscale.torch.grads.triton.offsets import (
    DYNAMIC_SETTINGS,
    DYNAMIC_STATE,
    HEADROOM_SETTINGS,
    HEADROOM_STATE,
    STATE,
)

_LAST = tl.constexpr(2**31 - 2)
_REACH, _WIDEST, _LONE = tl.constexpr(REACH), tl.constexpr(WIDEST), tl.constexpr(LONE)
_LONG, _CURABLE, _BLIND = tl.constexpr(LONG), tl.constexpr(CURABLE), tl.constexpr(BLIND)


@triton.jit
def load_float(pointer):
    """The float32 whose bits are at the int32 `pointer`."""
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def store_float(pointer, value):
    """Writes the bits of a float32 to the int32 `pointer`."""
    tl.store(pointer, value.to(tl.int32, bitcast=True))


@triton.jit
def moved_dynamic(state_at, settings_at, scale, finite, counts):
    """Moves a `DynamicState` by a step, if the step `counts`."""
    good = tl.load(state_at + DYNAMIC_STATE.good_steps)
    bad = tl.load(state_at + DYNAMIC_STATE.bad_steps)
    max_scale = load_float(settings_at + DYNAMIC_SETTINGS.max_scale)
    room = load_float(settings_at + DYNAMIC_SETTINGS.room)
    new_good = tl.where(finite, tl.minimum(good, _LAST) + 1, 0)
    new_bad = tl.where(finite, 0, tl.minimum(bad, _LAST) + 1)
    grow = new_good >= tl.load(settings_at + DYNAMIC_SETTINGS.growth_interval)
    lower = new_bad >= tl.load(settings_at + DYNAMIC_SETTINGS.hysteresis)
    raised = tl.minimum(scale, room) * load_float(settings_at + DYNAMIC_SETTINGS.growth_factor)
    raised = tl.where(scale > room, max_scale, tl.minimum(raised, max_scale))
    lowered = scale * load_float(settings_at + DYNAMIC_SETTINGS.backoff_factor)
    lowered = tl.maximum(lowered, load_float(settings_at + DYNAMIC_SETTINGS.min_scale))
    moved = tl.where(grow, raised, tl.where(lower, lowered, scale))
    after = tl.where(counts, moved, scale)
    store_float(state_at + STATE.scale, after)
    new_good = tl.where(grow, 0, new_good)
    tl.store(state_at + DYNAMIC_STATE.good_steps, tl.where(counts, new_good, good))
    tl.store(state_at + DYNAMIC_STATE.bad_steps, tl.where(counts, new_bad, bad))
    return after


@triton.jit
def _exponent(value):
    """The frexp exponent of a positive float32 number; what it is for others does not matter."""
    tiny = value < 1.1754943508222875e-38
    wide = tl.where(tiny, value * 1.8446744073709552e19, value)
    bits = wide.to(tl.int32, bitcast=True)
    return ((bits >> 23) & 0xFF) - 126 - tl.where(tiny, 64, 0)


@triton.jit
def _up(value, parts):
    """`value / parts`, rounded up. Division of whole numbers below 0 differs between languages."""
    return (value + 512 * parts + parts - 1) // parts - 512


@triton.jit
def _faded(known, now, top, some, shows):
    """The largest of `known`, a part of a binade forgotten, and `now`."""
    kept = tl.where(some, tl.minimum(known - 1, top), now)
    return tl.where(shows, tl.maximum(kept, now), known)


@triton.jit
def moved_headroom(state_at, settings_at, scale, finite, fits, amax, counts):
    """Moves a `HeadroomState` by a step, if the step `counts`; `amax` is at its `scale`."""
    s_last = tl.load(state_at + HEADROOM_STATE.last)
    s_before = tl.load(state_at + HEADROOM_STATE.before)
    s_peak = tl.load(state_at + HEADROOM_STATE.peak)
    s_crest = tl.load(state_at + HEADROOM_STATE.crest)
    s_spread = tl.load(state_at + HEADROOM_STATE.spread)
    s_kept = tl.load(state_at + HEADROOM_STATE.kept)
    s_seen = tl.load(state_at + HEADROOM_STATE.seen)
    s_bad = tl.load(state_at + HEADROOM_STATE.bad_steps)
    s_calm = tl.load(state_at + HEADROOM_STATE.calm)
    s_patience = tl.load(state_at + HEADROOM_STATE.patience)
    s_rest = tl.load(state_at + HEADROOM_STATE.rest)
    s_credit = tl.load(state_at + HEADROOM_STATE.credit)
    room = tl.load(settings_at + HEADROOM_SETTINGS.room)
    margin = tl.load(settings_at + HEADROOM_SETTINGS.margin)
    parts = tl.load(settings_at + HEADROOM_SETTINGS.memory)
    forget = tl.load(settings_at + HEADROOM_SETTINGS.forget)
    pause = tl.load(settings_at + HEADROOM_SETTINGS.pause)
    skips = tl.load(settings_at + HEADROOM_SETTINGS.skips)
    min_scale = load_float(settings_at + HEADROOM_SETTINGS.min_scale)
    max_scale = load_float(settings_at + HEADROOM_SETTINGS.max_scale)

    some = s_seen > 0
    unseen = s_seen <= 0
    hurt = s_bad > 0
    incurable = s_bad > _CURABLE
    shows = finite & (amax > 0)
    log2_scale = _exponent(scale) - 1
    exponent = tl.where(amax > 0, _exponent(amax), 0) - log2_scale

    fresh = shows & (unseen | hurt)
    first = tl.where(fresh, exponent, s_last)
    second = tl.where(fresh, exponent, s_before)
    low = tl.minimum(exponent, first)
    high = tl.maximum(exponent, first)
    level = tl.maximum(low, tl.minimum(high, second))
    top = (level + _REACH) * parts
    peak = _faded(s_peak, tl.minimum(exponent * parts, top), top, some, shows)
    steep = tl.minimum(level * parts, s_crest + parts)
    crest = _faded(s_crest, tl.where(fresh, level * parts, steep), top, some, shows)
    above = _up(peak, parts)
    ground = _up(crest, parts)

    spare = room - exponent - s_last
    explained = shows & hurt & some & (spare < -margin)
    spread = tl.where(incurable | explained, s_kept, s_spread)
    doubt = tl.minimum(tl.maximum(spare, 0) + 4, _WIDEST)
    spread = tl.where(shows & unseen, tl.where(hurt, doubt, 2), spread)
    needed = shows & (exponent > ground + spread)
    calm = tl.where(needed, 1, tl.minimum(s_calm, _LAST) + 1)
    spread = tl.minimum(spread, s_patience // calm)
    wanted = room - tl.maximum(ground + spread, above)
    rested = (s_rest >= pause) | hurt | unseen
    rises = (wanted >= log2_scale + 2) & rested
    rises = rises | ((wanted > log2_scale) & (s_rest >= _LONG * pause))
    falls = wanted < log2_scale
    vanished = finite & (amax <= 0)
    moves = ((rises | falls) & shows) | (vanished & hurt & some & (wanted > log2_scale))
    blind = vanished & unseen
    wanted = tl.where(blind, log2_scale + _BLIND, wanted)
    good = tl.where(moves | blind, wanted, log2_scale)

    gap = room - ground - log2_scale
    more = s_spread * tl.where(s_patience < forget, 4, 2)
    wider = tl.minimum(tl.maximum(tl.maximum(gap, 0), more) + 2, _WIDEST)
    drop = tl.where(hurt, tl.where(s_bad > 1, 16, 8), 2)
    known = tl.minimum(room - tl.maximum(ground + wider, above), log2_scale - drop)
    unknown = tl.minimum(log2_scale - 16, 0)
    unknown = tl.where(log2_scale > 0, unknown, log2_scale - 14)
    bad = tl.where(some, known, unknown)
    wider = tl.where(some, wider, 0)
    longer = tl.maximum(tl.minimum(s_patience, 1048576) * 2, forget)
    longer = tl.where(some & (s_bad <= 0), longer, s_patience)
    lone = some & (s_bad == 0) & (s_credit >= _LONE) & (skips > 0) & (finite == 0) & counts

    after = tl.minimum(tl.maximum(tl.where(finite, good, bad), -126), 127)
    moved = ((after + 127) << 23).to(tl.float32, bitcast=True)
    moved = tl.where(after == log2_scale, scale, moved)
    moved = tl.minimum(tl.maximum(moved, min_scale), max_scale)
    rose = moved > scale
    takes = counts & (fits | (finite == 0)) & (lone == 0)
    after_scale = tl.where(takes, moved, scale)
    store_float(state_at + STATE.scale, after_scale)
    lasts = tl.where(shows, exponent, tl.where(finite, s_last, log2_scale))
    tl.store(state_at + HEADROOM_STATE.last, tl.where(takes, lasts, s_last))
    tl.store(state_at + HEADROOM_STATE.before, tl.where(takes & shows, first, s_before))
    tl.store(state_at + HEADROOM_STATE.peak, tl.where(takes, peak, s_peak))
    tl.store(state_at + HEADROOM_STATE.crest, tl.where(takes, crest, s_crest))
    tl.store(
        state_at + HEADROOM_STATE.spread, tl.where(takes, tl.where(finite, spread, wider), s_spread)
    )
    kept = tl.where(finite, spread, tl.where(hurt, s_kept, s_spread))
    tl.store(state_at + HEADROOM_STATE.kept, tl.where(takes, kept, s_kept))
    tl.store(state_at + HEADROOM_STATE.seen, tl.where(takes & shows, 1, s_seen))
    worse = tl.minimum(tl.maximum(s_bad, 0), _LAST) + 1
    bads = tl.where(finite, tl.where(shows, 0, s_bad), worse)
    bads = tl.where(takes, bads, tl.where(lone, -1, s_bad))
    tl.store(state_at + HEADROOM_STATE.bad_steps, bads)
    calm = tl.where(finite, calm, 0)
    tl.store(state_at + HEADROOM_STATE.calm, tl.where(takes, calm, s_calm))
    credit = tl.where(finite, tl.minimum(s_credit + 1, 4 * _LONE), s_credit)
    credit = tl.where(takes, credit, tl.where(lone, s_credit - _LONE, s_credit))
    tl.store(state_at + HEADROOM_STATE.credit, credit)
    longer = tl.where(finite, s_patience, longer)
    tl.store(state_at + HEADROOM_STATE.patience, tl.where(takes, longer, s_patience))
    resting = tl.where(rose, 0, tl.minimum(s_rest, _LAST) + 1)
    tl.store(state_at + HEADROOM_STATE.rest, tl.where(takes, resting, s_rest))
    return after_scale
