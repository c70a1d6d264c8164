"""From what the tensors are like to what becomes of the step, in one launch.

Everything that `step()` and `update()` decide with a dozen small operations each: whether to skip,
by what to divide, where the scale goes, what is counted, and what the host is told. The rules are
those of policy.py and keeper.py; tests walk both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.policy import Dynamic, DynamicState, Policy, State, room_below
from gradscale.torch._triton.reading import Gathered, summarize

_LAST = tl.constexpr(2**31 - 2)


class Slots(NamedTuple):
    """Where a decision goes: places of its own, which nobody writes to again."""

    flags: Tensor
    """bool: applied, finite, fits, loss_finite, skipped."""
    floats: Tensor
    """float32: norm, amax, underflow, what to divide by, the largest finite magnitude."""
    told: Tensor
    """int32: what travels to the host, see `events.Record`; then skipped_in_a_row again."""

    @classmethod
    def on(cls, device: torch.device) -> Slots:
        """Empty slots."""
        return cls(
            torch.empty(5, dtype=torch.bool, device=device),
            torch.empty(5, dtype=torch.float32, device=device),
            torch.empty(8, dtype=torch.int32, device=device),
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
def _decide(
    reports,
    numbers,
    tensors,
    max_norm,
    window_scale_at,
    loss_finite_at,
    bad_losses_at,
    steps_at,
    row_at,
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
    flags,
    floats,
    told,
    LOSSES: tl.constexpr,
    MOVES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    found, fits, amax, norm, clip, share, peak = summarize(
        reports, numbers, tensors, max_norm, WIDTH
    )
    finite = found == 0
    skipped = found | (fits == 0)
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
    row = tl.where(skipped, tl.load(row_at) + 1, 0)
    tl.store(row_at, row)
    used = tl.load(window_scale_at)
    # Without clipping the quotient by the scale is exact; with it, rounded like any other.
    divisor = tl.where(clip < 1.0, tl.div_rn(1.0, tl.div_rn(1.0, used) * clip), used)
    tl.store(flags, skipped == 0)
    tl.store(flags + 1, finite)
    tl.store(flags + 2, fits)
    tl.store(flags + 3, loss_finite)
    tl.store(flags + 4, skipped)
    tl.store(floats, tl.where(skipped, float("nan"), norm))
    tl.store(floats + 1, amax)
    tl.store(floats + 2, share)
    tl.store(floats + 3, tl.where(skipped, used, divisor))
    tl.store(floats + 4, peak)
    tl.store(told, steps)
    tl.store(told + 1, after.to(tl.int32, bitcast=True))
    tl.store(told + 2, scale.to(tl.int32, bitcast=True))
    tl.store(told + 3, after.to(tl.int32, bitcast=True))
    tl.store(told + 4, (skipped == 0).to(tl.int32))
    tl.store(told + 5, loss_finite.to(tl.int32))
    tl.store(told + 6, row)
    tl.store(told + 7, row)


def decide(
    gathered: Gathered,
    max_norm: float,
    window_scale: Tensor,
    loss_finite: Tensor | None,
    counters: tuple[Tensor, Tensor, Tensor],
    policy: Policy,
    state: State,
    losses: tuple[int, int],
) -> Slots:
    """What becomes of a step with these gradients; moves `state` and `counters` in place.

    Args:
        gathered: What the gradients are like.
        max_norm: What to clip to; infinite does not clip.
        window_scale: float32: the scale that is in them.
        loss_finite: bool: whether the losses were finite; None where that rule is off.
        counters: int32: bad losses in a row, steps, skipped steps in a row.
        policy: The rule that moves the scale.
        state: Its state.
        losses: How many bad losses in a row are forgiven, and then one in how many counts.
    """
    slots = Slots.on(window_scale.device)
    dynamic = policy if isinstance(policy, Dynamic) else Dynamic()
    moves = isinstance(policy, Dynamic)
    _decide[(1,)](
        *gathered,
        max_norm,
        window_scale,
        window_scale if loss_finite is None else loss_finite,
        *counters,
        *(state if isinstance(state, DynamicState) else [state.scale] * 3),
        dynamic.growth_factor,
        dynamic.backoff_factor,
        dynamic.growth_interval,
        dynamic.hysteresis,
        dynamic.min_scale,
        dynamic.max_scale,
        room_below(dynamic.growth_factor),
        *losses,
        *slots,
        LOSSES=loss_finite is not None,
        MOVES=moves,
        WIDTH=512,
    )
    return slots
