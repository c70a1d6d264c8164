"""The result of a step, where it is a value that compiled code returns (JAX, Keras)."""

from __future__ import annotations

from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """The outcome of one step: arrays on the device. Reading one on the host waits for it."""

    applied: Any
    """bool: the optimizer step was taken."""
    finite: Any
    """bool: every scaled gradient element was finite; if not, the scale was too high."""
    fits: Any
    """bool: every unscaled element was finite where it is stored; if not, the scale was too low."""
    loss_finite: Any
    """bool: the loss was finite; True if it was not passed."""
    scale: Any
    """float32: the scale of the gradients."""
    grad_norm: Any
    """float32: 2-norm of the unscaled gradients before clipping; NaN if the step was skipped."""
    amax: Any
    """float32: the largest magnitude of the scaled gradients."""
    headroom: Any
    """float32: binades between amax and the largest finite number of the format."""
    skipped_in_a_row: Any
    """int32: number of consecutive skipped steps, including this one."""
