"""How Dynamic and Headroom move the scale in one training with spikes.

`scale_trajectories.py --record` trains the network of `gradscale demo` in float32 and records its
largest gradients. The trajectories are computed from these rows by the policies themselves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

import gradscale as gs
from gradscale.formats import FLOAT16
from style import HERE, SMALL, Look, figure, finish, main, power, read, write

NAME = "scale-trajectories"
ROWS = HERE / "scale_trajectories.csv"
STEPS = 3000
SPIKES = range(1000, 2000, 100)
"""The steps whose batch weighs `WEIGHT` times as much."""
WEIGHT = 2.0**12
BLOCK = 10
"""Steps of which the lowest limit is drawn: so many, and so that a spike can be seen."""
POLICIES: dict[str, gs.Policy] = {"Dynamic": gs.Dynamic(), "Headroom": gs.Headroom()}


class Walk(NamedTuple):
    """What a policy does on the recorded history."""

    scales: list[float]
    """log2 of the scale that each step uses."""
    skipped: list[int]


def record() -> None:
    """Trains and writes `ROWS`."""
    import torch
    from torch import Tensor, nn

    from gradscale.demo.digits import load_digits
    from gradscale.demo.train import EXACT, LEARNING_RATE, batches, build, one_thread
    from recording import versions

    rows = []
    with one_thread():
        net, largest = build(0), [0.0]
        optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)

        def see(_: nn.Module, __: object, output: Tensor) -> None:
            output.register_hook(lambda grad: largest.append(float(grad.abs().max())))

        for layer in net:
            layer.register_forward_hook(see)
        for index, batch in enumerate(batches(EXACT, load_digits(), STEPS, 0)):
            largest.clear()
            weight = WEIGHT if index in SPIKES else 1.0
            (weight * nn.functional.mse_loss(net(batch), batch)).backward()
            amax = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            rows.append((index, f"{math.log2(amax):.3f}", f"{math.log2(max(largest)):.3f}"))
    comment = (
        "The network of `gradscale demo` in float32, gradients clipped to a norm of 0.1; of the\n"
        f"batches 1,000 to 1,900 every hundredth weighs {WEIGHT:g} times as much.\n"
        "log2 of the largest gradient of the weights, and of the outputs of the layers.\n"
        f"{versions()}."
    )
    write(ROWS, comment, ("step", "weights", "outputs"), rows)


def walk(policy: gs.Policy, rows: list[dict[str, float]]) -> Walk:
    """The scales of `policy` on the recorded gradients, and the steps that it skips."""
    state = policy.init()
    scales, skipped = [], []
    for index, row in enumerate(rows):
        amax = 2.0 ** row["weights"] * state.scale
        reach = 2.0 ** row["outputs"] * state.scale
        finite = max(amax, reach) <= FLOAT16.max
        scales.append(math.log2(state.scale))
        if not finite:
            skipped.append(index)
        state = policy.update(state, gs.GradStats(finite=finite, amax=amax))
    return Walk(scales, skipped)


def draw(look: Look) -> Figure:
    """Both trajectories, below the limit that the gradients set."""
    rows = read(ROWS)
    drawn = figure(3.4)
    axes = drawn.subplots()
    limit = [math.log2(FLOAT16.max) - max(row["weights"], row["outputs"]) for row in rows]
    lowest = [min(limit[first : first + BLOCK]) for first in range(0, len(limit), BLOCK)]
    axes.fill_between(
        range(0, len(limit), BLOCK),
        lowest,
        40,
        step="post",
        color=look.bad,
        alpha=0.18,
        linewidth=0,
    )
    colours = {"Dynamic": look.other, "Headroom": look.ours}
    for name, policy in POLICIES.items():
        found = walk(policy, rows)
        axes.plot(
            found.scales, color=colours[name], linewidth=2.2, drawstyle="steps-post", gid=name
        )
        axes.plot(
            found.skipped,
            [found.scales[index] for index in found.skipped],
            linestyle="none",
            marker="x",
            markersize=7,
            markeredgewidth=1.8,
            color=look.bad,
            gid=f"{name}-skips",
        )
    axes.set_ylim(6, 27)
    axes.set_xlim(0, len(rows))
    axes.yaxis.set_major_locator(MultipleLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power(value)))
    axes.set_ylabel("scale")
    axes.set_xlabel("step")
    finish(axes, look)
    for text, step, height, colour in (
        ("these scales overflow", 300, 25.3, look.bad),
        ("Headroom()", 780, 22.0, look.ours),
        ("Dynamic()", 780, 15.1, look.other),
        ("ten batches weigh\n4,096 times as much", 2250, 20.6, look.bad),
        ("\u00d7  skipped step", 2450, 25.3, look.bad),
    ):
        bold = "bold" if text.endswith("()") else "normal"
        axes.text(
            step, height, text, color=colour, fontsize=SMALL, va="center", ha="center", weight=bold
        )
    return drawn


if __name__ == "__main__":
    main(NAME, draw, record)
