"""What is done to gradients: by Triton kernels where they can take them, else by torch operations.

The two backends, `reference` and `triton`, give the same results; `dispatch.use()` chooses one.
"""

from __future__ import annotations

import math

from torch import Tensor

from gradscale.policy import GradStats
from gradscale.torch.grads import dispatch, reference
from gradscale.torch.grads.collect import Gradients
from gradscale.torch.grads.fields import SUMMARY, value_at
from gradscale.torch.grads.reference import Measurement
from gradscale.torch.grads.scale import Scale, move


def measure(
    grads: Gradients,
    scale: Scale,
    *,
    unscale: bool = False,
    amax: bool = False,
    max_norm: float | None = None,
) -> Measurement:
    """What `grads` are like, before they are unscaled in place: `reference.measure`, by kernels."""
    table = grads.table if scale.number is None else None
    if table is None:
        return reference.measure(grads, scale, unscale=unscale, amax=amax, max_norm=max_norm)
    summary, counts = dispatch.module("measure").measure(
        table.groups,
        move(scale.inverse, table.keys[0][0]),
        max_norm=math.inf if max_norm is None else max_norm,
        unscale=unscale,
    )
    summary = move(summary, scale.tensor.device)
    names = ("non_finite", "fits", "amax", "norm", "clip", "finite_amax")
    bad, fits, largest, norm, clip, peak = (value_at(summary, name, SUMMARY) for name in names)
    stats = GradStats(finite=bad == 0, fits=fits > 0, amax=largest)
    if max_norm is not None:
        stats = stats._replace(norm=norm)
    limit = 1.0 if max_norm is None else clip
    return Measurement(stats, limit, counts=table.rows(counts), finite_amax=peak)


def multiply(grads: Gradients, factor: Tensor) -> None:
    """Multiplies `grads` by the float32 `factor` in place, each product rounded once."""
    table = grads.table
    if table is None:
        reference.multiply(grads.values, factor)
    else:
        dispatch.module("rescale").multiply(table.groups, move(factor, table.keys[0][0]))
