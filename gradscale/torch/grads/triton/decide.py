"""From what was measured to a decision: skip or not, the divisor, the scale, counters, the record.

`step()` and `update()` would decide all this with a dozen small operations each; here it is the end
of the kernel that reads the gradients, or one program of its own. The rules are those of the
policies and of the reference path; tests compare them.

What the functions have in common:

    row: int32: how many steps in a row were skipped, counted on in place.
    loss: The loss, as `loss_kind` (`packed.LOSS_*`) says; None if that is `LOSS_OFF`.
    state: The packed state (`packed.pack`), moved and counted on in place.
    settings: The packed settings (`packed.pack_settings`) of its policy.
    rule: Which rule moves the state (`packed.rule_of`).
    record: int32, in memory of the device or in pinned memory: where `RECORD` is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.grads.triton.launch import Kernel, formats_of
from gradscale.torch.grads.triton.offsets import (
    DECISION,
    DYNAMIC,
    HEADROOM,
    LOSS_OFF,
    LOSS_RAW,
    LOSSES,
    RECORD,
    REPORT,
    STATE,
    SUMMARY,
)
from gradscale.torch.grads.triton.policies import (
    load_float,
    moved_dynamic,
    moved_headroom,
    store_float,
)


@triton.jit
def loss_is_finite(loss_at, LOSS: tl.constexpr):
    """Whether the loss is finite; it is if nobody asks."""
    if LOSS == LOSS_OFF:
        return tl.full((), True, tl.int1)
    loss = tl.load(loss_at)
    if LOSS == LOSS_RAW:
        # False for NaN, too.
        return tl.abs(loss) < float("inf")
    return loss != 0


@triton.jit
def moved(state_at, settings_at, finite, fits, amax, counts, RULE: tl.constexpr):
    """Moves the state by a step, if it `counts`; the scale after it. `amax` is at its scale."""
    scale = load_float(state_at + STATE.scale)
    if RULE == DYNAMIC:
        scale = moved_dynamic(state_at, settings_at, scale, finite, counts)
    if RULE == HEADROOM:
        scale = moved_headroom(state_at, settings_at, scale, finite, fits, amax, counts)
    return scale


@triton.jit
def _advance_state(
    finite,
    fits,
    amax,
    used,
    applied,
    row,
    loss_finite,
    places,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Counts, moves the state, and writes the record; `amax` is at the scale that was `used`.

    `places` are pointers: row, state, settings, record, and the scale that the next iteration uses,
    which does not change any more.
    """
    row_at, state_at, settings_at, record_at, copy_at = places
    tl.store(row_at, row)
    counts = loss_finite
    if LOSS:
        # A non-finite loss leaves the scale alone, but not for ever: see `packed.PATIENT_LOSSES`.
        bad_losses = tl.where(loss_finite, 0, tl.load(state_at + STATE.bad_losses) + 1)
        tl.store(state_at + STATE.bad_losses, bad_losses)
        over = bad_losses - tl.load(settings_at + LOSSES.patience)
        counts = loss_finite | ((over > 0) & (over % tl.load(settings_at + LOSSES.period) == 0))
    before = load_float(state_at + STATE.scale)
    if RULE == HEADROOM:
        amax = amax * tl.div_rn(before, used)
    after = moved(state_at, settings_at, finite, fits, amax, counts, RULE)
    tl.store(copy_at, after)
    steps = tl.load(state_at + STATE.steps) + 1
    tl.store(state_at + STATE.steps, steps)
    tl.store(record_at + RECORD.step, steps)
    store_float(record_at + RECORD.scale, after)
    store_float(record_at + RECORD.before, before)
    store_float(record_at + RECORD.after, after)
    tl.store(record_at + RECORD.applied, applied.to(tl.int32))
    tl.store(record_at + RECORD.loss_finite, loss_finite.to(tl.int32))
    tl.store(record_at + RECORD.skipped_in_a_row, row)


@triton.jit
def _store_flag(pointer, flag):
    """Writes a bool as the bits of an int32 to the float32 `pointer`."""
    tl.store(pointer, flag.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def write_decision(
    found,
    penalty_finite,
    loss_finite,
    used,
    places,
    decision_at,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """Writes what becomes of a step whose gradients, at the scale `used`, are as in `SUMMARY`.

    With `ADVANCE` it is counted and the state is moved; else `advance` does that, in `update()`.
    """
    non_finite, fits, amax, norm, clip, underflow, finite_amax = found
    finite = non_finite == 0
    skipped = non_finite | (fits == 0)
    row = tl.where(skipped, tl.load(places[0]) + 1, 0)
    if ADVANCE:
        good = finite & penalty_finite
        _advance_state(good, fits, amax, used, skipped == 0, row, loss_finite, places, LOSS, RULE)
    # Without clipping the quotient by the scale is exact; with it, rounded like any other.
    divisor = tl.where(clip < 1.0, tl.div_rn(1.0, tl.div_rn(1.0, used) * clip), used)
    tl.store(decision_at + DECISION.grad_norm, tl.where(skipped, float("nan"), norm))
    tl.store(decision_at + DECISION.amax, amax)
    tl.store(decision_at + DECISION.underflow, underflow)
    tl.store(decision_at + DECISION.divisor, tl.where(skipped, used, divisor))
    tl.store(decision_at + DECISION.skip, skipped.to(tl.float32))
    tl.store(decision_at + DECISION.finite_amax, finite_amax)
    tl.store(decision_at + DECISION.skipped_in_a_row, row.to(tl.float32, bitcast=True))
    _store_flag(decision_at + DECISION.applied, skipped == 0)
    _store_flag(decision_at + DECISION.finite, finite)
    _store_flag(decision_at + DECISION.fits, fits)
    _store_flag(decision_at + DECISION.loss_finite, loss_finite)


@Kernel
def _decide(
    words,
    summary,
    scale_at,
    row_at,
    state_at,
    settings_at,
    record_at,
    copy_at,
    decision_at,
    max_norm,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Decides about a step whose gradients are, on all ranks together, like `words`."""
    non_finite = tl.load(words + REPORT.non_finite) != 0
    # Where no rank has a gradient there is nothing to step, and the scale is not to blame.
    fits = (tl.load(words + REPORT.unfit) == 0) & (tl.load(words + REPORT.has_gradients) != 0)
    norm = tl.load(words + REPORT.norm)
    clip = 1.0
    if max_norm < float("inf"):
        clip = tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0)
    bad_penalty = tl.load(words + REPORT.penalty_non_finite)
    loss_finite = non_finite == non_finite
    if LOSS:
        # A loss that is not finite because of a penalty is: the scale has spoilt that.
        loss_finite = tl.load(words + REPORT.loss_non_finite) <= bad_penalty
    underflow = tl.load(summary + SUMMARY.underflow)
    finite_amax = tl.load(summary + SUMMARY.finite_amax)
    amax = tl.load(words + REPORT.amax)
    found = (non_finite, fits, amax, norm, clip, underflow, finite_amax)
    places = (row_at, state_at, settings_at, record_at, copy_at)
    good, used = bad_penalty == 0, tl.load(scale_at)
    write_decision(found, good, loss_finite, used, places, decision_at, LOSS, RULE, True)


def decide(
    words: Tensor,
    summary: Tensor,
    scale: Tensor,
    *,
    row: Tensor,
    loss_kind: int,
    state: Tensor,
    settings: Tensor,
    rule: int,
    record: Tensor,
    copy: Tensor,
    max_norm: float = float("inf"),
) -> Tensor:
    """The `DECISION` about a step after ranks have agreed; moves the state as the module says.

    Args:
        words: float32: the folded `REPORT` of all ranks. The loss is the one in here, unless
            `loss_kind` is `LOSS_OFF`.
        summary: This rank's `SUMMARY`, for the underflow and the largest finite magnitude.
        scale: float32: the scale of the gradients.
        max_norm: What the norm is clipped to.
    """
    decision = torch.empty(len(DECISION.value), dtype=torch.float32, device=scale.device)
    tensors = (words, summary, scale, row, state, settings, record, copy, decision)
    _decide(1, tensors, (float(max_norm),), (loss_kind != 0, rule))
    return decision


@Kernel
def _advance(
    decision_at,
    row_at,
    scale_at,
    loss_at,
    state_at,
    settings_at,
    record_at,
    copy_at,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Counts a step that is over, and moves the state."""
    finite = _load_flag(decision_at + DECISION.finite)
    applied = _load_flag(decision_at + DECISION.applied)
    row = tl.load(decision_at + DECISION.skipped_in_a_row).to(tl.int32, bitcast=True)
    fits, amax = _load_flag(decision_at + DECISION.fits), tl.load(decision_at + DECISION.amax)
    used, loss_finite = tl.load(scale_at), loss_is_finite(loss_at, LOSS)
    places = (row_at, state_at, settings_at, record_at, copy_at)
    _advance_state(finite, fits, amax, used, applied, row, loss_finite, places, LOSS, RULE)


@triton.jit
def _load_flag(pointer):
    """A bool that `_store_flag` wrote."""
    return tl.load(pointer).to(tl.int32, bitcast=True) != 0


def advance(
    decision: Tensor,
    scale: Tensor,
    *,
    row: Tensor,
    loss: Tensor | None,
    loss_kind: int,
    state: Tensor,
    settings: Tensor,
    rule: int,
    record: Tensor,
    copy: Tensor,
) -> None:
    """Counts a step that `measure_and_decide` has decided about without `advance`.

    Moves the state and writes the record, as the module says.

    Args:
        decision: The `DECISION` about the step.
        scale: float32: the scale of its gradients.
        row: int32: how many steps in a row were skipped; counted on.
    """
    tested = state if loss is None else loss
    tensors = (decision, row, scale, tested, state, settings, record, copy)
    _advance(1, tensors, (), (loss_kind, rule), formats_of(loss), num_warps=1)
