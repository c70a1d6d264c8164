"""What BlockScales costs and what it gives, on nets whose gradients span about 47 binades.

    python benchmarks/blocks.py --device cuda            # some minutes on an H200
    python benchmarks/blocks.py --device cpu --quick

Costs: an iteration (forward, backward, step, update) with and without BlockScales, by turns in one
process, in runs of 128 iterations so that each has one that measures. The ratio is the median of
those of neighbouring runs; on the CPU it is one of processor time, because the machine is shared.

    pooled  blocks below the pooling run on all positions, so the device is busy
    plain   the same without positions, so the host is

Accuracy: float32, torch's GradScaler, and BlockScales with Headroom, each from the same start and
on the same batches, until it is about as good as it can be; torch's for the first seed alone. The
first layer leaves three of 32 numbers, so what is told apart after it has to be learnt there, with
gradients of 2**-47.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import gradscale as gs
from gradscale.torch import GradScaler
from gradscale.torch.blocks import BlockScales
from gradscale.torch.optim import Lion

RUN = 128
WARM_UP = 1
"""Runs of iterations before those that are timed: scales have found their places by then."""
NUM_FEATURES, NUM_CLASSES, CODE = 32, 4, 3
SLOPE = 0.8
STRENGTH = 2.5
"""The shift of the mean over positions in a direction, in standard deviations of its noise."""
RATE, RISE = 3e-4, 100
"""The learning rate, and in how many steps it is reached; it falls to zero with the last step."""
NUM_TESTS = 16_384
SPAN = 47
"""Binades from the gradients of the last block to those of the first."""


class Shape(NamedTuple):
    """A net and its batches."""

    num_blocks: int
    below: int
    """How many blocks lie below the pooling."""
    width: int
    batch: int
    positions: int


class Plain(nn.Module):
    """A layer without normalisation, through which gradients lose some binades."""

    def __init__(self, num_inputs: int, num_outputs: int, binades: float) -> None:
        super().__init__()
        self.line = nn.Linear(num_inputs, num_outputs)
        nn.init.orthogonal_(self.line.weight, (2 / (1 + SLOPE**2)) ** 0.5)
        self.kept = 2.0**-binades

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.leaky_relu(self.line(x), SLOPE)
        return torch.lerp(y.detach(), y, self.kept)


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Net(nn.Module):
    """Plain blocks in a list, a mean among them, and a first layer that is a narrow code."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        binades = (SPAN - math.log2(shape.positions)) / shape.num_blocks
        sizes = [NUM_FEATURES, CODE, *[shape.width] * (shape.num_blocks - 1)]
        pairs = itertools.pairwise(sizes)
        layers: list[nn.Module] = [Plain(first, second, binades) for first, second in pairs]
        layers.insert(shape.below, Mean())
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(shape.width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Data:
    """Sequences of noise whose mean is shifted to or fro in two directions, and which way it is."""

    def __init__(self, seed: int, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.generator = torch.Generator(device).manual_seed(seed)
        ways = torch.randn(NUM_FEATURES, 2, generator=torch.Generator().manual_seed(7))
        self.ways = torch.linalg.qr(ways).Q.T.to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """New ones."""
        settings = {"generator": self.generator, "device": self.device}
        labels = torch.randint(NUM_CLASSES, (size,), **settings)
        signs = torch.stack([labels % 2, labels // 2], 1) * 2.0 - 1
        noise = torch.randn(size, self.shape.positions, NUM_FEATURES, **settings)
        shift = STRENGTH / self.shape.positions**0.5
        return noise + (signs @ self.ways)[:, None] * shift, labels

    @staticmethod
    def best_accuracy() -> float:
        """That of the signs of the mean along the two directions; no other guess is right as often.

        Either sign is right if the noise, a normal variable, does not exceed the shift.
        """
        return (0.5 + 0.5 * math.erf(STRENGTH / 2**0.5)) ** 2


class Training:
    """A net, its optimizer and scaler: in "float32", with "torch"'s scaler or with "blocks"."""

    def __init__(self, kind: str, shape: Shape, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.half, self.device = kind != "float32", device
        self.net = Net(shape).to(device)
        self.optimizer = Lion(self.net.parameters(), lr=RATE)
        self.blocks = BlockScales(self.net) if kind == "blocks" else None
        # "scaler": the same scaler as with blocks, so that blocks are the only difference in time.
        policy = gs.Headroom() if kind in ("blocks", "scaler") else None
        self.scaler = GradScaler(device, enabled=self.half, on_stuck="ignore", policy=policy)

    def step(self, x: Tensor, labels: Tensor) -> None:
        """One iteration."""
        with torch.autocast(self.device, dtype=torch.float16, enabled=self.half):
            out = self.net(x)
        self.scaler.backward(nn.functional.cross_entropy(out.float(), labels))
        self.scaler.apply(self.optimizer)
        if self.blocks is not None:
            self.blocks.update()

    @torch.no_grad()
    def accuracy(self, data: Data) -> float:
        """On batches that it has not seen."""
        right = 0
        for _ in range(NUM_TESTS // 128):
            x, labels = data.batch(128)
            with torch.autocast(self.device, dtype=torch.float16, enabled=self.half):
                right += int((self.net(x).argmax(1) == labels).sum())
        return right / NUM_TESTS

    def num_dead(self, x: Tensor, labels: Tensor) -> int:
        """How many weights get a gradient that is all zero."""
        with torch.autocast(self.device, dtype=torch.float16, enabled=self.half):
            out = self.net(x)
        self.scaler.backward(nn.functional.cross_entropy(out.float(), labels))
        num = sum(not bool(param.grad.any()) for param in self.net.parameters())
        self.optimizer.zero_grad()
        return num


def seconds(device: str) -> float:
    """The time, or on the CPU the processor time; waits for the device."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def cost(name: str, shape: Shape, device: str, rounds: int) -> None:
    """Prints how long an iteration takes with and without block scales."""
    kinds = ("scaler", "blocks")
    trainings = [Training(kind, shape, 0, device) for kind in kinds]
    data = Data(0, shape, device)
    batches = [data.batch(shape.batch) for _ in range(4)]
    taken: list[list[float]] = [[] for _ in kinds]
    for number in range(WARM_UP + rounds):
        for training, times in zip(trainings, taken, strict=True):
            start = seconds(device)
            for step in range(RUN):
                training.step(*batches[step % 4])
            if number >= WARM_UP:
                times.append((seconds(device) - start) / RUN * 1e3)
    without, with_blocks = (statistics.median(times) for times in taken)
    ratio = statistics.median(b / a for a, b in zip(*taken, strict=True))
    scales = list(trainings[1].blocks.exponents.values())  # type: ignore[union-attr]
    changes = sum(a != b for a, b in itertools.pairwise(scales))
    print(
        f"{name:8} {without:8.2f} ms without, {with_blocks:8.2f} ms with BlockScales, "
        f"ratio {ratio:.3f}; {changes} changes of scale in {len(scales)} blocks, "
        f"exponents {max(scales)} to {min(scales)}",
        flush=True,
    )


def learn(shape: Shape, device: str, seeds: Sequence[int], steps: int) -> None:
    """Prints accuracies."""
    best = Data.best_accuracy()
    error = (best * (1 - best) / NUM_TESTS) ** 0.5
    print(f"best possible accuracy {best:.4f}, standard error of a test {error:.4f}", flush=True)
    for seed in seeds:
        line = []
        for kind in ("float32", "torch", "blocks") if seed == 0 else ("float32", "blocks"):
            training = Training(kind, shape, seed, device)
            data = Data(100 + seed, shape, device)
            dead = 0
            for step in range(steps):
                for group in training.optimizer.param_groups:
                    group["lr"] = RATE * min(1, step / RISE) * (1 - step / steps)
                training.step(*data.batch(shape.batch))
                if step == 9:
                    dead = training.num_dead(*data.batch(shape.batch))
            accuracy = training.accuracy(Data(999, shape, device))
            line.append(f"{kind} {accuracy:.4f} ({dead} dead after 10 updates)")
        print(f"seed {seed}: " + ", ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="small sizes, for the CPU")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="seeds of the trainings"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of the timings")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.blocks} blocks", flush=True)
    below = options.blocks // 4
    pooled = Shape(options.blocks, below, 64, 32, 2048)
    if options.quick:
        pooled = Shape(options.blocks, below, 32, 64, 8)
    if options.rounds:
        cost("pooled", pooled, options.device, options.rounds)
        cost("plain", pooled._replace(positions=1, batch=256), options.device, options.rounds)
    if options.seeds:
        batch = 64 if options.quick else 128
        narrow = pooled._replace(batch=batch, width=32)
        learn(narrow, options.device, options.seeds, options.steps)


if __name__ == "__main__":
    main()
