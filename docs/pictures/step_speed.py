"""What a step costs on an H200: the part after the backward pass, and whole iterations.

The rows are those of benchmarks/results.csv, and of the table of whole iterations in
docs/measurements/speed.md, which `iterations.csv` has as numbers.
"""

from __future__ import annotations

import csv
from decimal import ROUND_HALF_UP, Decimal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter

from style import HERE, SMALL, Look, figure, finish, main

NAME = "step-speed"
STEPS = HERE.parents[1] / "benchmarks" / "results.csv"
ITERATIONS = HERE / "iterations.csv"
DATE, DEVICE = "2026-11-16", "NVIDIA H200"
MODELS = {
    "7B-like": "7B-like, 32 layers",
    "GPT-2 XL": "GPT-2 XL",
    "GPT-2 small": "GPT-2 small",
    "ResNet-50": "ResNet-50",
}
"""As they are called in the picture, and in the rows."""
CASES = {
    "torch": "torch's scaler, fused AdamW",
    "ours, torch's AdamW": "apply(), fused AdamW",
    "ours": "apply(), gradscale's AdamW",
}
LOOPS = {
    "drop_in": "torch's loop, gradscale",
    "apply": "apply(), fused AdamW",
    "apply_our_adamw": "apply(), gradscale's AdamW",
    "fp16_master": '"fp16-master"',
}


def step_times() -> dict[str, dict[str, float]]:
    """Milliseconds on the device, by model and case: the last row of each."""
    with STEPS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["benchmark"] == "step"]
    found = {
        row["case"]: float(row["median_ms"])
        for row in rows
        if (row["date"], row["device"]) == (DATE, DEVICE)
    }
    return {
        model: {case: found[f"{name}, {case}, device"] for case in (*CASES, "floor")}
        for model, name in MODELS.items()
    }


def loops() -> list[dict[str, str]]:
    """The rows of `ITERATIONS`, as they are written there."""
    lines = ITERATIONS.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def rounded(milliseconds: float) -> str:
    """As the tables have it: halves are rounded up."""
    return str(Decimal(f"{milliseconds:.3f}").quantize(Decimal("0.01"), ROUND_HALF_UP))


def draw_steps(axes: Axes, look: Look) -> None:
    """A group of bars for every model."""
    colours = dict(zip(CASES, (look.muted, look.other, look.ours), strict=True))
    for place, (model, times) in enumerate(step_times().items()):
        for index, (case, label) in enumerate(CASES.items()):
            ratio, at = times[case] / times["torch"], place + 0.27 * (index - 1)
            axes.barh(at, ratio, height=0.24, color=colours[case], gid=f"{model}-{case}")
            text = f"{rounded(times[case])} ms" + (f", {label}" if not place else "")
            axes.text(ratio + 0.01, at, text, color=look.text, fontsize=SMALL - 1, va="center")
        floor = times["floor"] / times["torch"]
        axes.plot([floor, floor], [place - 0.42, place + 0.42], color=look.text, linewidth=1.2)
        if not place:
            text = "least time for the memory, 32 bytes for each parameter"
            where = {"ha": "center", "va": "center", "fontsize": SMALL - 1}
            axes.text(floor, -0.62, text, color=look.muted, **where)
    axes.set_yticks(range(len(MODELS)), list(MODELS))
    axes.set_ylim(len(MODELS) - 0.5, -0.8)
    axes.set_xlim(0, 1.42)
    axes.set_title("From the end of the backward pass to cleared gradients", loc="left")


def draw_loop(axes: Axes, row: dict[str, str], look: Look) -> None:
    """A bar for every way to write the loop."""
    colours = (look.muted, look.muted, look.other, look.ours, look.good)
    milliseconds = float(row["ms"])
    texts = {"torch": f"{row['ms']} ms ({row['ms_least']} to {row['ms_most']})"}
    texts |= {name: row[name] for name in LOOPS}
    for place, (name, text) in enumerate(texts.items()):
        ratio = 1.0 if name == "torch" else float(text)
        axes.barh(place, ratio, height=0.72, color=colours[place], gid=f"{row['model']}-{name}")
        where = {"ha": "right", "va": "center", "fontsize": SMALL - 1}
        axes.text(ratio - 0.03, place, text, color=look.background, **where)
    spread = [float(row["ms_least"]) / milliseconds, float(row["ms_most"]) / milliseconds]
    axes.plot(spread, [-0.5, -0.5], color=look.text, linewidth=1.6)
    axes.axvline(1.0, color=look.text, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(texts)), ["torch's scaler", *LOOPS.values()], fontsize=SMALL)
    axes.set_ylim(len(texts) - 0.5, -0.7)
    axes.set_xlim(0, 1.2)
    axes.set_title(f"Whole iterations, {row['model']}", loc="left")


def draw(look: Look) -> Figure:
    """Steps above, iterations below."""
    drawn = figure(5.0)
    rows = drawn.subfigures(2, 1, height_ratios=(1.3, 1))
    above = rows[0].subplots()
    below = rows[1].subplots(1, 2, sharey=True)
    draw_steps(above, look)
    for axes, row in zip(below, loops(), strict=True):
        draw_loop(axes, row, look)
    for axes in (above, *below):
        axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        finish(axes, look, grid="")
        axes.tick_params(axis="y", colors=look.text, length=0)
    rows[1].supxlabel(
        "time, as a share of that with torch's GradScaler", color=look.muted, fontsize=10
    )
    return drawn


if __name__ == "__main__":
    main(NAME, draw)
