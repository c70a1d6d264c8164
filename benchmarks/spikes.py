"""What spikes cost in time: one batch in 50 has gradients 2**12 times as large.

    python spikes.py                             # GPT-2 small, texts of 1,024 tokens, on a GPU
    python spikes.py --batch 2                   # shorter iterations
    python spikes.py --tiny                      # on the CPU

Four trainings take turns, 100 iterations each: by `mp.backward()` and `mp.step()`, or by `mp.run()`
with retries, each without and with spikes. The table has the milliseconds of an iteration, the
median over the turns, its ratio to the first row, skipped steps, recomputed batches and the mean of
log2 of the scale. The first turn of each is not counted. What spikes do to the quality of a
training is in the arena.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from end_to_end import GPT, SMALL, TINY, Size
from torch import Tensor

from gradscale.torch import MixedPrecision
from gradscale.torch.optim import AdamW

EVERY, HEIGHT = 50, 2.0**12


class Run:
    """One training."""

    def __init__(self, name: str, size: Size, device: str, texts: Tensor) -> None:
        torch.manual_seed(0)
        self.name, self.texts = name, texts
        self.model = GPT(size).to(device)
        retries = 2 if "retries" in name else None
        optimizer = AdamW(self.model.parameters(), lr=3e-4)
        self.mp = MixedPrecision(self.model, optimizer, "fp16", retries=retries)
        self.retries, self.spikes = retries, "with spikes" in name
        self.steps = 0
        self.applied: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.times: list[float] = []

    def loss(self) -> Tensor:
        """The loss of the batch of this iteration."""
        spike = self.spikes and self.steps % EVERY == EVERY - 10
        return self.model(self.texts[self.steps % len(self.texts)]) * (HEIGHT if spike else 1.0)

    def turn(self, iterations: int) -> None:
        """Trains, and notes the milliseconds of an iteration."""
        _wait()
        begin = time.perf_counter()
        for _ in range(iterations):
            if self.retries is not None:
                outcome = self.mp.run(self.loss, clip_norm=1.0)
            else:
                with self.mp.autocast():
                    loss = self.loss()
                self.mp.backward(loss)
                outcome = self.mp.step(clip_norm=1.0)
            self.steps += 1
            self.applied.append(outcome.applied)
            self.scales.append((*outcome.earlier, outcome)[0].scale)
        _wait()
        self.times.append((time.perf_counter() - begin) * 1e3 / iterations)

    def cells(self, base: float) -> list[str]:
        """The row of the table."""
        taken = statistics.median(self.times[1:])
        skipped = sum(not applied for applied in self.applied)
        scale = sum(float(scale.log2()) for scale in self.scales) / len(self.scales)
        recomputed = f"{self.mp.recomputed:.1%}"
        ratio = f"{taken / base:.3f}"
        return [self.name, f"{taken:.2f}", ratio, str(skipped), recomputed, f"{scale:.1f}"]


NAMES = ("step()", "step(), with spikes", "retries", "retries, with spikes")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--batch", type=int, default=8, help="texts per batch")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=2 * EVERY, help="iterations per turn")
    options = parser.parse_args(arguments)
    device, size = ("cpu", TINY) if options.tiny else ("cuda", SMALL)
    if device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was run")
        return
    shape = (8, options.batch, size.length)
    texts = torch.randint(size.words, shape, generator=torch.Generator().manual_seed(0))
    runs = [Run(name, size, device, texts.to(device)) for name in NAMES]
    for _ in range(1 + options.turns):
        for run in runs:
            run.turn(options.iterations)
    base = statistics.median(runs[0].times[1:])
    print("| | ms | ratio | skipped | recomputed | log2 of the scale |\n|---|---|---|---|---|---|")
    for run in runs:
        print(f"| {' | '.join(run.cells(base))} |")


def _wait() -> None:
    """Waits for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
