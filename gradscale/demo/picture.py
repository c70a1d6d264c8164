"""The picture of the demo: loss and scale over the steps, in two panels.

Drawn with matplotlib's Figure alone. pyplot would choose a window system and keep global state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gradscale.demo.summary import finding, summarise
from gradscale.demo.train import Trace
from gradscale.errors import SettingError

SUFFIXES = (".png", ".svg", ".pdf")
SMOOTH = 25
"""Steps in the moving mean of the loss."""

# The palette of Okabe and Ito, whose colours differ for people with any of the usual colour
# blindnesses. Three of the lines lie on each other, so they differ in width and dashes too.
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#BBBBBB", "linewidth": 7.0, "linestyle": "-"},
    {"color": "#D55E00", "linewidth": 2.2, "linestyle": "-"},
    {"color": "#0072B2", "linewidth": 2.2, "linestyle": "-"},
    {"color": "#000000", "linewidth": 1.6, "linestyle": (0, (2, 3))},
)
SKIPPED: dict[str, Any] = {
    "linestyle": "none",
    "marker": "x",
    "markersize": 8,
    "markeredgewidth": 2,
}


def check_path(path: Path) -> None:
    """Raises SettingError if no picture can be written to `path`: better before the training."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(f"output must end in {', '.join(SUFFIXES)}, got {path}.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingError(f"output must be a file in a folder that exists, got {path}.")


def draw(traces: Sequence[Trace], mean_loss: float, path: Path) -> None:
    """Writes the picture of the four runs to `path`, whose ending decides the file format."""
    check_path(path)
    figure = Figure(figsize=(10, 6.6), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    title, subtitle = finding([summarise(trace) for trace in traces], mean_loss)
    figure.suptitle(title, fontsize=15, fontweight="bold", x=0.02, ha="left")
    top.set_title(subtitle, fontsize=13, loc="left")
    draw_losses(top, traces, mean_loss)
    draw_scales(bottom, traces)
    bottom.set_xlim(0, max(len(trace.steps) for trace in traces))
    bottom.set_xlabel("step; all runs start with the same weights and see the same batches")
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for axes in (top, bottom):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def draw_losses(axes: Axes, traces: Sequence[Trace], mean_loss: float) -> None:
    """Draws the smoothed losses on a logarithmic axis."""
    axes.set_yscale("log")
    lines = [smooth([step.loss for step in trace.steps]) for trace in traces]
    for trace, line, look in zip(traces, lines, LOOKS, strict=True):
        axes.plot(line, **look, label=f"{trace.run.name}: {summarise(trace).loss:.3f}")
    axes.axhline(mean_loss, color="#666666", linestyle=":", label="drawing the mean image")
    low = min(min(line) for line in lines) * 0.85
    axes.set_ylim(low, max(max(line[len(line) // 20 :]) for line in lines) * 1.35)
    ticks = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 3, 4, 6, 8)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(f"loss (mean of {SMOOTH} steps)")


def draw_scales(axes: Axes, traces: Sequence[Trace]) -> None:
    """Draws the scales that move or are not 1 on an axis of powers of two, and marks the skips."""
    for trace, look in zip(traces, LOOKS, strict=True):
        if all(step.scale == 1.0 for step in trace.steps):
            continue
        powers = [math.log2(step.scale) for step in trace.steps]
        skips = [index for index, step in enumerate(trace.steps) if not step.applied]
        axes.plot(powers, color=look["color"], label=trace.run.name, drawstyle="steps-post")
        skipped = [powers[index] for index in skips]
        label = f"{len(skips)} steps skipped" if skips else None
        axes.plot(skips, skipped, color="#CC79A7", zorder=3, label=label, **SKIPPED)
    low, high = axes.dataLim.intervaly
    axes.set_ylim(low - 1.5, high + 1.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2$^{{{value:g}}}$"))
    axes.set_ylabel("scale")


def smooth(values: Sequence[float]) -> list[float]:
    """The centred moving mean of `values`, over fewer of them at both ends."""
    reach = SMOOTH // 2
    return [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
