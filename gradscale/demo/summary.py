"""The rows of the table, and the result of the demo in one sentence.

The result is there if all of these hold. They are computed from the runs of this very call.

- float32 learns: its loss is more than 5 % (`NOISE`) below that of drawing the mean image.
- gradscale is within noise of float32: its loss is at most 5 % above.
- gradscale is within noise of float32 with the NaN batches as well. The batches that were NaN cannot
  be learned from in any format, so the loss is compared with float32's after as many applied steps.
- torch's run with the NaN batches is clearly worse: of what float32 gains after those batches, it
  gains less than half.

Why 5 %: with the seeds 0 to 3 the loss of gradscale was SEEN of
float32's. Rounding alone makes runs differ so much, as static and dynamic scales do
in the same table. torch's loss was WORSE than float32's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from gradscale.demo.train import (
    BATCH,
    EXACT,
    LEARNING_RATE,
    OURS,
    OURS_NAN,
    PROBE_EVERY,
    TORCH_NAN,
    Lost,
    Run,
    Trace,
    nan_steps,
)

TAIL = 50
"""Steps over which a loss is averaged; the final loss is that of the last ones."""
NOISE = 0.05
"""Losses that differ by a smaller share than this are called the same."""
NOTES = f"""\
loss: squared error per pixel, mean of the last {TAIL} steps.
zero grads: steps that were applied although every gradient was zero.
underflow: of the weight-gradient elements that are not zero, the share below 2**-14, the smallest \
normal float16 number.
flushed to 0: of the elements that are not zero in float32 (same weights, same batch), the share \
that is zero in float16. Both every {PROBE_EVERY} applied steps, before unscaling.
All runs: autoencoder with 7 sigmoid layers, AdamW, learning rate {LEARNING_RATE:g}, batches of \
{BATCH}. float16: weights, activations and gradients; float32: master weights, loss and optimizer.
torch: torch.amp.GradScaler with its defaults. gradscale: the policy Headroom with its defaults. \
NaN data: the same training, with batches of NaN in the middle."""
"""What the columns of the table mean, and the settings of the runs."""


class Summary(NamedTuple):
    """One row of the table."""

    name: str
    loss: float
    """Mean over the last steps."""
    skipped: int
    empty: int
    """Steps that were applied although every gradient was zero."""
    lost: Lost | None
    """Mean over the measurements; None in float32."""
    scale: float
    """The last one that was used."""


class Result(NamedTuple):
    """What the runs show."""

    holds: bool
    """Whether all conditions in the docstring of this module hold."""
    sentence: str


def finite_mean(losses: Sequence[float]) -> float:
    """The mean of those that are finite; NaN if none is."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return fmean(finite) if finite else math.nan


def loss_after(trace: Trace, steps: int) -> float:
    """The mean loss of the last `TAIL` of the first so many steps."""
    return finite_mean([step.loss for step in trace.steps[max(0, steps - TAIL) : max(1, steps)]])


def summarise(trace: Trace) -> Summary:
    """The row of the table for a run."""
    steps = trace.steps
    probes = [step.lost for step in steps if step.lost is not None]
    lost = Lost(*(fmean(shares) for shares in zip(*probes, strict=True))) if probes else None
    skipped = sum(not step.applied for step in steps)
    empty = sum(step.applied and step.empty for step in steps)
    tail = loss_after(trace, len(steps))
    return Summary(trace.run.name, tail, skipped, empty, lost, steps[-1].scale)


def trace_of(traces: Sequence[Trace], run: Run) -> Trace | None:
    """The trace of `run`; None if the engine cannot train it."""
    return next((trace for trace in traces if trace.run == run), None)


def result_of(traces: Sequence[Trace], mean_loss: float) -> Result:
    """What the runs show, in one sentence; `mean_loss` is that of drawing the mean image.

    Raises:
        ValueError: a run with float32 or gradscale is missing.
    """
    exact, ours, ours_nan = (trace_of(traces, run) for run in (EXACT, OURS, OURS_NAN))
    if exact is None or ours is None or ours_nan is None:
        raise ValueError(f"traces must have {EXACT.name}, {OURS.name} and {OURS_NAN.name}.")
    steps = len(exact.steps)
    damaged = nan_steps(OURS_NAN, steps)
    true, loss = loss_after(exact, steps), summarise(ours).loss
    if not true < (1 - NOISE) * mean_loss:
        return Result(
            False,
            f"Too few steps to tell: float32 itself has learned nothing yet (loss {true:.4f}; "
            f"drawing the mean image has {mean_loss:.4f}).",
        )
    if not loss < (1 + NOISE) * true:
        return Result(
            False,
            f"gradscale is worse than float32: loss {loss:.4f}, more than {NOISE:.0%} above "
            f"{true:.4f}.",
        )
    row = summarise(ours_nan)
    reached = loss_after(exact, steps - len(damaged))
    if not row.loss < (1 + NOISE) * reached:
        return Result(
            False,
            f"With {len(damaged)} NaN batches gradscale is worse than float32 after as many "
            f"applied steps: loss {row.loss:.4f}, more than {NOISE:.0%} above {reached:.4f}.",
        )
    kept = (
        f"gradscale skipped {row.skipped} and ended at {row.loss:.4f}, as float32 does after as "
        f"many applied steps ({reached:.4f})."
    )
    theirs = trace_of(traces, TORCH_NAN)
    if theirs is None:
        return Result(True, f"Of {steps} steps with {len(damaged)} NaN batches, {kept}")
    other = summarise(theirs)
    before = loss_after(exact, damaged.start)
    if other.loss < (before + true) / 2:
        return Result(
            False,
            f"With {len(damaged)} NaN batches torch's GradScaler is not clearly worse here: loss "
            f"{other.loss:.4f}, float32 {true:.4f}.",
        )
    return Result(
        True,
        f"After {len(damaged)} NaN batches torch's GradScaler wasted {other.empty} of the "
        f"{steps - damaged.stop} steps that were left (every gradient was zero) and ended at loss "
        f"{other.loss:.4f}; {kept}",
    )
