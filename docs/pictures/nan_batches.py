"""The picture at the top of the README: 40 NaN batches, with torch's GradScaler and with ours.

The rows are the trainings of `gradscale demo`, recorded by `nan_batches.py --record` (a minute).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from style import HERE, SMALL, Look, figure, finish, main, power, read, write

NAME = "nan-batches"
ROWS = HERE / "nan_batches.csv"
RUNS = ("float32", "torch", "gradscale")
SMOOTH = 25
"""Steps in the moving mean of the loss, as in the picture of the demo."""
FIRST, LAST = 480, 520
"""The steps whose batches are NaN: from the first up to the last, which is not one of them."""


def record() -> None:
    """Trains the three networks and writes `ROWS`."""
    from gradscale.demo.digits import load_digits
    from gradscale.demo.train import EXACT, OURS_NAN, TORCH_NAN, nan_steps, one_thread, train
    from recording import versions

    damaged = nan_steps(OURS_NAN, 1000)
    assert (damaged.start, damaged.stop) == (FIRST, LAST)
    with one_thread():
        images = load_digits()
        traces = [list(train(run, images, 1000, 0)) for run in (EXACT, TORCH_NAN, OURS_NAN)]
    rows = []
    for index, steps in enumerate(zip(*traces, strict=True)):
        row = [index]
        for step in steps:
            row += [
                f"{step.loss:.5g}",
                f"{math.log2(step.scale):g}",
                int(step.applied),
                int(step.empty),
            ]
        rows.append(tuple(row))
    columns = [
        f"{run}_{what}" for run in RUNS for what in ("loss", "log2_scale", "applied", "zero")
    ]
    comment = (
        "Three of the trainings of `gradscale demo`: float32 without NaN batches, torch's\n"
        "GradScaler and gradscale's Headroom with them. zero: every gradient was zero.\n"
        f"{versions()}."
    )
    write(ROWS, comment, ("step", *columns), rows)


def smooth(values: Sequence[float]) -> list[float]:
    """The centred moving mean of the finite values; NaN where a value is not finite."""
    reach, means = SMOOTH // 2, []
    for index, value in enumerate(values):
        near = [v for v in values[max(0, index - reach) : index + reach + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return means


def draw(look: Look) -> Figure:
    """Loss above, scale below."""
    rows = read(ROWS)
    drawn = figure(4.3)
    top, bottom = drawn.subplots(2, 1, sharex=True, height_ratios=(1.45, 1))
    # Before the NaN batches torch's line and ours are one: the wider one is seen on both sides.
    widths = {"float32": 1.0, "torch": 4.2, "gradscale": 2.0}
    colours = {"float32": look.muted, "torch": look.other, "gradscale": look.ours}
    for run in RUNS:
        loss = smooth([row[f"{run}_loss"] for row in rows])
        plain = run == "float32"
        top.plot(loss, color=colours[run], linewidth=widths[run], gid=f"{run}-loss")
        if plain:
            continue
        scale = [row[f"{run}_log2_scale"] for row in rows]
        bottom.plot(
            scale, color=colours[run], linewidth=2.4, drawstyle="steps-post", gid=f"{run}-scale"
        )
        skips = [index for index, row in enumerate(rows) if not row[f"{run}_applied"]]
        bottom.plot(
            skips,
            [scale[index] for index in skips],
            linestyle="none",
            marker="x",
            markersize=4,
            markeredgewidth=1.1,
            color=look.bad,
            gid=f"{run}-skips",
        )
    for axes in (top, bottom):
        axes.axvspan(FIRST, LAST, color=look.bad, alpha=0.18, linewidth=0, zorder=0)
    top.set_yscale("log")
    top.set_ylim(0.034, 0.16)
    top.yaxis.set_major_locator(FixedLocator([0.04, 0.06, 0.08, 0.12]))
    top.yaxis.set_minor_locator(NullLocator())
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top.set_ylabel("loss")
    bottom.set_ylabel("scale")
    bottom.set_xlabel("step")
    bottom.set_xlim(0, len(rows))
    bottom.yaxis.set_major_locator(FixedLocator([-24, -8, 8, 24]))
    bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    bottom.set_ylim(-30, 32)
    for axes in (top, bottom):
        finish(axes, look)

    def note(axes: Axes, text: str, x: float, y: float, colour: str, **more: Any) -> None:
        axes.text(x, y, text, color=colour, fontsize=SMALL, va="center", **more)

    zero = sum(int(row["torch_zero"]) for row in rows)
    last = rows[-1]
    note(top, "40 NaN batches", LAST + 8, 0.142, look.bad)
    note(top, "torch.amp.GradScaler", 995, 0.083, look.other, ha="right", weight="bold")
    note(top, "gradscale", 700, 0.0555, look.ours, weight="bold")
    note(top, "float32, no NaN batches", 990, 0.0364, look.muted, ha="right")
    note(bottom, f"ends at {power(last['gradscale_log2_scale'])}", 700, 27, look.ours)
    note(
        bottom,
        f"stays at {power(last['torch_log2_scale'])}: in {zero} steps every gradient is zero",
        LAST + 25,
        -17,
        look.other,
    )
    note(bottom, "\u00d7  skipped step", LAST + 25, 3, look.bad)
    return drawn


if __name__ == "__main__":
    main(NAME, draw, record)
