"""Whole iterations: what changes when only the import changes, and with the other ways to step.

Three models: a perceptron of 40 small tensors, where the host decides; a ResNet-50 (needs timm),
and a GPT-2 small. Every case has a model of its own, the same batch, clipping by norm and AdamW:

    bfloat16, no scaler          torch's fused AdamW
    torch's scaler               scale, unscale_, clip_grad_norm_, step, update; torch's fused AdamW
    drop-in                      the same calls of gradscale's scaler
    drop-in, headroom            the same with the policy Headroom
    apply                        backward, apply; torch's fused AdamW
    apply, our AdamW             the same with gradscale.torch.optim.AdamW
    fp16-master                  MixedPrecision in that mode, with our AdamW

A repeat is `--steps` iterations between two synchronisations; the cases take turns. A row of
results.csv has the median of the repeats and its ratio to torch's scaler, two more the fastest and
the slowest repeat. `--tiny` takes very small models on the CPU, to see that everything runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _rows
import end_to_end
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscale.torch import GradScaler, MixedPrecision, optim

LR, MAX_NORM, WARM_UP = 1e-4, 1.0, 8
BASE = "torch's scaler"
Loss = Callable[[], Tensor]


class Task(NamedTuple):
    """A model, and the loss of a batch that stays the same."""

    model: nn.Module
    loss: Loss


def perceptron(device: str, tiny: bool) -> Task:
    """20 linear layers, which are 40 tensors."""
    width = 8 if tiny else 256
    layers = [layer for _ in range(19) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10)).to(device)
    x = torch.randn(64, width, device=device)
    y = torch.randint(10, (64,), device=device)
    return Task(model, lambda: functional.cross_entropy(model(x).float(), y))


def resnet(device: str, tiny: bool) -> Task:
    """A ResNet-50 on 64 images."""
    import timm

    count, size = (2, 32) if tiny else (64, 224)
    model = timm.create_model("resnet50").to(device, memory_format=torch.channels_last)
    x = torch.randn(count, 3, size, size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (count,), device=device)
    return Task(model, lambda: functional.cross_entropy(model(x).float(), y))


def gpt(device: str, tiny: bool) -> Task:
    """A GPT-2 small on eight texts of 1,024 tokens."""
    size = end_to_end.TINY if tiny else end_to_end.SMALL
    model = end_to_end.GPT(size).to(device)
    text = torch.randint(size.words, (8, size.length + 1), device=device)
    return Task(model, lambda: model(text))


MODELS = {"MLP": perceptron, "ResNet-50": resnet, "GPT-2 small": gpt}


def without_scaler(task: Task, device: str) -> Callable[[], object]:
    """An iteration in bfloat16."""
    params = list(task.model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)

    def iterate() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = task.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return iterate


def torchs_loop(scaler: Any, task: Task, device: str) -> Callable[[], object]:
    """An iteration with the calls of torch's scaler."""
    params = list(task.model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)

    def iterate() -> None:
        with torch.autocast(device, dtype=torch.float16):
            loss = task.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return iterate


def two_calls(optimizer: Any, task: Task, device: str) -> Callable[[], object]:
    """An iteration by `backward` and `apply`."""
    scaler = GradScaler(device)

    def iterate() -> None:
        with torch.autocast(device, dtype=torch.float16):
            loss = task.loss()
        scaler.backward(loss)
        scaler.apply(optimizer, clip_norm=MAX_NORM)

    return iterate


def masters(task: Task, device: str) -> Callable[[], object]:
    """An iteration with float16 weights."""
    mp = MixedPrecision(task.model, optim.AdamW(task.model.parameters(), lr=LR), "fp16-master")

    def iterate() -> None:
        with mp.autocast():
            loss = task.loss()
        mp.backward(loss)
        mp.step(clip_norm=MAX_NORM)

    return iterate


def fused(task: Task) -> torch.optim.Optimizer:
    """torch's AdamW."""
    return torch.optim.AdamW(task.model.parameters(), lr=LR, fused=True)


CASES: dict[str, Callable[[Task, str], Callable[[], object]]] = {
    "bfloat16, no scaler": without_scaler,
    BASE: lambda task, device: torchs_loop(torch.amp.GradScaler(device), task, device),
    "drop-in": lambda task, device: torchs_loop(GradScaler(device), task, device),
    "drop-in, headroom": lambda task, device: torchs_loop(
        GradScaler(device, policy="headroom"), task, device
    ),
    "apply": lambda task, device: two_calls(fused(task), task, device),
    "apply, our AdamW": lambda task, device: two_calls(
        optim.AdamW(task.model.parameters(), lr=LR), task, device
    ),
    "fp16-master": masters,
}


def taken(iterate: Callable[[], object], steps: int, device: str) -> float:
    """Milliseconds per iteration, over so many between two synchronisations."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        iterate()
    synchronize()
    return (time.perf_counter() - start) * 1e3 / steps


def measure(model: str, device: str, tiny: bool, steps: int, repeats: int) -> list[_rows.Row]:
    """The rows of all cases of a model."""
    iterations, params = {}, []
    for name, case in CASES.items():
        torch.manual_seed(0)
        task = MODELS[model](device, tiny)
        params = list(task.model.parameters())
        iterations[name] = case(task, device)
        taken(iterations[name], WARM_UP, device)
    times: dict[str, list[float]] = {name: [] for name in iterations}
    for _ in range(repeats):
        for name, iterate in iterations.items():
            times[name].append(taken(iterate, steps, device))
    base = statistics.median(times[BASE])
    return [
        _rows.row("iterations", f"{model}, {name}{which}", device, params, steps, ms, base / ms)
        for name in times
        for which, ms in (
            ("", statistics.median(times[name])),
            (", fastest repeat", min(times[name])),
            (", slowest repeat", max(times[name])),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="iterations in a repeat")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--results", type=Path, help="the table; results.csv unless tiny")
    options = parser.parse_args(arguments)
    device = "cpu" if options.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was measured")
        return
    results = options.results or (None if options.tiny else _rows.RESULTS)
    for model in options.models:
        rows = measure(model, device, options.tiny, options.steps, options.repeats)
        if results is not None:
            _rows.add(rows, results)


if __name__ == "__main__":
    main()
