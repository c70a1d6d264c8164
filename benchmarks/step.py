"""What a step costs after the backward pass: unscale, check, clip and AdamW, on one GPU.

For the parameters of a model, with gradients that lie where they lay the step before:

    torch               torch's scaler, clip_grad_norm_, fused AdamW
    torch, foreach      the same with the default AdamW, which waits for the device
    ours, torch's AdamW apply(clip_norm=...) with torch's fused AdamW
    ours                apply(clip_norm=...) with gradscale.torch.optim.AdamW
    floor               32 bytes for every parameter at the speed of a copy measured in this run

Each is timed in two ways: "alone" from a synchronised start to a synchronised end, the median of
the rounds; "in a row" as the mean over steps that nobody waits between. Rows are appended to
results.csv; old rows stay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import _rows
import torch
from torch import Tensor

from gradscale.torch import GradScaler, optim

Shapes = list[tuple[int, ...]]


def gpt2(layers: int, width: int) -> Shapes:
    """The parameters of a GPT-2."""
    w = width
    block = [(w,), (w,), (w, 3 * w), (3 * w,), (w, w), (w,), (w,), (w,), (w, 4 * w), (4 * w,)]
    return [(50257, w), (1024, w), *[*block, (4 * w, w), (w,)] * layers, (w,), (w,)]


def resnet50() -> Shapes:
    """The parameters of a ResNet-50."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, size in ((width, inputs, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, size, size), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


MODELS = {"GPT-2 XL": gpt2(48, 1600), "GPT-2 small": gpt2(12, 768), "ResNet-50": resnet50()}


class Case:
    """One way to step."""

    def __init__(self, name: str, params: list[Tensor], grads: list[Tensor]) -> None:
        self.name, self.params, self.grads = name, params, grads
        ours = name.startswith("ours")
        self.scaler = GradScaler("cuda") if ours else torch.amp.GradScaler("cuda")
        self.optimizer: torch.optim.Optimizer
        if name == "ours":
            self.optimizer = optim.AdamW(params, lr=1e-6)
        else:
            fused = None if "foreach" in name else True
            self.optimizer = torch.optim.AdamW(params, lr=1e-6, fused=fused)
        self.loss = torch.ones((), device="cuda", requires_grad=True)

    def before(self) -> None:
        """What the backward pass would leave."""
        self.scaler.scale(self.loss * 1.0).backward()
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad

    def after(self) -> None:
        """Everything up to the next forward pass."""
        if isinstance(self.scaler, GradScaler):
            self.scaler.apply(self.optimizer, clip_norm=1e9)
            return
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1e9)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def alone(do: Callable[[], None], before: Callable[[], None], rounds: int) -> float:
    """Milliseconds from a synchronised start to a synchronised end."""
    taken = []
    for _ in range(rounds + 3):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        do()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[3:])


def in_a_row(case: Case, rounds: int) -> float:
    """Milliseconds per step, less what it takes to lay out the gradients."""

    def run(do: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            case.before()
            do()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / rounds

    run(case.after)
    return run(case.after) - run(lambda: None)


def copy_speed() -> float:
    """Bytes per millisecond that a copy reads and writes."""
    source = torch.ones(2**28, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.nbytes / alone(copy, lambda: None, 10)


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--results", type=Path, default=_rows.RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device; nothing was measured")
        return
    speed = copy_speed()
    rows = []
    for model in options.models:
        shapes = MODELS[model]
        params = [torch.nn.Parameter(torch.randn(s, device="cuda") * 0.02) for s in shapes]
        grads = [torch.randn(s, device="cuda") for s in shapes]
        count = sum(param.numel() for param in params)
        floor = 32 * count / speed
        found: dict[str, tuple[float, float]] = {}
        for name in ("torch", "torch, foreach", "ours, torch's AdamW", "ours"):
            case = Case(name, params, grads)
            found[name] = (
                alone(case.after, case.before, options.rounds), in_a_row(case, options.rounds)
            )  # fmt: skip
            del case
        found["floor"] = (floor, floor)
        for name, times in found.items():
            ways = zip(("alone", "in a row"), times, found["torch"], strict=True)
            for way, taken, torchs in ways:
                case_name = f"{model}, {name}, {way}"
                given = ("cuda", params, options.rounds, taken, torchs / taken)
                rows.append(_rows.row("step", case_name, *given))
        del params, grads
    _rows.add(rows, options.results)


if __name__ == "__main__":
    main()
