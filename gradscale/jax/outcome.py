"""The result of a step as a pytree of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from gradscale.formats import Format
from gradscale.policy import GradStats


class Outcome(NamedTuple):
    """The result of one step: arrays on the device. Reading one on the host waits for it."""

    applied: Any
    """bool: the optimizer step took place."""
    finite: Any
    """bool: every scaled gradient element was finite; if not, the scale was too high."""
    fits: Any
    """bool: every unscaled element was finite where it is stored; if not, the scale was too low."""
    loss_finite: Any
    """bool: the loss was finite; True where it was not given."""
    scale: Any
    """float32: the scale that the gradients were made with."""
    grad_norm: Any
    """float32: the 2-norm of the unscaled gradients, before clipping; NaN if it was skipped."""
    amax: Any
    """float32: the largest magnitude among the scaled gradients."""
    headroom: Any
    """float32: binades between amax and the largest finite number of the format."""
    skipped_in_a_row: Any
    """int32: how many steps in a row have been skipped, this one included."""


def outcome_from(
    stats: GradStats, applied: Any, scale: Any, skipped_before: Any, format: Format
) -> Outcome:
    """The outcome of a step with these `stats`."""
    none = jnp.zeros_like(skipped_before)
    return Outcome(
        applied=applied,
        finite=stats.finite,
        fits=stats.fits,
        loss_finite=stats.loss_finite,
        scale=scale,
        grad_norm=jnp.where(applied, stats.norm, jnp.full_like(stats.norm, jnp.nan)),
        amax=stats.amax,
        headroom=jnp.log2(format.max / stats.amax),
        skipped_in_a_row=jnp.where(applied, none, skipped_before + 1),
    )
