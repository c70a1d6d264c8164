"""What the drop-in scaler costs: torch's loop with torch's scaler, with ours, with our clipping.

A stack of linear layers is trained with fused AdamW and clipping by norm:

    torch           unscale_, torch's clip_grad_norm_, step, update, torch.amp.GradScaler
    drop-in         the same calls, gradscale.torch.GradScaler
    clip_grad_norm_ scaler.clip_grad_norm_, step, update

Each is timed twice over: "after backward" is those calls alone, "loop" the whole iteration. The
three take turns in one process, and a ratio is the median over rounds of time(torch) / time(ours):
times on a shared CPU mean nothing, their ratio in one round does. Rows are appended to
results.csv; old rows stay.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product

import _rows
import torch

from gradscale.torch import GradScaler

WIDTH = 1024


class Case:
    """One way to step, with a model of its own."""

    def __init__(self, name: str, scaler: torch.amp.GradScaler, layers: int, device: str) -> None:
        self.name = name
        self.scaler = scaler
        self.device = device
        torch.manual_seed(0)
        stack = [torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(layers)]
        self.model = torch.nn.Sequential(*stack)
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-5, fused=True)
        self.inputs = torch.randn(64, WIDTH, device=device)
        self.times: dict[str, list[float]] = {"after backward": [], "loop": []}

    def after_backward(self) -> None:
        """Unscales, clips, steps and updates."""
        if self.name == "clip_grad_norm_":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        else:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def iterate(self) -> None:
        """One iteration, timed."""
        start = self.now()
        self.scaler.scale(self.model(self.inputs).square().mean()).backward()
        middle = self.now()
        self.after_backward()
        end = self.now()
        self.optimizer.zero_grad()
        self.times["after backward"].append((end - middle) * 1e3)
        self.times["loop"].append((self.now() - start) * 1e3)

    def now(self) -> float:
        """Seconds, when the device has done its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """Measures, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-save", action="store_true", help="do not write results.csv")
    options = parser.parse_args()
    device, layers = options.device, max(1, round(options.millions * 1e6 / WIDTH**2))

    theirs = Case("torch", torch.amp.GradScaler(device), layers, device)
    ours = [
        Case(name, GradScaler(device), layers, device) for name in ("drop-in", "clip_grad_norm_")
    ]
    cases = [theirs, *ours]
    for round_ in range(options.rounds + 2):
        for case in cases[:: 1 if round_ % 2 else -1]:  # nobody always comes first
            case.iterate()

    rows = []
    for case, part in product(cases, theirs.times):
        taken, torchs = case.times[part][2:], theirs.times[part][2:]  # two to warm up
        ratio = statistics.median(a / b for a, b in zip(torchs, taken, strict=True))
        given = (device, theirs.params, options.rounds, statistics.median(taken), ratio)
        rows.append(_rows.row("drop_in", f"{case.name}, {part}", *given))
    if not options.no_save:
        _rows.add(rows)


if __name__ == "__main__":
    main()
