"""The pictures of docs/measurements/arena.md: the scales over the steps, and the metrics.

Drawn with matplotlib's Figure alone, as the demo's picture is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from arena import measure
from arena.rows import Row, of_arm
from arena.trainings import TRAININGS

# The palette of Okabe and Ito, which people with any of the usual colour blindnesses tell apart.
COLOURS = {
    "float32": "#777777",
    "bfloat16": "#999999",
    "float16, no scale": "#F0E442",
    "torch's GradScaler": "#D55E00",
    "Dynamic": "#E69F00",
    "Headroom": "#0072B2",
    "LogMax": "#009E73",
    "Histogram": "#CC79A7",
    "float16, blocks": "#000000",
}
MOVING = ("torch's GradScaler", "Dynamic", "Histogram", "LogMax", "Headroom")
Panel = Callable[[Axes, Sequence[Row], int | None], None]


def draw(rows: Sequence[Row], best: Mapping[str, int | None], path: Path) -> list[tuple[str, Path]]:
    """Draws both pictures into files whose paths begin with `path`; their captions and files."""
    path.parent.mkdir(exist_ok=True)
    drawn = []
    for kind, panel, text in (
        ("scales", _scales, "The scale at every step, as a power of two. An x is a skipped step."),
        ("metrics", _metrics, "The metric of every seed."),
    ):
        file = path.with_name(f"{path.name}-{kind}.png")
        _grid(rows, best, panel).savefig(file, dpi=70)
        drawn.append((text, file))
    return drawn


def _grid(rows: Sequence[Row], best: Mapping[str, int | None], panel: Panel) -> Figure:
    """One panel for every training that has rows."""
    names = [name for name in best if any(row.training == name for row in rows)]
    height = math.ceil(len(names) / 3)
    figure = Figure(figsize=(13, 3.2 * height), layout="constrained")
    grid = figure.subplots(height, min(3, len(names)), squeeze=False)
    places = list(grid.flat)
    for axes, name in zip(places, names, strict=False):
        panel(axes, [row for row in rows if row.training == name], best[name])
        axes.set_title(name)
    for axes in places[len(names) :]:
        axes.axis("off")
    handles: dict[str, object] = {}
    for axes in places[: len(names)]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6)
    return figure


def _scales(axes: Axes, rows: Sequence[Row], best: int | None) -> None:
    """The scales of the first seed."""
    if best is not None:
        axes.axhspan(best - measure.NEAR, best + measure.NEAR, color="#dddddd", label="good scales")
    for arm in MOVING:
        runs = [row for row in of_arm(rows, rows[0].training, arm) if not row.note]
        if not runs:
            continue
        history = measure.unpack(runs[0].history)
        # Ours lies on torch's wherever no loss is NaN.
        dashes = (0, (4, 4)) if arm == "Dynamic" else "-"
        colour = COLOURS[arm]
        axes.plot(history, color=colour, linestyle=dashes, drawstyle="steps-post", label=arm)
        skips = [int(step) for step in runs[0].skips.split()]
        heights = [history[step] for step in skips]
        axes.plot(skips, heights, "x", color=colour, markersize=5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _metrics(axes: Axes, rows: Sequence[Row], best: int | None) -> None:
    """A dot for every seed of every arm."""
    arms = [arm for arm in COLOURS if of_arm(rows, rows[0].training, arm)]
    names = [*arms] if best is None else [*arms, f"static 2^{best}"]
    for height, arm in enumerate(reversed(names)):
        values = [row.value for row in of_arm(rows, rows[0].training, arm)]
        colour = COLOURS.get(arm, "#56B4E9")
        axes.plot(values, [height] * len(values), "o", color=colour, alpha=0.8)
    axes.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
    # What lies within the noise should look like it.
    low, high = axes.get_xlim()
    middle = (low + high) / 2
    reach = max((high - low) / 2, 2 * TRAININGS[rows[0].training].noise * abs(middle))
    axes.set_xlim(middle - reach, middle + reach)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set_xlabel(rows[0].metric)
    axes.grid(axis="x", color="#eeeeee")
