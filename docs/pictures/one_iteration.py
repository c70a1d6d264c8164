"""What happens in one iteration, as a diagram. Nothing is measured."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from style import SMALL, WIDTH, Look, figure, main

NAME = "one-iteration"
HEIGHT = 3.1


def draw(look: Look) -> Figure:
    """Boxes and arrows; a unit of the axes is an inch."""
    drawn = figure(HEIGHT)
    axes = drawn.subplots()
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.set_axis_off()

    def box(x: float, y: float, title: str, text: str, colour: str, wide: float = 1.3) -> None:
        axes.add_patch(
            FancyBboxPatch(
                (x - wide / 2, y - 0.34),
                wide,
                0.68,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor="none",
                edgecolor=colour,
                linewidth=1.6,
            )
        )
        axes.text(
            x,
            y + 0.11,
            title,
            color=look.text,
            fontsize=10,
            ha="center",
            va="center",
            weight="bold",
        )
        axes.text(x, y - 0.14, text, color=look.muted, fontsize=8, ha="center", va="center")

    def arrow(*points: tuple[float, float], colour: str = look.muted) -> None:
        axes.plot(*zip(*points[:-1], strict=True), color=colour, linewidth=1.3)
        axes.add_patch(
            FancyArrowPatch(
                points[-2],
                points[-1],
                arrowstyle="-|>",
                mutation_scale=11,
                color=colour,
                linewidth=1.3,
                shrinkA=0,
                shrinkB=0,
            )
        )

    top, middle, low = 2.65, 1.55, 0.45
    box(0.85, top, "forward", "float16; gives the loss", look.muted, 1.5)
    box(2.75, top, "scale", "loss \u00d7 scale", look.ours)
    box(4.7, top, "backward", "float16; gradients \u00d7 scale", look.muted, 1.75)
    box(6.9, top, "unscale", "gradients \u00f7 scale", look.ours, 1.5)
    box(6.9, middle, "check", "is every gradient finite?", look.ours, 1.7)
    box(4.5, middle, "clip", "by the true norm", look.good)
    box(2.55, middle, "step", "float32 weights", look.good)
    box(6.9, low, "skip", "weights and optimizer stay", look.bad, 1.8)
    box(2.55, low, "update", "keep or raise the scale; after an overflow, lower it", look.ours, 3.2)
    arrow((1.6, top), (2.1, top))
    arrow((3.4, top), (3.825, top))
    arrow((5.575, top), (6.15, top))
    arrow((6.9, top - 0.34), (6.9, middle + 0.34))
    arrow((6.05, middle), (5.15, middle), colour=look.good)
    arrow((3.85, middle), (3.2, middle), colour=look.good)
    arrow((2.55, middle - 0.34), (2.55, low + 0.34), colour=look.good)
    arrow((6.9, middle - 0.34), (6.9, low + 0.34), colour=look.bad)
    arrow((6.0, low), (4.15, low), colour=look.bad)
    arrow((0.95, low), (0.4, low), (0.4, top - 0.34))
    for text, x, y, colour in (
        ("yes", 5.6, middle + 0.12, look.good),
        ("no", 7.06, 1.0, look.bad),
        ("next\niteration", 0.83, 1.45, look.muted),
    ):
        axes.text(x, y, text, color=colour, fontsize=SMALL, ha="center", va="center")
    return drawn


if __name__ == "__main__":
    main(NAME, draw)
