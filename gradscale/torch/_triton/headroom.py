"""`Headroom.update` in one launch, written a second time; a test walks both."""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gradscale.formats import format_named
from gradscale.policy import Headroom, HeadroomState
from gradscale.policy.headroom import BLIND, CURABLE, LONG, REACH, RECENT, WIDEST
from gradscale.torch._triton.launching import Kernel

_LAST = tl.constexpr(2**31 - 2)
_REACH, _WIDEST, _RECENT = tl.constexpr(REACH), tl.constexpr(WIDEST), tl.constexpr(RECENT)
_LONG, _CURABLE, _BLIND = tl.constexpr(LONG), tl.constexpr(CURABLE), tl.constexpr(BLIND)


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


@Kernel
def _update_headroom(
    scale_at,
    last_at,
    before_at,
    peak_at,
    crest_at,
    spread_at,
    kept_at,
    seen_at,
    bad_at,
    calm_at,
    patience_at,
    rest_at,
    finite_at,
    fits_at,
    amax_at,
    loss_finite_at,
    bad_losses_at,
    window_scale_at,
    told,
    room,
    margin,
    parts,
    forget,
    pause,
    min_scale,
    max_scale,
    patient_losses,
    loss_period,
    LOSSES: tl.constexpr,
    GUARD: tl.constexpr,
    TELL: tl.constexpr,
):
    """One program for each state.

    With `TELL` the gradients have the scale of a window, and the record is told of the move.
    """
    which = tl.program_id(0)
    scale = tl.load(scale_at + which)
    s_last = tl.load(last_at + which)
    s_before = tl.load(before_at + which)
    s_peak = tl.load(peak_at + which)
    s_crest = tl.load(crest_at + which)
    s_spread = tl.load(spread_at + which)
    s_kept = tl.load(kept_at + which)
    s_seen = tl.load(seen_at + which)
    s_bad = tl.load(bad_at + which)
    s_calm = tl.load(calm_at + which)
    s_patience = tl.load(patience_at + which)
    s_rest = tl.load(rest_at + which)
    finite = tl.load(finite_at + which) != 0
    fits = tl.load(fits_at + which) != 0
    amax = tl.load(amax_at + which)
    if TELL:
        amax = amax * tl.div_rn(scale, tl.load(window_scale_at))
    counts = finite == finite
    if LOSSES:
        counts = tl.load(loss_finite_at + which) != 0
        if GUARD:
            over = tl.load(bad_losses_at) - patient_losses
            counts = counts | ((over > 0) & (over % loss_period == 0))

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
    crest = _faded(s_crest, level * parts, top, some, shows)
    above = _up(peak, parts)
    ground = _up(crest, parts)

    spare = room - exponent - s_last
    explained = shows & hurt & some & (spare < -margin)
    spread = tl.where(incurable | explained, s_kept, s_spread)
    doubt = tl.minimum(tl.maximum(spare, 0) + 4, _WIDEST)
    spread = tl.where(shows & unseen, tl.where(hurt, doubt, 2), spread)
    calm = tl.minimum(s_calm, _LAST) + 1
    spread = tl.where(tl.minimum(calm, 16777216) * spread >= s_patience, spread - 1, spread)
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
    recent = s_calm < _RECENT
    again = tl.where(recent, s_spread + s_spread, 0)
    wider = tl.maximum(tl.maximum(gap, 0) + tl.where(recent, 6, 2), again)
    wider = tl.minimum(tl.maximum(wider, s_spread), _WIDEST)
    drop = tl.where(hurt, tl.where(s_bad > 1, 16, 8), 2)
    known = tl.minimum(room - tl.maximum(ground + wider, above), log2_scale - drop)
    unknown = tl.minimum(log2_scale - 16, 0)
    unknown = tl.where(log2_scale > 0, unknown, log2_scale - 14)
    bad = tl.where(some, known, unknown)
    wider = tl.where(some, wider, 0)
    longer = tl.maximum(tl.minimum(s_patience, 1048576) * 2, forget)
    longer = tl.where(some & (s_bad <= 0), longer, s_patience)

    after = tl.minimum(tl.maximum(tl.where(finite, good, bad), -126), 127)
    moved = ((after + 127) << 23).to(tl.float32, bitcast=True)
    moved = tl.where(after == log2_scale, scale, moved)
    moved = tl.minimum(tl.maximum(moved, min_scale), max_scale)
    rose = moved > scale
    takes = counts & (fits | (finite == 0))
    tl.store(scale_at + which, tl.where(takes, moved, scale))
    lasts = tl.where(shows, exponent, tl.where(finite, s_last, log2_scale))
    tl.store(last_at + which, tl.where(takes, lasts, s_last))
    tl.store(before_at + which, tl.where(takes & shows, first, s_before))
    tl.store(peak_at + which, tl.where(takes, peak, s_peak))
    tl.store(crest_at + which, tl.where(takes, crest, s_crest))
    tl.store(spread_at + which, tl.where(takes, tl.where(finite, spread, wider), s_spread))
    kept = tl.where(finite, spread, tl.where(hurt, s_kept, s_spread))
    tl.store(kept_at + which, tl.where(takes, kept, s_kept))
    tl.store(seen_at + which, tl.where(takes & shows, 1, s_seen))
    worse = tl.minimum(s_bad, _LAST) + 1
    bads = tl.where(finite, tl.where(shows, 0, s_bad), worse)
    tl.store(bad_at + which, tl.where(takes, bads, s_bad))
    calmed = tl.where(finite & (spread == s_spread), calm, 0)
    tl.store(calm_at + which, tl.where(takes, calmed, s_calm))
    tl.store(patience_at + which, tl.where(takes, tl.where(finite, s_patience, longer), s_patience))
    resting = tl.where(rose, 0, tl.minimum(s_rest, _LAST) + 1)
    tl.store(rest_at + which, tl.where(takes, resting, s_rest))
    if TELL:
        now = tl.where(takes, moved, scale).to(tl.int32, bitcast=True)
        tl.store(told + 1, now)
        tl.store(told + 3, now)


@functools.lru_cache(maxsize=64)
def _settings(policy: Headroom) -> tuple[Any, ...]:
    """What the kernel takes of `policy`."""
    return (
        format_named(policy.format).ceiling - policy.margin,
        policy.margin,
        policy.memory,
        policy.forget,
        policy.pause,
        float(policy.min_scale),
        float(policy.max_scale),
    )


def update(
    policy: Headroom,
    state: HeadroomState,
    finite: Tensor,
    fits: Tensor,
    amax: Tensor,
    loss_finite: Tensor | None,
) -> None:
    """Moves `state`, one or a vector of them, in place, as `policy.update` would.

    The flags are bool, `amax` float32, on its device; None stands for a loss that was finite.
    """
    nothing = state.scale
    losses = finite if loss_finite is None else loss_finite
    arguments = (*state, finite, fits, amax, losses, *[nothing] * 3, *_settings(policy), 0, 1)
    constants = (loss_finite is not None, False, False)
    _update_headroom(state.scale.numel(), arguments, constants, num_warps=1)


def advance(
    policy: Headroom,
    state: HeadroomState,
    flags: tuple[Tensor, Tensor, Tensor],
    loss_finite: Tensor | None,
    bad_losses: Tensor,
    guard: tuple[int, int],
    window_scale: Tensor,
    told: Tensor,
) -> None:
    """Moves `state` after a kernel has decided about a step, and tells its record `told` of it.

    `flags` are finite, fits and the largest magnitude, at the scale of the window; `bad_losses`
    were counted on already, and `guard` says how many in a row are forgiven, and one in how many
    counts after those.
    """
    losses = bad_losses if loss_finite is None else loss_finite
    arguments = (
        *state, *flags, losses, bad_losses, window_scale, told, *_settings(policy), *guard
    )  # fmt: skip
    constants = (loss_finite is not None, True, True)
    _update_headroom(1, arguments, constants, (losses.dtype,), num_warps=1)
