"""How long a run of losses that are not finite leaves the scale alone."""

from __future__ import annotations

from typing import Any

from gradscale.policy.stats import GradStats

PATIENT_LOSSES = 32
"""Losses in a row that are not finite before one counts as an overflow: it may be the scale's."""
LOSS_PERIOD = 8
"""After that, every so many of them count as one."""


def with_patience(stats: GradStats, bad_losses: Any, xp: Any) -> tuple[GradStats, Any]:
    """What a policy is to be given of a step, and the losses in a row that were not finite.

    Args:
        stats: What the step was like; `loss_finite` is an array of `xp`.
        bad_losses: How many losses in a row were not finite before it (int32).
        xp: The array module.
    """
    zero, one = xp.full_like(bad_losses, 0), xp.full_like(bad_losses, 1)
    bad_losses = xp.where(stats.loss_finite, zero, bad_losses + one)
    over = bad_losses - xp.full_like(zero, PATIENT_LOSSES)
    late = (over > zero) & (over % xp.full_like(zero, LOSS_PERIOD) == zero)
    finite = xp.where(late, zero > zero, stats.finite)
    return stats._replace(loss_finite=stats.loss_finite | late, finite=finite), bad_losses
