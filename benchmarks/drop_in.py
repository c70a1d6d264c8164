"""What the drop-in scaler costs: torch's loop with torch's scaler, with ours, with our clipping.

Between the backward pass and the next forward pass, with fused AdamW and clipping by norm:

    torch           unscale_, torch's clip_grad_norm_, step, update, torch.amp.GradScaler
    drop-in         the same calls, gradscale.torch.GradScaler
    clip_grad_norm_ scaler.clip_grad_norm_, step, update

The three take turns in one process, each round with fresh gradients, and a ratio is the median over
rounds of time(torch) / time(ours): times on a shared CPU mean nothing, their ratio in one round
does. Rows are appended to results.csv; old rows stay.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradscale
from gradscale.torch import GradScaler

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = [
    "date", "benchmark", "case", "device", "threads", "python", "torch", "gradscale",
    "parameters", "tensors", "rounds", "median_ms", "speedup_over_torch",
]  # fmt: skip


def shapes(millions: int) -> list[tuple[int, ...]]:
    """About `millions` of parameters as a transformer has them: large matrices, small vectors."""
    layer = [(1024, 1024)] * 4 + [(1024,)] * 4
    return layer * max(1, round(millions * 1e6 / sum(torch.Size(s).numel() for s in layer)))


class Case:
    """One way to step, with parameters of its own."""

    def __init__(self, scaler: torch.amp.GradScaler, sizes: list[tuple[int, ...]], device: str):
        self.scaler = scaler
        self.params = [torch.nn.Parameter(torch.randn(s, device=device) * 0.02) for s in sizes]
        self.optimizer = torch.optim.AdamW(self.params, fused=True)
        self.loss = torch.ones((), device=device)
        for param in self.params:
            param.grad = torch.empty_like(param)

    def refill(self) -> None:
        """New gradients, as a backward pass would leave them."""
        for param in self.params:
            param.grad.normal_()
        self.scaler.scale(self.loss)

    def torchs_loop(self) -> None:
        """torch's calls in torch's order."""
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def our_clipping(self) -> None:
        """Unscaling and clipping in one call."""
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-save", action="store_true", help="leave results.csv alone")
    options = parser.parse_args()
    device, sizes = options.device, shapes(options.millions)

    theirs = Case(torch.amp.GradScaler(device), sizes, device)
    ours = Case(GradScaler(device), sizes, device)
    fused = Case(GradScaler(device), sizes, device)
    runs: dict[str, tuple[Case, Callable[[], None]]] = {
        "torch": (theirs, theirs.torchs_loop),
        "drop-in": (ours, ours.torchs_loop),
        "clip_grad_norm_": (fused, fused.our_clipping),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(options.rounds + 2):  # two to warm up
        for name in sorted(runs, reverse=bool(round_ % 2)):  # nobody always comes first
            case, run = runs[name]
            case.refill()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_ > 1:
                times[name].append((time.perf_counter() - start) * 1e3)

    rows = []
    count = sum(torch.Size(size).numel() for size in sizes)
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine() + " CPU"
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(times["torch"], taken, strict=True)]
        values = [
            datetime.date.today().isoformat(), "drop_in", name, where, torch.get_num_threads(),
            platform.python_version(), torch.__version__, gradscale.__version__,
            count, len(sizes), options.rounds,
            f"{statistics.median(taken):.3f}", f"{statistics.median(ratios):.3f}",
        ]  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        print(f"{name:16} {rows[-1]['median_ms']:>9} ms   {rows[-1]['speedup_over_torch']}x torch")
    if not options.no_save:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
