"""What every mode of MixedPrecision gives and costs: quality, memory, time.

    python modes.py                              # both, on a GPU
    python modes.py quality --device cuda --seeds 3
    python modes.py memory --device cuda
    python modes.py table                        # rewrites docs/measurements/modes.md from the rows

Quality: a small transformer reads Python's documentation, and a small convolutional net takes noise
out of handwritten digits. Every mode of a seed starts with the same weights and sees the same
batches. Beside the modes runs float16 without a scale. The metric is the loss on data that is never
trained on, in the format of the mode.

Memory: a GPT with AdamW, ours and torch's fused one. What lies in memory between two steps, without
gradients, is counted in bytes for each parameter, and so is the peak of an iteration: with one text
of 256 tokens, so that there are few activations, and with four of 1,024.

Rows are appended to modes.csv after each run; old rows stay, and the tables take the last.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _rows
import torch
from arena import data
from end_to_end import GPT, Size
from torch import Tensor, nn
from torch.nn import functional

import gradscale
from gradscale import Static
from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision import MODES
from gradscale.torch.optim import AdamW

RESULTS = Path(__file__).parent / "modes.csv"
PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "modes.md"
NO_SCALE = "fp16, no scale"
ARMS = (*MODES, NO_SCALE)
OWN, TORCHS = "gradscale.torch.optim.AdamW", "torch.optim.AdamW(fused=True)"
SHAPES = ((1, 256), (4, 1024))
"""Texts and tokens of an iteration: few activations, and more."""
MEMORY = Size(layers=24, heads=16, width=1024, words=50304, length=1024)
TINY = Size(layers=1, heads=2, width=16, words=101, length=16)


class Row(NamedTuple):
    """One number."""

    date: str
    device: str
    torch: str
    gradscale: str
    what: str
    """"quality" or "memory"."""
    case: str
    """The network, or the optimizer."""
    mode: str
    seed: int
    value: float
    """The metric; or bytes for each parameter."""
    peak: float
    """Of memory, in bytes for each parameter; NaN for quality."""
    tokens: int
    """Of an iteration whose memory was measured; 0 for quality."""
    skipped: int
    seconds: float


class Conv(nn.Module):
    """Takes noise out of images. The loss is a mean over 256 x 32 x 32 pixels.

    So the backward pass begins with numbers around 2**-21, of which float16 keeps three bits.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, stride=stride, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        for inputs, outputs in ((32, 32), (32, 16)):
            layers.append(nn.ConvTranspose2d(inputs, outputs, 2, stride=2, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1))

    def forward(self, pair: Tensor) -> Tensor:
        """The mean squared error between what it makes of the noisy images and the clean ones."""
        noisy, clean = pair.unbind(1)
        found: Tensor = self.layers(noisy.unsqueeze(1)).squeeze(1)
        return (found.float() - clean.float()).square().mean()


class Task(NamedTuple):
    """A network, and what it is trained on."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]
    held_out: Callable[[], Iterable[Tensor]]
    steps: int
    lr: float


def tasks() -> dict[str, Task]:
    """The two trainings."""
    length = 128
    words = len(data.alphabet())
    size = Size(layers=4, heads=4, width=128, words=words, length=length)

    def text(generator: torch.Generator) -> Tensor:
        return data.windows(data.documentation().train, 32, length, generator)

    def other_text() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            yield data.windows(data.documentation().validation, 64, length, generator)

    def digits(generator: torch.Generator) -> Tensor:
        images = data.digits().train
        some = images[torch.randint(len(images), (256,), generator=generator)]
        return noisy_pairs(some, generator)

    def other_digits() -> list[Tensor]:
        return [noisy_pairs(data.digits().validation, torch.Generator().manual_seed(1))]

    return {
        "transformer": Task(lambda: GPT(size), text, other_text, 800, 1e-3),
        "conv net": Task(Conv, digits, other_digits, 600, 3e-3),
    }


def noisy_pairs(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images with noise and without, four times as wide and high."""
    clean = functional.interpolate(images.view(-1, 1, 8, 8), scale_factor=4, mode="bilinear")
    noise = torch.randn(clean.shape, generator=generator)
    return torch.cat([clean + 0.5 * noise, clean], 1)


def train(task: Task, arm: str, device: str, seed: int, steps: int) -> tuple[float, int]:
    """The loss on what is held out, and how many steps were skipped."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    optimizer = AdamW(model.parameters(), lr=task.lr)
    none = Static(init_scale=1.0) if arm == NO_SCALE else None
    mode = "fp16" if arm == NO_SCALE else arm
    mp = MixedPrecision(model, optimizer, mode, policy=none, on_stuck="ignore")
    # Up in an eighth of the steps, and down again: else the metric depends on the last few batches.
    rates = [min(8 * (step + 1) / steps, 1 - step / steps) for step in range(steps + 1)]
    mp.follow(torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__))
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    for _ in range(steps):
        batch = task.batch(generator).to(device)
        with mp.autocast():
            loss = model(batch)
        mp.backward(loss.float())
        outcomes.append(mp.step(clip_norm=1.0).applied)
    model.eval()
    with torch.no_grad(), mp.autocast():
        losses = [model(batch.to(device)).item() for batch in task.held_out()]
    applied = sum(bool(each) for each in outcomes)
    return statistics.fmean(losses), steps - applied


def weigh(
    mode: str, own: bool, size: Size, shape: tuple[int, int], device: str
) -> tuple[float, float]:
    """Bytes for each parameter between two steps, and at the peak."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = GPT(size).to(device)
    params = list(model.parameters())
    optimizer = AdamW(params) if own else torch.optim.AdamW(params, fused=True)
    mp = MixedPrecision(model, optimizer, mode)
    del params, optimizer
    text = torch.randint(size.words, (shape[0], min(shape[1], size.length)), device=device)
    count = sum(param.numel() for param in model.parameters())
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with mp.autocast():
            loss = model(text)
        mp.backward(loss.float())
        mp.step(clip_norm=1.0)
        del loss
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated() - before
    return between / count, (torch.cuda.max_memory_allocated() - before) / count


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, prints and appends; or writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choices = ["both", "quality", "memory", "table"]
    parser.add_argument(
        "what", nargs="?", default="both", choices=choices, help="what to measure: quality, memory"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--tasks", nargs="*", default=["transformer", "conv net"])
    parser.add_argument("--steps", type=int, help="steps, in place of those of the training")
    parser.add_argument("--tiny", action="store_true", help="measure memory with a tiny model")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file with the rows")
    options = parser.parse_args(arguments)
    if options.what == "table":
        write(_rows.read(Row, options.results))
        return
    if options.what == "both":
        options.device = "cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was run")
        return
    if options.what != "memory":
        _quality(options)
    if options.what != "quality":
        _memory(options)


def _quality(options: argparse.Namespace) -> None:
    every = tasks()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.tasks:
            steps = options.steps or every[name].steps
            for arm in options.arms:
                start = time.perf_counter()
                value, skipped = train(every[name], arm, options.device, seed, steps)
                seconds = time.perf_counter() - start
                nan = float("nan")
                add(options, ("quality", name, arm, seed, value, nan, 0, skipped, seconds))


def _memory(options: argparse.Namespace) -> None:
    size = TINY if options.tiny else MEMORY
    if options.device == "cpu":
        print("memory is counted on a CUDA device; nothing was run")
        return
    weigh("fp16", True, TINY, (1, TINY.length), options.device)  # what libraries allocate once
    for mode, case, shape in itertools.product(MODES, (OWN, TORCHS), SHAPES):
        start = time.perf_counter()
        value, peak = weigh(mode, case == OWN, size, shape, options.device)
        seconds = time.perf_counter() - start
        add(options, ("memory", case, mode, 0, value, peak, math.prod(shape), 0, seconds))


def add(options: argparse.Namespace, values: tuple[Any, ...]) -> None:
    """Appends a row, and prints it."""
    cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else platform.machine() + " CPU"
    versions = torch.__version__, gradscale.__version__
    row = Row(datetime.date.today().isoformat(), device, *versions, *values)
    print(*row[4:], flush=True)
    _rows.append(row, options.results)


def write(rows: list[Row]) -> None:
    """Puts the tables of what ran on a GPU into the page."""
    there = [row for row in rows if "CPU" not in row.device]
    for what, lines in (("quality", _quality_table(there)), ("memory", _memory_table(there))):
        _rows.put(PAGE, f"modes: {what}", lines)


def _quality_table(rows: list[Row]) -> list[str]:
    last = {(row.case, row.mode, row.seed): row for row in rows if row.what == "quality"}
    cells: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for (case, mode, _), row in last.items():
        cells[case, mode].append(row)
    names = list(dict.fromkeys(case for case, _ in cells))
    lines = ["| mode | " + " | ".join(f"{name} | minus float32 | skipped" for name in names) + " |"]
    lines.append("|---|" + "---|---|---|" * len(names))
    for mode in ARMS:
        line = [mode]
        for name in names:
            mine = {row.seed: row for row in cells[name, mode]}
            wide = {row.seed: row for row in cells[name, "fp32"]}
            apart = [mine[seed].value - wide[seed].value for seed in mine if seed in wide]
            values = [row.value for row in mine.values()]
            skipped = str(sum(row.skipped for row in mine.values()))
            line += [_mean(values), _mean(apart, 1), skipped]
        lines.append("| " + " | ".join(line) + " |")
    return lines


def _mean(values: list[float], digits: int = 4) -> str:
    """The mean and the deviation."""
    if not values:
        return ""
    spread = f" +- {statistics.stdev(values):.1g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}g}{spread}"


def _memory_table(rows: list[Row]) -> list[str]:
    last = {(row.mode, row.case, row.tokens): row for row in rows if row.what == "memory"}
    sizes = sorted({tokens for _, _, tokens in last})
    heads = ["between steps", *(f"peak, {tokens:,} tokens" for tokens in sizes)]
    lines = ["| mode | " + " | ".join(f"{head}: ours | torch's" for head in heads) + " |"]
    lines.append("|---|" + "---|---|" * len(heads))
    for mode in MODES:
        mine = [[last.get((mode, case, size)) for case in (OWN, TORCHS)] for size in sizes]
        first = [next((r for r in each if r is not None), None) for each in zip(*mine, strict=True)]
        numbers = ["" if row is None else f"{row.value:.2f}" for row in first]
        numbers += ["" if row is None else f"{row.peak:.2f}" for each in mine for row in each]
        lines.append(f"| {mode} | " + " | ".join(numbers) + " |")
    return lines


if __name__ == "__main__":
    main()
