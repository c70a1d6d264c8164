"""What the four runs say, in numbers and in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from gradscale.demo.train import BATCH, LEARNING_RATE, PROBE_EVERY, Lost, Trace

TAIL = 50
"""The last steps, over which the final loss is averaged."""
ALIKE = 0.05
"""Losses that differ by a smaller share than this are called the same."""
NOTES = f"""\
loss: squared error per pixel, mean of the last {TAIL} steps.
underflow: of the weight-gradient elements that are not zero, the share below 2**-14, the smallest \
normal float16 number.
flushed to 0: of the elements that are not zero in float32 (same weights, same batch), the share \
that is zero in float16. Both every {PROBE_EVERY} steps, before unscaling.
All runs: autoencoder with 7 sigmoid layers, AdamW, learning rate {LEARNING_RATE:g}, batches of \
{BATCH}. float16: weights, activations and gradients; float32: master weights, loss and optimizer.
dynamic: starts at 2**16, doubles after 50 finite steps in a row (torch's default: 2000, too long \
for this run), halves at an overflow."""
"""What the columns of the table mean, and the settings of the runs."""


class Summary(NamedTuple):
    """One row of the table."""

    name: str
    loss: float
    """Mean over the last steps."""
    skipped: int
    lost: Lost | None
    """Mean over the measurements; None in float32."""
    scale: float
    """The last one that was used."""


def summarise(trace: Trace) -> Summary:
    """The row of the table for a run."""
    steps = trace.steps
    probes = [step.lost for step in steps if step.lost is not None]
    lost = Lost(*(fmean(shares) for shares in zip(*probes, strict=True))) if probes else None
    skipped = sum(not step.applied for step in steps)
    tail = fmean(step.loss for step in steps[-TAIL:])
    return Summary(trace.run.name, tail, skipped, lost, steps[-1].scale)


def finding(rows: Sequence[Summary], mean_loss: float) -> tuple[str, str]:
    """What the rows show, in two short lines; `mean_loss` is that of drawing the mean image.

    The rows are those of `train.RUNS`, in that order. The words follow the numbers: a run that is
    too short to show anything is called that.
    """
    exact, bare, static, dynamic = (row.loss for row in rows)
    scaled = f"{static:.3f} (static), {dynamic:.3f} (dynamic)"
    if exact > (1 - ALIKE) * mean_loss:
        return (
            "Too few steps to tell: float32 itself has learned nothing yet",
            f"loss {exact:.3f}; drawing the mean image has {mean_loss:.3f}",
        )
    if bare < (1 + ALIKE) * exact:
        return (
            f"Here float16 needs no scale: loss {bare:.3f}, float32 {exact:.3f}",
            f"with a scale: {scaled}",
        )
    stuck = bare > (1 - ALIKE) * mean_loss
    first = "learns nothing" if stuck else "falls behind"
    same = all(abs(loss - exact) < ALIKE * exact for loss in (static, dynamic))
    second = "With a scale it learns like float32" if same else "With a scale"
    return (
        f"Without a scale, float16 {first}: loss {bare:.3f}, float32 {exact:.3f}",
        f"{second}: {scaled}",
    )
