"""The result of a step as a pytree of arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from gradscale.formats import Format
from gradscale.monitor import Outcome
from gradscale.policy import GradStats


def outcome_from(
    stats: GradStats, applied: Any, scale: Any, skipped_before: Any, format: Format
) -> Outcome:
    """The outcome of a step with these `stats`; `pack` leaves out the norm if it was skipped."""
    none = jnp.zeros_like(skipped_before)
    return Outcome(
        applied=applied,
        finite=stats.finite,
        fits=stats.fits,
        loss_finite=stats.loss_finite,
        scale=scale,
        grad_norm=stats.norm,
        amax=stats.amax,
        headroom=jnp.log2(format.max / stats.amax),
        skipped_in_a_row=jnp.where(applied, none, skipped_before + 1),
    )
