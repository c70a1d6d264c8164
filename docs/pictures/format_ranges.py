"""Which magnitudes float16, bfloat16 and float32 can represent, and those of recorded gradients."""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from gradient_histogram import ROWS, ZERO
from gradscale.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from style import SMALL, Look, figure, finish, main, power, read

NAME = "format-ranges"
FORMATS = (FLOAT32, BFLOAT16, FLOAT16)
TAIL = 0.005
"""Of the gradients, what is cut off at either end."""


def limits(format: Format) -> tuple[float, float, float]:
    """log2 of the smallest subnormal, the smallest normal and the largest number."""
    return tuple(
        math.log2(x) for x in (format.smallest_subnormal, format.smallest_normal, format.max)
    )


def gradients() -> tuple[float, float]:
    """The binades of the recorded float32 gradients, from first to last, without the tails."""
    counts = [(row["binade"], row["float32"]) for row in read(ROWS) if row["binade"] != ZERO]
    total = sum(count for _, count in counts)
    passed, inner = 0.0, []
    for binade, count in counts:
        if passed + count > TAIL * total and passed < (1 - TAIL) * total:
            inner.append(binade)
        passed += count
    return inner[0], inner[-1] + 1


def draw(look: Look) -> Figure:
    """A bar for each format, and one for the gradients."""
    drawn = figure(2.7)
    axes = drawn.subplots()
    for place, format in enumerate(FORMATS):
        subnormal, normal, most = limits(format)
        colour = look.ours if format == FLOAT16 else look.muted
        axes.barh(place, most - normal, left=normal, height=0.5, color=colour, gid=format.name)
        axes.barh(
            place,
            normal - subnormal,
            left=subnormal,
            height=0.5,
            color=colour,
            alpha=0.4,
            gid=f"{format.name}-subnormal",
        )
    first, last = gradients()
    axes.barh(3, last - first, left=first, height=0.32, color=look.good, gid="gradients")
    for exponent in limits(FLOAT16):
        axes.axvline(exponent, color=look.ours, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    least, small, most = limits(FLOAT16)

    def note(text: str, x: float, y: float, colour: str, ha: str) -> None:
        axes.text(x, y, text, color=colour, fontsize=SMALL, ha=ha, va="center")

    note("6.0e-8", least - 1.5, 1.57, look.ours, "right")
    note("6.1e-5", small + 1.5, 1.57, look.ours, "left")
    note("65504", most + 1.5, 1.57, look.ours, "left")
    note("3.4e38", 130, 0, look.muted, "left")
    note("3.4e38", 130, 1, look.muted, "left")
    note("1.4e-45", -151, 0, look.muted, "right")
    note("9.2e-41", -135, 1, look.muted, "right")
    note("11 significant bits", most + 1.5, 2, look.muted, "left")
    note("faint: subnormal numbers", 152, 3, look.muted, "right")
    for place, format in ((1, BFLOAT16), (0, FLOAT32)):
        bits = f"{format.mantissa_bits + 1} significant bits"
        axes.text(75, place, bits, color=look.background, fontsize=SMALL, ha="center", va="center")
    axes.set_yticks(range(4), [*(f.name for f in FORMATS), "gradients of a\nsmall network"])
    axes.invert_yaxis()
    axes.set_xlim(-186, 152)
    axes.xaxis.set_major_locator(MultipleLocator(32))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axes.set_xlabel("magnitude")
    finish(axes, look, grid="x")
    axes.tick_params(axis="y", colors=look.text, length=0)
    axes.spines["left"].set_visible(False)
    return drawn


if __name__ == "__main__":
    main(NAME, draw)
