"""The rows of the table, and the result of the demo in one sentence.

The result is there if all of these hold. They are computed from the runs of this very call.

- float32 learns: its loss is below that of drawing the mean image by more than noise.
- gradscale is within noise of float32: its loss is less than 10 % (`NOISE`) above.
- gradscale with the NaN batches is within noise of float32 without them.
- torch's GradScaler with the NaN batches is clearly worse: of what float32 gains after those
  batches began, it gains less than half.

Noise is what rounding alone does to this training. With the seeds 0 to 3, float32 ended between
4.6 % below and 8.5 % above itself when its first weights were moved at random by at most 2**-11 of
their value, the rounding of float16, two times each. gradscale ended between 6.7 % below and 4.2 %
above float32, and between 5.3 % below and 5.5 % above with the NaN batches. torch's GradScaler with
the NaN batches ended 37 % to 172 % above float32, and gained nothing: its loss was higher than
float32's before them.
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
NOISE = 0.1
"""Losses that differ by a smaller share than this are called the same."""
NOTES = f"""\
loss: squared error per pixel, mean of the last {TAIL} steps.
zero grads: steps that were applied although every gradient was zero.
underflow: share of the nonzero weight-gradient elements that are below 2**-14, the smallest \
normal float16 number.
flushed to 0: share of the elements that are nonzero in float32 (same weights, same batch) and \
zero in float16. Both are measured every {PROBE_EVERY} steps, if applied, before unscaling.
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
            f"Too few steps for a result: float32 has not learned anything yet (loss {true:.4f}; "
            f"the mean image as the output gives {mean_loss:.4f}).",
        )
    if not loss < (1 + NOISE) * true:
        return Result(
            False,
            f"gradscale is worse than float32: loss {loss:.4f}, more than {NOISE:.0%} above "
            f"{true:.4f}.",
        )
    row = summarise(ours_nan)
    if not row.loss < (1 + NOISE) * true:
        return Result(
            False,
            f"With {len(damaged)} NaN batches gradscale is worse than float32 without them: loss "
            f"{row.loss:.4f}, more than {NOISE:.0%} above {true:.4f}.",
        )
    kept = (
        f"gradscale skipped {row.skipped} steps, wasted {row.empty} others and ended at "
        f"{row.loss:.4f} (float32 without NaN batches: {true:.4f})."
    )
    theirs = trace_of(traces, TORCH_NAN)
    if theirs is None:
        return Result(True, f"With {len(damaged)} NaN batches {kept}")
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
        f"{steps - damaged.stop} remaining steps (every gradient was zero) and ended at loss "
        f"{other.loss:.4f}; {kept}",
    )
