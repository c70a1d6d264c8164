"""The result of a step: was it applied, and if not, why."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepOutcome(NamedTuple):
    """What became of one step. Values stay on the device: reading one (`bool()`, `float()`) waits.

    They are the step's own and do not change when later steps are taken.
    """

    applied: Tensor
    """bool: the optimizer step took place."""
    finite: Tensor
    """bool: every scaled gradient element was finite; if not, the scale was too high."""
    fits: Tensor
    """bool: every unscaled element was finite where it is stored; if not, the scale was too low, or
    the gradients were spoilt after `unscale_()`."""
    loss_finite: Tensor
    """bool: every loss of the window was finite; True where several ranks run and nobody asked."""
    scale: Tensor
    """float32: the scale that the gradients were made with."""
