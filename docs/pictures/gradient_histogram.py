"""How large gradients are, and what float16 keeps of them without a scale and with one.

`gradient_histogram.py --record` trains the network of `gradscale demo` in float32 and computes the
gradients of ten batches three times: in float32, in float16, and in float16 with a scale.
"""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from style import HERE, SMALL, Look, figure, finish, main, power, read, write

NAME = "gradient-histogram"
ROWS = HERE / "gradient_histogram.csv"
LOG2_SCALE = 20
"""Where gradscale's Headroom has the scale in this training for most of the time."""
EVERY = 100
"""Steps between two batches whose gradients are counted."""
STEPS = 1000
ZERO = -999
"""Stands for the binade of zero in the recorded rows."""
NORMAL, SUBNORMAL = -14, -24
"""log2 of float16's smallest normal and smallest subnormal number."""


def record() -> None:
    """Trains and writes `ROWS`."""
    from collections import Counter

    import torch

    from gradscale.demo.digits import load_digits
    from gradscale.demo.train import EXACT, LEARNING_RATE, batches, build, one_thread, redraw
    from recording import versions

    counts: dict[str, Counter[int]] = {name: Counter() for name in ("float32", "float16", "scaled")}
    with one_thread():
        net = build(0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
        for index, batch in enumerate(batches(EXACT, load_digits(), STEPS, 0)):
            redraw(net, dict(net.named_parameters()), batch).backward()
            if index % EVERY == EVERY - 1:
                exact = torch.cat(
                    [p.grad.flatten() for p in net.parameters() if p.grad is not None]
                )
                grads_of = {"float32": exact}
                for name, scale in (("float16", 1.0), ("scaled", 2.0**LOG2_SCALE)):
                    halves = {n: p.detach().half() for n, p in net.named_parameters()}
                    for half in halves.values():
                        half.requires_grad_()
                    loss = redraw(net, halves, batch) * scale
                    grads = torch.autograd.grad(loss, list(halves.values()))
                    grads_of[name] = torch.cat([grad.flatten() for grad in grads]).float()
                for name, grads in grads_of.items():
                    # Elements that are zero in float32 as well belong to pixels that are never set.
                    grads = grads[exact != 0]
                    exponents = torch.where(grads == 0, ZERO + 1, grads.frexp().exponent) - 1
                    counts[name].update(exponents.tolist())
            optimizer.step()
            optimizer.zero_grad()
    found = set().union(*counts.values()) - {ZERO}
    binades = [ZERO, *range(min(found), max(found) + 1)]
    rows = [(b, *(counts[name][b] for name in counts)) for b in binades]
    comment = (
        "The network of `gradscale demo`, trained in float32; gradients of its weights and\n"
        f"biases at every hundredth of {STEPS} steps: how many elements lie between 2**binade\n"
        "and twice as much, computed in float32, in float16, and in float16 with the scale\n"
        f"2**{LOG2_SCALE} (not unscaled). Binade {ZERO}: zero. Elements that are zero in float32\n"
        f"are left out. {versions()}."
    )
    write(ROWS, comment, ("binade", *counts), rows)


class Shares(NamedTuple):
    """Parts of the elements that are not zero in float32, from 0 to 1."""

    zero: float
    subnormal: float
    normal: float


def shares(name: str) -> Shares:
    """What float16 made of the gradients: "float16" without the scale, "scaled" with it."""
    counts = {int(row["binade"]): row[name] for row in read(ROWS)}
    total = sum(counts.values())
    subnormal = sum(n for binade, n in counts.items() if ZERO < binade < NORMAL)
    zero = counts.get(ZERO, 0)
    return Shares(zero / total, subnormal / total, (total - zero - subnormal) / total)


def draw(look: Look) -> Figure:
    """Without a scale above, with one below."""
    rows = [row for row in read(ROWS) if row["binade"] != ZERO]
    total = sum(row["float32"] for row in read(ROWS))
    drawn = figure(4.6)
    panels = drawn.subplots(2, 1, sharex=True, sharey=True)
    for axes, name, moved in zip(panels, ("float16", "scaled"), (0, LOG2_SCALE), strict=True):
        parts = shares(name)
        edges = [row["binade"] + moved for row in rows]
        axes.stairs(
            [100 * row["float32"] / total for row in rows],
            [*edges, edges[-1] + 1],
            color=look.muted,
            linewidth=1.3,
            gid=f"{name}-float32",
        )
        for first, last, colour in (
            (SUBNORMAL, NORMAL, look.warning),
            (NORMAL, 16, look.good),
        ):
            shown = [row for row in rows if first <= row["binade"] < last]
            axes.bar(
                [row["binade"] + 0.5 for row in shown],
                [100 * row[name] / total for row in shown],
                width=0.86,
                color=colour,
                gid=f"{name}-{first}",
            )
        axes.bar(-48, 100 * parts.zero, width=2.5, color=look.bad, gid=f"{name}-zero")
        for edge in (SUBNORMAL, NORMAL, 16):
            axes.axvline(edge, color=look.text, linewidth=0.9, linestyle=(0, (4, 3)))
        scale = "no scale" if not moved else f"scale {power(moved)}"
        axes.set_title(f"float16, {scale}", loc="left")
        axes.set_ylabel("% of elements")
        finish(axes, look)
        for x, part, colour, word in (
            (-48, parts.zero, look.bad, "zero"),
            (-19, parts.subnormal, look.warning, "subnormal"),
            (1, parts.normal, look.good, "normal"),
        ):
            label = f"{word}\n{100 * part:.1f} %"
            where = {"ha": "center", "va": "top", "weight": "bold"}
            axes.text(x, 23.5, label, color=colour, fontsize=SMALL, **where)
        axes.text(16.4, 23.5, "overflow", color=look.bad, fontsize=SMALL, ha="left", va="top")
    panels[0].text(-29.5, 3.0, "float32", color=look.muted, fontsize=SMALL, ha="center")
    panels[1].set_ylim(0, 25)
    panels[1].set_xlim(-51, 22)
    panels[1].xaxis.set_major_locator(MultipleLocator(8))
    panels[1].xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "0" if value == -48 else power(value))
    )
    panels[1].set_xlabel("magnitude of a gradient element")
    return drawn


if __name__ == "__main__":
    main(NAME, draw, record)
