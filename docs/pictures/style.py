"""The one style of all pictures: sizes, fonts, colours, and how a picture is written.

A script of this folder has `NAME` and `draw(look)`, which returns a figure for a light or a dark
background. `save` writes both, as docs/images/NAME.svg and docs/images/NAME-dark.svg: the site and
the README show the one that suits the reader's background, which is transparent in the file.

The text of an SVG stays text, in the sans-serif font of the reader's system. It is laid out with
DejaVu Sans, which comes with matplotlib and is wider than most, so it fits, and the file is the
same on every machine. It has neither a date nor random names in it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
IMAGES = HERE.parent / "images"
WIDTH = 8.0
"""Inches, of 72 points: the text column of the site."""
SETTINGS = {
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "font.family": ["DejaVu Sans"],
    "font.size": 10.0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "gradscale",
}
SYSTEM_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
SMALL = 9.0
"""Points, of labels inside a picture."""
SUPERSCRIPTS = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


class Look(NamedTuple):
    """The colours for one background.

    After the palette of Okabe and Ito, whose colours differ for people with any of the usual colour
    blindnesses; for dark backgrounds they are lighter.
    """

    suffix: str
    """Of the file name."""
    background: str
    """Of the page, for text on a coloured area; nothing is filled with it."""
    text: str
    muted: str
    """Labels of axes, and what is only for comparison."""
    grid: str
    ours: str
    other: str
    """torch, or whatever ours is compared with."""
    good: str
    warning: str
    bad: str


LIGHT = Look(
    suffix="",
    background="#ffffff",
    text="#1f2328",
    muted="#59636e",
    grid="#d8dde3",
    ours="#0072b2",
    other="#d55e00",
    good="#00855f",
    warning="#b87b00",
    bad="#b3305f",
)
DARK = Look(
    suffix="-dark",
    background="#0d1117",
    text="#e8ebef",
    muted="#a2adba",
    grid="#3a424d",
    ours="#5ab8f0",
    other="#f58a4b",
    good="#2fc79b",
    warning="#f2c14b",
    bad="#f082ad",
)
LOOKS = (LIGHT, DARK)


def power(exponent: float) -> str:
    """2 to an exponent, with a superscript that needs no mathematical font."""
    return f"2{f'{exponent:g}'.translate(SUPERSCRIPTS)}"


def figure(height: float) -> Figure:
    """An empty figure, as wide as all others and `height` inches high."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def finish(axes: Axes, look: Look, grid: str = "y") -> None:
    """Gives axes the colours of `look`, and grid lines across the axis `grid`."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(look.muted)
    axes.tick_params(colors=look.muted, which="both", length=3)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(look.muted)
    for where in ("left", "center"):
        axes.set_title(axes.get_title(where), loc=where, color=look.text, fontsize=11)
    if grid:
        axes.grid(axis=grid, color=look.grid, linewidth=0.7)
    legend = axes.get_legend()
    if legend is not None:
        for text in legend.get_texts():
            text.set_color(look.text)


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Inside the block matplotlib has the settings of the pictures, and none of the user's."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def svg(draw: Callable[[Look], Figure], look: Look) -> str:
    """The text of the file."""
    out = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with settings():
        draw(look).savefig(out, format="svg", transparent=True, metadata=metadata)
    lines = out.getvalue().replace("'DejaVu Sans'", SYSTEM_FONTS).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def save(name: str, draw: Callable[[Look], Figure], folder: Path = IMAGES) -> None:
    """Writes a picture for both backgrounds."""
    for look in LOOKS:
        (folder / f"{name}{look.suffix}.svg").write_text(svg(draw, look), encoding="utf-8")


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a recorded file, without its comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        {name: float(value) for name, value in row.items()}
        for row in csv.DictReader(line for line in lines if not line.startswith("#"))
    ]


def write(path: Path, comment: str, names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Records rows, under a comment that says where they come from."""
    with path.open("w", encoding="utf-8", newline="") as out:
        out.writelines(f"# {line}\n" for line in comment.splitlines())
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)


def main(
    name: str, draw: Callable[[Look], Figure], record: Callable[[], None] | None = None
) -> None:
    """What a script does when it is started: draws, and with --record measures before."""
    parser = argparse.ArgumentParser(description=f"Draws docs/images/{name}.svg.")
    if record is not None:
        parser.add_argument("--record", action="store_true", help="measure the rows again")
    if getattr(parser.parse_args(), "record", False) and record is not None:
        record()
    save(name, draw)
