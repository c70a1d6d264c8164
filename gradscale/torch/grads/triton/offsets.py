"""Where kernels find the words of every vector: the offsets of `fields` and `packed`.

Each is a global constexpr of its own because Triton's cache of compiled kernels is keyed by the
values of those alone: after a field has moved, no kernel with its old offset is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl

from gradscale.policy import DynamicState, HeadroomState
from gradscale.torch.grads import fields, packed
from gradscale.torch.grads.fields import Field


def _at(some: Sequence[Field], name: str) -> tl.constexpr:
    """The offset of the word called `name`."""
    return tl.constexpr(fields.offset(some, name))


SUMMARY_NON_FINITE = _at(fields.SUMMARY, "non_finite")
SUMMARY_FITS = _at(fields.SUMMARY, "fits")
SUMMARY_AMAX = _at(fields.SUMMARY, "amax")
SUMMARY_NORM = _at(fields.SUMMARY, "norm")
SUMMARY_CLIP = _at(fields.SUMMARY, "clip")
SUMMARY_UNDERFLOW = _at(fields.SUMMARY, "underflow")
SUMMARY_FINITE_AMAX = _at(fields.SUMMARY, "finite_amax")

DECISION_GRAD_NORM = _at(fields.DECISION, "grad_norm")
DECISION_AMAX = _at(fields.DECISION, "amax")
DECISION_UNDERFLOW = _at(fields.DECISION, "underflow")
DECISION_DIVISOR = _at(fields.DECISION, "divisor")
DECISION_SKIP = _at(fields.DECISION, "skip")
DECISION_FINITE_AMAX = _at(fields.DECISION, "finite_amax")
DECISION_SKIPPED_IN_A_ROW = _at(fields.DECISION, "skipped_in_a_row")
DECISION_APPLIED = _at(fields.DECISION, "applied")
DECISION_FINITE = _at(fields.DECISION, "finite")
DECISION_FITS = _at(fields.DECISION, "fits")
DECISION_LOSS_FINITE = _at(fields.DECISION, "loss_finite")

REPORT_WORDS = tl.constexpr(len(fields.REPORT))
REPORT_NON_FINITE = _at(fields.REPORT, "non_finite")
REPORT_UNFIT = _at(fields.REPORT, "unfit")
REPORT_LOSS_NON_FINITE = _at(fields.REPORT, "loss_non_finite")
REPORT_PENALTY_NON_FINITE = _at(fields.REPORT, "penalty_non_finite")
REPORT_HAS_GRADIENTS = _at(fields.REPORT, "has_gradients")
REPORT_HAS_COMMON_LOSS = _at(fields.REPORT, "has_common_loss")
REPORT_AMAX = _at(fields.REPORT, "amax")
REPORT_NORM = _at(fields.REPORT, "norm")
REPORT_CHECKSUM = _at(fields.REPORT, "checksum")
REPORT_BAD_RANK = _at(fields.REPORT, "bad_rank")

RECORD_STEP = _at(fields.RECORD, "step")
RECORD_SCALE = _at(fields.RECORD, "scale")
RECORD_BEFORE = _at(fields.RECORD, "before")
RECORD_AFTER = _at(fields.RECORD, "after")
RECORD_APPLIED = _at(fields.RECORD, "applied")
RECORD_LOSS_FINITE = _at(fields.RECORD, "loss_finite")
RECORD_SKIPPED_IN_A_ROW = _at(fields.RECORD, "skipped_in_a_row")

STATE_BAD_LOSSES = _at(packed.COUNTERS, "bad_losses")
STATE_STEPS = _at(packed.COUNTERS, "steps")
STATE_SCALE = tl.constexpr(len(packed.COUNTERS))
"""The same in every state, because `scale` is the first field of each."""

_DYNAMIC_STATE = packed.state_fields(DynamicState)
DYNAMIC_GOOD_STEPS = _at(_DYNAMIC_STATE, "good_steps")
DYNAMIC_BAD_STEPS = _at(_DYNAMIC_STATE, "bad_steps")

_HEADROOM_STATE = packed.state_fields(HeadroomState)
HEADROOM_LAST = _at(_HEADROOM_STATE, "last")
HEADROOM_BEFORE = _at(_HEADROOM_STATE, "before")
HEADROOM_PEAK = _at(_HEADROOM_STATE, "peak")
HEADROOM_CREST = _at(_HEADROOM_STATE, "crest")
HEADROOM_SPREAD = _at(_HEADROOM_STATE, "spread")
HEADROOM_KEPT = _at(_HEADROOM_STATE, "kept")
HEADROOM_SEEN = _at(_HEADROOM_STATE, "seen")
HEADROOM_BAD_STEPS = _at(_HEADROOM_STATE, "bad_steps")
HEADROOM_CALM = _at(_HEADROOM_STATE, "calm")
HEADROOM_PATIENCE = _at(_HEADROOM_STATE, "patience")
HEADROOM_REST = _at(_HEADROOM_STATE, "rest")

SET_PATIENCE = _at(packed.LOSSES, "patience")
SET_PERIOD = _at(packed.LOSSES, "period")

_DYNAMIC_SETTINGS = packed.SETTINGS[packed.DYNAMIC]
DYNAMIC_GROWTH_FACTOR = _at(_DYNAMIC_SETTINGS, "growth_factor")
DYNAMIC_BACKOFF_FACTOR = _at(_DYNAMIC_SETTINGS, "backoff_factor")
DYNAMIC_GROWTH_INTERVAL = _at(_DYNAMIC_SETTINGS, "growth_interval")
DYNAMIC_HYSTERESIS = _at(_DYNAMIC_SETTINGS, "hysteresis")
DYNAMIC_MIN_SCALE = _at(_DYNAMIC_SETTINGS, "min_scale")
DYNAMIC_MAX_SCALE = _at(_DYNAMIC_SETTINGS, "max_scale")
DYNAMIC_ROOM = _at(_DYNAMIC_SETTINGS, "room")

_HEADROOM_SETTINGS = packed.SETTINGS[packed.HEADROOM]
HEADROOM_MIN_SCALE = _at(_HEADROOM_SETTINGS, "min_scale")
HEADROOM_MAX_SCALE = _at(_HEADROOM_SETTINGS, "max_scale")
HEADROOM_ROOM = _at(_HEADROOM_SETTINGS, "room")
HEADROOM_MARGIN = _at(_HEADROOM_SETTINGS, "margin")
HEADROOM_MEMORY = _at(_HEADROOM_SETTINGS, "memory")
HEADROOM_FORGET = _at(_HEADROOM_SETTINGS, "forget")
HEADROOM_PAUSE = _at(_HEADROOM_SETTINGS, "pause")

# Values of the constants RULE and LOSS of a kernel.
DYNAMIC = tl.constexpr(packed.DYNAMIC)
HEADROOM = tl.constexpr(packed.HEADROOM)
LOSS_FLAG = tl.constexpr(packed.LOSS_FLAG)
LOSS_RAW = tl.constexpr(packed.LOSS_RAW)
