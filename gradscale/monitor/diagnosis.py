"""Why a step was skipped, and what to look at when no step is applied any more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradscale.formats import Format
from gradscale.monitor.findings import KINDS

EXPLANATIONS = {
    "applied": "the step was applied",
    "no gradients": "no parameter of the optimizer has a gradient: check that the loss depends on "
    "the parameters and that backward() ran",
    "loss not finite": "the loss is not finite, and no scale prevents that: check the forward "
    "pass, the data and the learning rate",
    "stuck at the floor": "gradients are not finite even at min_scale, so the scale is probably "
    "not the cause: check the parameters listed here",
    "NaN at any scale": "gradients are NaN, and a lower scale does not prevent that: look for 0 / "
    "0, or a root or logarithm of 0, in the backward pass of the parameters listed here",
    "scale too low": "gradients are finite while they are scaled, but after unscaling too large "
    "for the format in which they are stored: they have exploded, or were changed after "
    "unscale_()",
    "scale too high": "gradients overflow: lower the scale if it is constant; a dynamic scale is "
    "still falling, and will reach a scale that works unless the gradients have exploded",
}
"""Every verdict with its meaning, in the order in which they are tried."""

HOPELESS = 20
"""Skipped steps in a row, with the scale lowered each time, after which NaN is not the scale's."""
DISTANT = 10
"""Binades between the largest finite gradient and the ceiling that make an overflow unlikely."""

_HINT = "Set stuck_after and on_stuck to change when and how this is reported."


def verdict(
    *,
    applied: bool,
    finite: bool,
    scale: float,
    loss_finite: bool = True,
    has_gradients: bool = True,
    floor: float = 0.0,
    own_losses: Sequence[tuple[bool, float]] = (),
    bad_counts: Sequence[tuple[int | None, int | None]] = (),
    finite_amax: float | None = None,
    format: Format | None = None,
    skipped_in_a_row: int = 0,
) -> str:
    """Returns the first key of `EXPLANATIONS` that is true of a step.

    An overflow can leave only NaN (infinity minus infinity). So NaN is attributed to another cause
    than the scale only if no gradient is infinite and the finite ones are far below the ceiling, or
    if lower scales have not helped.

    Args:
        applied: Whether the step was taken.
        finite: Whether every scaled gradient element was finite.
        scale: The scale of the gradients.
        loss_finite: Whether the loss was finite.
        has_gradients: Whether any parameter has a gradient.
        floor: The smallest scale that the policy allows.
        own_losses: For each loss with a scale of its own, whether its gradients were finite, and
            that scale.
        bad_counts: Infinite and NaN elements of each gradient that was not finite; None where they
            were not counted.
        finite_amax: The largest finite magnitude of the scaled gradients, if known.
        format: The narrowest format of the backward pass, if known.

    Examples:
        >>> verdict(applied=False, finite=False, scale=65536.0)
        'scale too high'
    """
    if applied:
        return "applied"
    if not has_gradients:
        return "no gradients"
    if not loss_finite:
        return "loss not finite"
    overflowing = [loss_scale for fine, loss_scale in own_losses if not fine]
    if not finite and not overflowing:
        overflowing = [scale]
    if any(loss_scale <= floor for loss_scale in overflowing):
        return "stuck at the floor"
    infs = [inf for inf, _ in bad_counts]
    if skipped_in_a_row >= HOPELESS:
        unlikely = not any(infs)
    elif finite_amax is None or format is None or any(inf != 0 for inf in infs):
        unlikely = False
    else:
        unlikely = 0 < finite_amax <= math.ldexp(format.max, -DISTANT)
    if unlikely and any(nan != 0 for _, nan in bad_counts):
        return "NaN at any scale"
    return "scale too low" if finite else "scale too high"


def stuck_message(
    count: int,
    scale: float,
    verdict: str,
    parameters: Sequence[str] = (),
    weights: Sequence[str] = (),
) -> str:
    """Returns what is wrong after `count` consecutive skipped steps, and what to check.

    Args:
        count: The number of skipped steps.
        scale: The scale of the last of them.
        verdict: The verdict on the last of them.
        parameters: The names of parameters whose gradients were not finite.
        weights: The names of parameters that are not finite themselves, which explains the rest.
    """
    if weights:
        return (
            f"{count} steps in a row were skipped, the last at scale {scale:g} ({verdict}), and "
            f"{weights_evidence(weights)} {KINDS['weights-not-finite']} {_HINT}"
        )
    culprits = f" Gradients that are not finite: {named(parameters)}." if parameters else ""
    return (
        f"{count} steps in a row were skipped, the last at scale {scale:g} ({verdict}): "
        f"{EXPLANATIONS[verdict]}.{culprits} {_HINT}"
    )


def weights_evidence(weights: Sequence[str]) -> str:
    """That `weights` are not finite, in a sentence that may go on another one."""
    return f"weights are not finite: {named(weights)}."


def named(parameters: Sequence[str]) -> str:
    """The first of `parameters`, and how many more there are."""
    more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
    return "; ".join(parameters[:3]) + more


def replay_message(
    count: int, scale: float, losses_finite: bool, weights: Sequence[str] = ()
) -> str:
    """Returns the same message for steps in a CUDA graph, of which only the flags are known.

    Args:
        count: The number of skipped steps.
        scale: The current scale.
        losses_finite: Whether the losses of the last of them were finite.
        weights: The names of parameters that are not finite.
    """
    if weights:
        return (
            f"{count} steps in a row were skipped in a CUDA graph, and "
            f"{weights_evidence(weights)} {KINDS['weights-not-finite']} {_HINT}"
        )
    known = "" if losses_finite else f" ({EXPLANATIONS['loss not finite']})"
    return (
        f"{count} steps in a row were skipped in a CUDA graph, and the scale is now "
        f"{scale:g}{known}. Run a step outside of the graph to get its verdict() and culprits(). "
        f"{_HINT}"
    )
