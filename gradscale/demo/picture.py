"""The picture of the demo: loss and scale over the steps, in two panels.

Drawn with matplotlib's Figure alone. pyplot would choose a window system and keep global state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gradscale.demo.summary import finding, summarise
from gradscale.demo.train import Trace
from gradscale.errors import SettingError

SUFFIXES = (".png", ".svg", ".pdf")
SMOOTH = 25
"""Steps in the moving mean of the loss."""
GREY = "#666666"
SKIPPED = "#CC79A7"


LABEL_GAP = 0.1
"""Between two labels, as a share of the height of the axes."""


class Label(NamedTuple):
    """The name of a line, written beside its end."""

    text: str
    end: float
    color: str


class Look(NamedTuple):
    """How the line of a run is drawn."""

    color: str
    width: float
    dashes: str | tuple[int, tuple[int, ...]]
    label: str
    """The colour of its name, which must be dark enough to read."""


# The palette of Okabe and Ito, which people with any of the usual colour blindnesses tell apart.
# Three of the lines lie on each other, so they differ in width and dashes too.
LOOKS = (
    Look("#BBBBBB", 7.0, "-", GREY),
    Look("#D55E00", 2.2, "-", "#D55E00"),
    Look("#0072B2", 2.2, "-", "#0072B2"),
    Look("#000000", 1.6, (0, (2, 3)), "#000000"),
)


def check_path(path: Path) -> None:
    """Raises SettingError if no picture can be written to `path`: better before the training."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(f"output must end in {', '.join(SUFFIXES)}, got {path}.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingError(f"output must be a file in a folder that exists, got {path}.")


def draw(traces: Sequence[Trace], mean_loss: float, path: Path) -> None:
    """Writes the picture of the four runs to `path`, whose ending decides the file format."""
    check_path(path)
    figure = Figure(figsize=(10, 6.6), dpi=150)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    # By hand: the automatic layouts make no room for labels that stand outside the axes.
    figure.subplots_adjust(left=0.08, right=0.73, top=0.86, bottom=0.08, hspace=0.1)
    title, subtitle = finding([summarise(trace) for trace in traces], mean_loss)
    figure.text(0.02, 0.94, title, fontsize=15, fontweight="bold")
    figure.text(0.02, 0.9, subtitle, fontsize=13)
    draw_losses(top, traces, mean_loss)
    draw_scales(bottom, traces)
    num_steps = max(len(trace.steps) for trace in traces)
    bottom.set_xlim(0, num_steps)
    bottom.set_xlabel("step; all runs start with the same weights and see the same batches")
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def draw_losses(axes: Axes, traces: Sequence[Trace], mean_loss: float) -> None:
    """Draws the smoothed losses on a logarithmic axis, each labelled at its end."""
    axes.set_yscale("log")
    lines = [smooth([step.loss for step in trace.steps]) for trace in traces]
    for order, (line, look) in enumerate(zip(lines, LOOKS, strict=True), 2):
        axes.plot(line, color=look.color, linewidth=look.width, linestyle=look.dashes, zorder=order)
    axes.axhline(mean_loss, color=GREY, linewidth=0.9, linestyle=":", zorder=1)
    low = min(min(line) for line in lines) * 0.85
    high = max(max(line[len(line) // 20 :]) for line in lines) * 1.35
    axes.set_ylim(low, high)
    label_ends(
        axes,
        [
            Label(f"{trace.run.name}: {summarise(trace).loss:.3f}", line[-1], look.label)
            for trace, line, look in zip(traces, lines, LOOKS, strict=True)
        ],
    )
    axes.annotate(
        "loss of drawing the mean image",
        (1.0, mean_loss),
        (-4, 5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color=GREY,
        fontsize=9,
    )
    ticks = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 3, 4, 6, 8)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel(f"loss (mean of {SMOOTH} steps)")


def draw_scales(axes: Axes, traces: Sequence[Trace]) -> None:
    """Draws the scales that move or are not 1 on an axis of powers of two, and marks the skips."""
    labels = []
    for trace, look in zip(traces, LOOKS, strict=True):
        if all(step.scale == 1.0 for step in trace.steps):
            continue
        powers = [math.log2(step.scale) for step in trace.steps]
        skips = [index for index, step in enumerate(trace.steps) if not step.applied]
        axes.plot(powers, color=look.color, linewidth=1.8, drawstyle="steps-post")
        axes.plot(
            skips,
            [powers[index] for index in skips],
            linestyle="none",
            marker="x",
            markersize=8,
            markeredgewidth=2,
            color=SKIPPED,
            zorder=3,
        )
        mark = " ($\\times$)" if skips else ""
        text = f"{trace.run.name}\n{len(skips)} steps skipped{mark}"
        labels.append(Label(text, powers[-1], look.label))
    low, high = axes.dataLim.intervaly
    axes.set_ylim(low - 1.5, high + 1.5)
    label_ends(axes, labels)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"2$^{{{value:g}}}$"))
    axes.set_ylabel("scale")


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Writes each label right of the axes at its height, moved apart from others where they meet.

    The limits of the axis must be set before.
    """
    to_fraction = axes.transData + axes.transAxes.inverted()
    ends = [float(to_fraction.transform((0.0, label.end))[1]) for label in labels]
    for label, end, height in zip(labels, ends, spread(ends, LABEL_GAP), strict=True):
        axes.annotate(
            label.text,
            (1.0, end),
            (1.035, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            color=label.color,
            fontsize=10.5,
            arrowprops={
                "arrowstyle": "-",
                "color": label.color,
                "linewidth": 1.0,
                "relpos": (0.0, 0.5),  # from the middle of the left edge of the text
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved as little as needed to be `gap` apart; equal ones go down in order.

    >>> [round(height, 3) for height in spread([0.5, 0.5, 0.9], 0.2)]
    [0.6, 0.4, 0.9]
    """
    order = sorted(range(len(heights)), key=lambda index: (-heights[index], index))
    # Groups that stand together: the sum of what their first members would like, and their size.
    groups: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        total, size = heights[index] + gap * rank, 1
        while groups and groups[-1][0] / groups[-1][1] < total / size:
            above, count = groups.pop()
            total, size = total + above, size + count
        groups.append((total, size))
    tops = [total / size for total, size in groups for _ in range(size)]
    moved = dict(zip(order, (top - gap * rank for rank, top in enumerate(tops)), strict=True))
    return [moved[index] for index in range(len(heights))]


def smooth(values: Sequence[float]) -> list[float]:
    """The centred moving mean of `values`, over fewer of them at both ends."""
    reach = SMOOTH // 2
    return [fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]
