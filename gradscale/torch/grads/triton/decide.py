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

from gradscale.torch.grads.fields import DECISION
from gradscale.torch.grads.triton.launch import Kernel, formats_of
from gradscale.torch.grads.triton.offsets import (
    DECISION_AMAX,
    DECISION_APPLIED,
    DECISION_DIVISOR,
    DECISION_FINITE,
    DECISION_FINITE_AMAX,
    DECISION_FITS,
    DECISION_GRAD_NORM,
    DECISION_LOSS_FINITE,
    DECISION_SKIP,
    DECISION_SKIPPED_IN_A_ROW,
    DECISION_UNDERFLOW,
    DYNAMIC,
    HEADROOM,
    LOSS_FLAG,
    LOSS_RAW,
    RECORD_AFTER,
    RECORD_APPLIED,
    RECORD_BEFORE,
    RECORD_LOSS_FINITE,
    RECORD_SCALE,
    RECORD_SKIPPED_IN_A_ROW,
    RECORD_STEP,
    REPORT_AMAX,
    REPORT_HAS_GRADIENTS,
    REPORT_LOSS_NON_FINITE,
    REPORT_NON_FINITE,
    REPORT_NORM,
    REPORT_PENALTY_NON_FINITE,
    REPORT_UNFIT,
    SET_PATIENCE,
    SET_PERIOD,
    STATE_BAD_LOSSES,
    STATE_SCALE,
    STATE_STEPS,
    SUMMARY_FINITE_AMAX,
    SUMMARY_UNDERFLOW,
)
from gradscale.torch.grads.triton.policies import (
    load_float,
    moved_dynamic,
    moved_headroom,
    store_float,
)


@triton.jit
def loss_is_finite(loss_at, LOSS: tl.constexpr):
    """Whether the loss is finite; LOSS is a kind other than `LOSS_OFF`."""
    tl.static_assert((LOSS == LOSS_FLAG) | (LOSS == LOSS_RAW))
    loss = tl.load(loss_at)
    if LOSS == LOSS_RAW:
        # False for NaN, too.
        return tl.abs(loss) < float("inf")
    return loss != 0


@triton.jit
def _moved(state_at, settings_at, finite, fits, amax, counts, RULE: tl.constexpr):
    """Moves the state by a step, if it `counts`; the scale after it. `amax` is at its scale."""
    scale = load_float(state_at + STATE_SCALE)
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
    state_at,
    settings_at,
    record_at,
    copy_at,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Moves the state, counts, and writes the record; `amax` is at the scale that was `used`.

    The next iteration uses the scale at `copy_at`, which does not change any more.
    """
    counts = loss_finite
    if LOSS:
        # A non-finite loss leaves the scale alone, but not for ever: see `packed.PATIENT_LOSSES`.
        bad_losses = tl.where(loss_finite, 0, tl.load(state_at + STATE_BAD_LOSSES) + 1)
        tl.store(state_at + STATE_BAD_LOSSES, bad_losses)
        over = bad_losses - tl.load(settings_at + SET_PATIENCE)
        counts = loss_finite | ((over > 0) & (over % tl.load(settings_at + SET_PERIOD) == 0))
    before = load_float(state_at + STATE_SCALE)
    if RULE == HEADROOM:
        amax = amax * tl.div_rn(before, used)
    after = _moved(state_at, settings_at, finite, fits, amax, counts, RULE)
    tl.store(copy_at, after)
    steps = tl.load(state_at + STATE_STEPS) + 1
    tl.store(state_at + STATE_STEPS, steps)
    tl.store(record_at + RECORD_STEP, steps)
    store_float(record_at + RECORD_SCALE, after)
    store_float(record_at + RECORD_BEFORE, before)
    store_float(record_at + RECORD_AFTER, after)
    tl.store(record_at + RECORD_APPLIED, applied.to(tl.int32))
    tl.store(record_at + RECORD_LOSS_FINITE, loss_finite.to(tl.int32))
    tl.store(record_at + RECORD_SKIPPED_IN_A_ROW, row)


@triton.jit
def _store_flag(pointer, flag):
    """Writes a bool as the bits of an int32 to the float32 `pointer`."""
    tl.store(pointer, flag.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def write_decision(
    non_finite,
    fits,
    amax,
    norm,
    clip,
    underflow,
    finite_amax,
    penalty_finite,
    loss_finite,
    used,
    row_at,
    state_at,
    settings_at,
    record_at,
    copy_at,
    decision_at,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """Writes what becomes of a step whose gradients, at the scale `used`, are like this.

    With `ADVANCE` it is counted and the state is moved; else `advance` does that, in `update()`.
    """
    finite = non_finite == 0
    skipped = non_finite | (fits == 0)
    row = tl.where(skipped, tl.load(row_at) + 1, 0)
    if ADVANCE:
        tl.store(row_at, row)
        _advance_state(
            finite & penalty_finite,
            fits,
            amax,
            used,
            skipped == 0,
            row,
            loss_finite,
            state_at,
            settings_at,
            record_at,
            copy_at,
            LOSS,
            RULE,
        )
    # Without clipping the quotient by the scale is exact; with it, rounded like any other.
    divisor = tl.where(clip < 1.0, tl.div_rn(1.0, tl.div_rn(1.0, used) * clip), used)
    tl.store(decision_at + DECISION_GRAD_NORM, tl.where(skipped, float("nan"), norm))
    tl.store(decision_at + DECISION_AMAX, amax)
    tl.store(decision_at + DECISION_UNDERFLOW, underflow)
    tl.store(decision_at + DECISION_DIVISOR, tl.where(skipped, used, divisor))
    tl.store(decision_at + DECISION_SKIP, skipped.to(tl.float32))
    tl.store(decision_at + DECISION_FINITE_AMAX, finite_amax)
    tl.store(decision_at + DECISION_SKIPPED_IN_A_ROW, row.to(tl.float32, bitcast=True))
    _store_flag(decision_at + DECISION_APPLIED, skipped == 0)
    _store_flag(decision_at + DECISION_FINITE, finite)
    _store_flag(decision_at + DECISION_FITS, fits)
    _store_flag(decision_at + DECISION_LOSS_FINITE, loss_finite)


@Kernel
def _decide(
    words,
    summary,
    max_norm,
    scale_at,
    row_at,
    state_at,
    settings_at,
    record_at,
    copy_at,
    decision_at,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Decides about a step whose gradients are, on all ranks together, like `words`."""
    non_finite = tl.load(words + REPORT_NON_FINITE) != 0
    # Where no rank has a gradient there is nothing to step, and the scale is not to blame.
    fits = (tl.load(words + REPORT_UNFIT) == 0) & (tl.load(words + REPORT_HAS_GRADIENTS) != 0)
    norm = tl.load(words + REPORT_NORM)
    clip = 1.0
    if max_norm < float("inf"):
        clip = tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0)
    bad_penalty = tl.load(words + REPORT_PENALTY_NON_FINITE)
    loss_finite = non_finite == non_finite
    if LOSS:
        # A loss that is not finite because of a penalty is: the scale has spoilt that.
        loss_finite = tl.load(words + REPORT_LOSS_NON_FINITE) <= bad_penalty
    write_decision(
        non_finite,
        fits,
        tl.load(words + REPORT_AMAX),
        norm,
        clip,
        tl.load(summary + SUMMARY_UNDERFLOW),
        tl.load(summary + SUMMARY_FINITE_AMAX),
        bad_penalty == 0,
        loss_finite,
        tl.load(scale_at),
        row_at,
        state_at,
        settings_at,
        record_at,
        copy_at,
        decision_at,
        LOSS,
        RULE,
        True,
    )


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
    decision = torch.empty(len(DECISION), dtype=torch.float32, device=scale.device)
    arguments = (
        words, summary, float(max_norm), scale, row, state, settings, record, copy, decision,
    )  # fmt: skip
    _decide(1, arguments, (loss_kind != 0, rule))
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
    finite = _load_flag(decision_at + DECISION_FINITE)
    applied = _load_flag(decision_at + DECISION_APPLIED)
    row = tl.load(decision_at + DECISION_SKIPPED_IN_A_ROW).to(tl.int32, bitcast=True)
    tl.store(row_at, row)
    loss_finite = finite == finite
    if LOSS:
        loss_finite = loss_is_finite(loss_at, LOSS)
    _advance_state(
        finite,
        _load_flag(decision_at + DECISION_FITS),
        tl.load(decision_at + DECISION_AMAX),
        tl.load(scale_at),
        applied,
        row,
        loss_finite,
        state_at,
        settings_at,
        record_at,
        copy_at,
        LOSS,
        RULE,
    )


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
    arguments = (
        decision, row, scale, state if loss is None else loss, state, settings, record, copy,
    )  # fmt: skip
    _advance(1, arguments, (loss_kind, rule), formats_of(loss), num_warps=1)


@Kernel
def _update(
    state_at,
    finite_at,
    fits_at,
    amax_at,
    loss_finite_at,
    settings_at,
    WORDS: tl.constexpr,
    LOSS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Moves one of several states."""
    which = tl.program_id(0)
    finite = tl.load(finite_at + which) != 0
    counts = finite == finite
    if LOSS:
        counts = tl.load(loss_finite_at + which) != 0
    amax = 0.0
    fits = counts
    if RULE == HEADROOM:
        amax = tl.load(amax_at + which)
        fits = tl.load(fits_at + which) != 0
    _moved(state_at + WORDS * which, settings_at, finite, fits, amax, counts, RULE)


def update(
    state: Tensor,
    finite: Tensor,
    fits: Tensor | None,
    amax: Tensor | None,
    loss_finite: Tensor | None,
    settings: Tensor,
    rule: int,
) -> None:
    """Moves a packed `state`, or each row of several, in place, as `policy.update` would.

    The flags are bool and `amax` float32, one for each state. `HEADROOM` alone needs `fits` and
    `amax`. `loss_finite` None means that the loss was finite. The counters do not change.
    """
    words = state.shape[-1]
    arguments = (
        state,
        finite,
        finite if fits is None else fits,
        finite if amax is None else amax,
        finite if loss_finite is None else loss_finite,
        settings,
    )
    constants = (words, loss_finite is not None, rule)
    _update(state.numel() // words, arguments, constants, num_warps=1)
