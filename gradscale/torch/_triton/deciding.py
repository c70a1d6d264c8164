"""From what gradients are like to what becomes of the step.

Everything that `step()` and `update()` decide with a dozen small operations each: whether to skip,
by what to divide, where the scale goes, what is counted, and what the host is told. The rules are
those of policy.py and keeper.py; tests walk both.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gradscale.policy import Dynamic, DynamicState, Policy, State, room_below

_LAST = tl.constexpr(2**31 - 2)


VALUES = 11
"""Numbers of a decision, float32: norm, amax, underflow, what to divide by, whether to skip, the
largest finite magnitude; and, as the bits of int32: how many skipped in a row, and whether it was
applied, finite, fits, and the loss finite. `outcome.PLACES` says the same."""


class Question(NamedTuple):
    """What the scale is moved by, besides the gradients."""

    loss_finite: Tensor | None
    """bool: whether the losses were finite; None where that rule is off."""
    bad_losses: Tensor
    """int32: bad losses in a row; counted on in place."""
    steps: Tensor
    """int32: `update()`s; counted on in place."""
    policy: Policy
    """The rule that moves the scale."""
    state: State
    """Its state, moved in place."""
    patience: int
    """How many bad losses in a row are forgiven."""
    period: int
    """One in how many counts after those."""

    def arguments(self) -> tuple[Any, ...]:
        """For `advance`, but for what it is told of the gradients and where it writes."""
        given, state = self.policy, self.state
        dynamic = given if isinstance(given, Dynamic) else _STILL
        return (
            self.steps if self.loss_finite is None else self.loss_finite,
            self.bad_losses,
            self.steps,
            *(state if isinstance(state, DynamicState) else (state.scale, self.steps, self.steps)),
            *settings_of(dynamic),
            self.patience,
            self.period,
        )

    def constants(self) -> tuple[bool, bool]:
        """For `advance`: whether losses tell, and whether the scale moves."""
        return self.loss_finite is not None, type(self.policy) is Dynamic


_STILL = Dynamic()
"""Stands for the settings of a policy that does not move."""


@functools.lru_cache(maxsize=64)
def settings_of(policy: Dynamic) -> tuple[Any, ...]:
    """For `moved_dynamic`."""
    return (
        float(policy.growth_factor),
        float(policy.backoff_factor),
        min(policy.growth_interval, _LAST.value + 1),  # no counter goes further
        min(policy.hysteresis, _LAST.value + 1),
        float(policy.min_scale),
        float(policy.max_scale),
        room_below(policy.growth_factor),
    )


@triton.jit
def moved_dynamic(
    scale,
    good,
    bad,
    finite,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    min_scale,
    max_scale,
    room,
):
    """`Dynamic.update` for a finite loss, written a second time; a test walks both."""
    new_good = tl.where(finite, tl.minimum(good, _LAST) + 1, 0)
    new_bad = tl.where(finite, 0, tl.minimum(bad, _LAST) + 1)
    grow = new_good >= growth_interval
    lower = new_bad >= hysteresis
    raised = tl.minimum(tl.minimum(scale, room) * growth_factor, max_scale)
    raised = tl.where(scale > room, max_scale, raised)
    lowered = tl.maximum(scale * backoff_factor, min_scale)
    moved = tl.where(grow, raised, tl.where(lower, lowered, scale))
    return moved, tl.where(grow, 0, new_good), new_bad


@triton.jit
def advance(
    finite,
    applied,
    row,
    loss_finite_at,
    bad_losses_at,
    steps_at,
    scale_at,
    good_at,
    bad_at,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    min_scale,
    max_scale,
    room,
    patience,
    period,
    told,
    LOSSES: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Moves the scale, counts, and writes what the host is told; whether the loss was finite."""
    loss_finite = finite == finite
    counts = loss_finite
    if LOSSES:
        # A non-finite loss spares the scale, but not for ever: see keeper.py.
        loss_finite = tl.load(loss_finite_at) != 0
        bad_losses = tl.where(loss_finite, 0, tl.load(bad_losses_at) + 1)
        tl.store(bad_losses_at, bad_losses)
        over = bad_losses - patience
        counts = loss_finite | ((over > 0) & (over % period == 0))
    scale = tl.load(scale_at)
    after = scale
    if MOVES:
        good = tl.load(good_at)
        bad = tl.load(bad_at)
        moved, new_good, new_bad = moved_dynamic(
            scale,
            good,
            bad,
            finite,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            max_scale,
            room,
        )
        after = tl.where(counts, moved, scale)
        tl.store(scale_at, after)
        tl.store(good_at, tl.where(counts, new_good, good))
        tl.store(bad_at, tl.where(counts, new_bad, bad))
    steps = tl.load(steps_at) + 1
    tl.store(steps_at, steps)
    tl.store(told, steps)
    tl.store(told + 1, after.to(tl.int32, bitcast=True))
    tl.store(told + 2, scale.to(tl.int32, bitcast=True))
    tl.store(told + 3, after.to(tl.int32, bitcast=True))
    tl.store(told + 4, applied.to(tl.int32))
    tl.store(told + 5, loss_finite.to(tl.int32))
    tl.store(told + 6, row)
    return loss_finite


@triton.jit
def decide(
    found,
    fits,
    amax,
    norm,
    clip,
    share,
    peak,
    spoilt,
    window_scale_at,
    row_at,
    loss_finite_at,
    bad_losses_at,
    steps_at,
    scale_at,
    good_at,
    bad_at,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
    min_scale,
    max_scale,
    room,
    patience,
    period,
    values,
    told,
    LOSSES: tl.constexpr,
    MOVES: tl.constexpr,
):
    """Writes what becomes of a step whose gradients `summarize` found to be like this.

    The scale also falls if it has `spoilt` anything else.
    """
    finite = found == 0
    skipped = found | (fits == 0)
    row = tl.where(skipped, tl.load(row_at) + 1, 0)
    tl.store(row_at, row)
    loss_finite = advance(
        finite & (spoilt == 0),
        skipped == 0,
        row,
        loss_finite_at,
        bad_losses_at,
        steps_at,
        scale_at,
        good_at,
        bad_at,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        room,
        patience,
        period,
        told,
        LOSSES,
        MOVES,
    )
    used = tl.load(window_scale_at)
    # Without clipping the quotient by the scale is exact; with it, rounded like any other.
    divisor = tl.where(clip < 1.0, tl.div_rn(1.0, tl.div_rn(1.0, used) * clip), used)
    tl.store(values, tl.where(skipped, float("nan"), norm))
    tl.store(values + 1, amax)
    tl.store(values + 2, share)
    tl.store(values + 3, tl.where(skipped, used, divisor))
    tl.store(values + 4, skipped.to(tl.float32))
    tl.store(values + 5, peak)
    tl.store(values + 6, row.to(tl.float32, bitcast=True))
    tl.store(values + 7, (skipped == 0).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(values + 8, finite.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(values + 9, fits.to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(values + 10, loss_finite.to(tl.int32).to(tl.float32, bitcast=True))
