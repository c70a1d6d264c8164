"""The picture of the demo: loss, scale and wasted steps; clean data on the left, NaN on the right.

Drawn with matplotlib's Figure alone. pyplot would choose a window system and keep global state. The
background is transparent and all text is of a middle grey, so that it can be read on black and on
white.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gradscale.demo.summary import finite_mean, result_of, summarise
from gradscale.demo.train import (
    BARE,
    EXACT,
    OURS,
    OURS_NAN,
    STATIC,
    TORCH,
    TORCH_NAN,
    Run,
    Step,
    Trace,
    nan_steps,
)
from gradscale.errors import SettingError

SUFFIXES = (".png", ".svg", ".pdf")
SMOOTH = 25
"""Steps in the moving mean of the loss."""
TEXT = "#7F8790"
"""A contrast of about 4 to 1 with white and of 5 to 1 with black."""
RED = "#D1495B"
"""Of NaN batches and skipped steps."""

# By the palette of Okabe and Ito, whose colours differ for people with any of the usual colour
# blindnesses. Lines that lie on each other differ in width and dashes too.
LOOKS: dict[Run, dict[str, Any]] = {
    EXACT: {"color": "#A8A8A8", "linewidth": 7.0, "linestyle": "-"},
    BARE: {"color": "#B8860B", "linewidth": 1.8, "linestyle": "-"},
    STATIC: {"color": "#009E73", "linewidth": 1.8, "linestyle": (0, (1, 1.5))},
    TORCH: {"color": "#E0631B", "linewidth": 2.4, "linestyle": (0, (5, 3))},
    OURS: {"color": "#2A8FD6", "linewidth": 2.0, "linestyle": "-"},
    TORCH_NAN: {"color": "#E0631B", "linewidth": 3.0, "linestyle": "-"},
    OURS_NAN: {"color": "#2A8FD6", "linewidth": 3.0, "linestyle": "-"},
}
LABELS = {
    EXACT: "float32",
    BARE: "no scale",
    STATIC: "static scale",
    TORCH: "torch GradScaler",
    OURS: "gradscale",
    TORCH_NAN: "torch GradScaler",
    OURS_NAN: "gradscale",
}
SKIPPED: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 5, "color": RED}


def check_path(path: Path) -> None:
    """Raises SettingError if no picture can be written to `path`: better before the training."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(f"output must end in {', '.join(SUFFIXES)}, got {path}.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingError(f"output must be a file in a folder that exists, got {path}.")


def draw(traces: Sequence[Trace], mean_loss: float, path: Path) -> None:
    """Writes the picture of the runs to `path`, whose ending decides the file format."""
    check_path(path)
    figure = Figure(figsize=(12, 8.4), dpi=130, layout="constrained")
    grid = figure.subplots(3, 2, sharex=True, sharey="row", height_ratios=(3, 1.7, 1.3))
    sentence = textwrap.fill(result_of(traces, mean_loss).sentence, 108)
    figure.suptitle(sentence, fontsize=13, fontweight="bold", x=0.01, ha="left", color=TEXT)
    clean = [trace for trace in traces if not trace.run.nan_batches]
    nan = [trace for trace in traces if trace.run.nan_batches or trace.run == EXACT]
    for column, shown in enumerate((clean, nan)):
        top, middle, bottom = (row[column] for row in grid)
        draw_losses(top, shown, mean_loss)
        draw_scales(middle, [trace for trace in shown if trace.run != EXACT])
        draw_wasted(bottom, [trace for trace in shown if trace.run != EXACT])
        bottom.set_xlabel("step")
    grid[0][0].set_title("Clean data", loc="left")
    damaged = nan_steps(OURS_NAN, len(traces[0].steps))
    grid[0][1].set_title(f"The same with {len(damaged)} NaN batches in the middle", loc="left")
    for row, label in zip(
        grid, (f"loss (mean of {SMOOTH} steps)", "scale", "wasted steps\nso far"), strict=True
    ):
        row[0].set_ylabel(label)
        for axes in row:
            finish(axes)
        row[1].axvspan(damaged.start, damaged.stop, color=RED, alpha=0.22, linewidth=0, zorder=0)
    set_ranges(grid, traces)
    grid[0][1].annotate(
        "NaN batches",
        (damaged.stop, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        color=RED,
    )
    figure.savefig(path, transparent=True)


def finish(axes: Axes) -> None:
    """Gives the axes the colours that both backgrounds allow."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=TEXT, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(TEXT)
    axes.tick_params(colors=TEXT, which="both")
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(TEXT)
    left = axes.get_title(loc="left")
    if left:
        axes.set_title(left, loc="left", color=TEXT, fontsize=12)
    axes.grid(axis="y", color=TEXT, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)


def set_ranges(grid: Any, traces: Sequence[Trace]) -> None:
    """Sets limits and ticks; both columns share those of a row."""
    (top, _), (middle, _), (bottom, _) = grid
    steps = max(len(trace.steps) for trace in traces)
    bottom.set_xlim(0, steps)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    bottom.set_ylim(0, steps * 0.6)
    lines = [smooth([step.loss for step in trace.steps]) for trace in traces]
    finite = [[loss for loss in line if math.isfinite(loss)] for line in lines]
    low = min(min(line, default=1.0) for line in finite)
    high = max(max(line[len(line) // 20 :], default=1.0) for line in finite)
    top.set_yscale("log")
    top.set_ylim(low * 0.9, high * 1.15)
    ticks = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 3, 4, 5, 6, 8)]
    top.yaxis.set_major_locator(FixedLocator(ticks))
    top.yaxis.set_minor_locator(NullLocator())
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    powers = [math.log2(step.scale) for trace in traces for step in trace.steps if step.scale > 0]
    middle.set_ylim(min(powers) - 3, max(powers) + 3)
    middle.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    middle.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2$^{{{value:g}}}$"))


def draw_losses(axes: Axes, traces: Sequence[Trace], mean_loss: float) -> None:
    """Draws the smoothed losses."""
    for trace in traces:
        line = smooth([step.loss for step in trace.steps])
        label = f"{LABELS[trace.run]}: {summarise(trace).loss:.4f}"
        axes.plot(line, **LOOKS[trace.run], label=label)
    axes.axhline(mean_loss, color=TEXT, linestyle=":", label="mean image as the output")


def draw_scales(axes: Axes, traces: Sequence[Trace]) -> None:
    """Draws the scales as powers of two, with a mark at every skipped step."""
    skipped_any = False
    for trace in traces:
        powers = [math.log2(step.scale) if step.scale > 0 else math.nan for step in trace.steps]
        axes.plot(powers, **LOOKS[trace.run], drawstyle="steps-post")
        skips = [index for index, step in enumerate(trace.steps) if not step.applied]
        label = None if skipped_any or not skips else "skipped step"
        skipped_any = skipped_any or bool(skips)
        axes.plot(skips, [powers[index] for index in skips], label=label, zorder=3, **SKIPPED)


def wasted(step: Step) -> bool:
    """Whether the step taught the network nothing: skipped, or every gradient was zero."""
    return not step.applied or step.empty


def draw_wasted(axes: Axes, traces: Sequence[Trace]) -> None:
    """Draws how many steps were wasted so far, and their number at the end of the lines."""
    for trace in traces:
        counts = list(accumulate(wasted(step) for step in trace.steps))
        axes.plot(counts, **LOOKS[trace.run])
        if trace.run.nan_batches:
            axes.annotate(
                f"{LABELS[trace.run]}: {counts[-1]}",
                (len(counts) - 1, counts[-1]),
                xytext=(-4, 5),
                textcoords="offset points",
                ha="right",
                color=LOOKS[trace.run]["color"],
                fontweight="bold",
            )


def smooth(values: Sequence[float]) -> list[float]:
    """The centred moving mean of the finite `values`; NaN where a value is not finite."""
    reach = SMOOTH // 2
    return [
        finite_mean(values[max(0, i - reach) : i + reach + 1]) if math.isfinite(value) else math.nan
        for i, value in enumerate(values)
    ]
