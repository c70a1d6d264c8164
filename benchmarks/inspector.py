"""What looking costs: GPT-2 small with a scaler, with the run log too, and with an Inspector too.

    python benchmarks/inspector.py           # four minutes on an H200
    python benchmarks/inspector.py --tiny    # a small model on the CPU

Iterations are timed in rounds of 100, so that each round with an Inspector(every=100) has one
sampled iteration; the cases take turns. Printed are medians, the ratio to the scaler alone, and how
long a sampled iteration takes, alone. Targets: log 1.003, inspector 1.010, sampled iteration 2.0.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from end_to_end import BATCHES, GPT, MAX_NORM, SMALL, TINY, Size

from gradscale.torch import GradScaler, Inspector
from gradscale.torch.optim import AdamW

EVERY = 100
CASES = ("scaler", "log", "inspector", "log and inspector")


class Training:
    """A model of its own, trained in one of the cases."""

    def __init__(
        self, case: str, size: Size, device: str, texts: torch.Tensor, folder: str
    ) -> None:
        torch.manual_seed(0)
        self.device, self.texts = device, texts
        self.model = GPT(size).to(device)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = GradScaler(device)
        self.inspector: Any = None
        if "log" in case:
            self.scaler.log_to(f"{folder}/{case.replace(' ', '-')}")
        if "inspector" in case:
            self.inspector = Inspector(self.model, self.scaler, every=EVERY)

    def step(self, number: int) -> None:
        """One iteration."""
        with torch.autocast(self.device, dtype=torch.float16):
            loss = self.model(self.texts[number % BATCHES])
        self.scaler.backward(loss)
        self.scaler.apply(self.optimizer, clip_norm=MAX_NORM)

    def now(self) -> float:
        """Seconds, when the device has done its work; on the CPU those of this process."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def run(self, steps: int) -> float:
        """Milliseconds per iteration."""
        start = self.now()
        for number in range(steps):
            self.step(number)
        return (self.now() - start) * 1e3 / steps


def sampled(training: Training, rounds: int) -> tuple[float, float]:
    """Milliseconds of a sampled and of an ordinary iteration: of rows in which every second is."""
    training.inspector.close()
    taken: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        ordinary = training.run(10)
        with Inspector(training.model, training.scaler, every=2):
            half = training.run(10)
        if number:
            taken[0].append(2 * half - ordinary)
            taken[1].append(ordinary)
    return statistics.median(taken[0]), statistics.median(taken[1])


def peak(training: Training, every: int) -> float:
    """MiB of the device's memory that iterations take at most."""
    with Inspector(training.model, training.scaler, every=every):
        training.run(2)
        torch.cuda.reset_peak_memory_stats()
        training.run(2)
    return torch.cuda.max_memory_allocated() / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16, help="texts per batch")
    parser.add_argument("--steps", type=int, default=EVERY, help="iterations per round")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    options = parser.parse_args(arguments)
    device, size = ("cpu", TINY) if options.tiny else ("cuda", SMALL)
    if device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was measured")
        return
    torch.manual_seed(0)
    texts = torch.randint(size.words, (BATCHES, options.batch, size.length + 1), device=device)
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        trainings = {case: Training(case, size, device, texts, folder) for case in CASES}
        for number in range(options.rounds + 1):
            for case, training in trainings.items():
                time_of = training.run(options.steps)
                if number:  # the first is to warm up
                    taken[case].append(time_of)
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        print(f"{name}, torch {torch.__version__}, {options.rounds} rounds of {options.steps}")
        base = statistics.median(taken["scaler"])
        for case, times in taken.items():
            ratios = [mine / ours for mine, ours in zip(times, taken["scaler"], strict=True)]
            median = statistics.median(times)
            print(
                f"{case:18} {median:8.2f} ms, {median / base:.4f}"
                f" of the scaler alone (by round {min(ratios):.4f} to {max(ratios):.4f})",
                flush=True,
            )
        with_sample, without = sampled(trainings["inspector"], options.rounds)
        print(
            f"a sampled iteration {with_sample:.2f} ms, an ordinary one {without:.2f} ms, ratio "
            f"{with_sample / without:.2f}"
        )
        if device == "cuda":
            alone = trainings["inspector"]
            print(f"peak memory {peak(alone, 1):.0f} MiB sampled, {peak(alone, 10**6):.0f} MiB not")
        for training in trainings.values():
            training.scaler.log_to(None)
        findings = trainings["log and inspector"].inspector.findings()
        print(f"findings: {[str(finding) for finding in findings]}")


if __name__ == "__main__":
    main()
