"""A run that is killed and resumed gives bit for bit the results of an uninterrupted run.

A child process trains and is killed with SIGKILL at an arbitrary moment. The run is then resumed
from the last checkpoint, which is always complete: checkpoint.save() writes a new file and then
replaces the old one with it.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradscale as gs
from gradscale.torch import MixedPrecision, checkpoint

STEPS = 300
SAVE_EVERY = 20


def train(path: Path) -> None:
    """Trains to the end, from the checkpoint at `path` if there is one."""
    torch.manual_seed(0)
    random.seed(0)  # its state is also in the checkpoint
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(
        *(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(net.to(device).parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    # A policy that overflows from time to time, so that its state changes.
    mp = MixedPrecision(net, optimizer, "fp16-master", policy=gs.Dynamic(growth_interval=25))
    mp.follow(scheduler)  # its state is saved, too

    start = 0
    if path.exists():
        saved = checkpoint.load(path)
        mp.load_state_dict(saved["mp"])
        checkpoint.set_random_state(saved["random"])
        start = saved["step"]

    for step in range(start, STEPS):
        inputs = torch.randn(64, 8, device=device)
        with mp.autocast():
            loss = nn.functional.mse_loss(net(inputs), inputs.sum(dim=1, keepdim=True))
        mp.backward(loss)
        mp.step(clip_norm=1.0)

        if (step + 1) % SAVE_EVERY == 0:
            random_state = checkpoint.random_state()
            state = {"mp": mp.state_dict(), "random": random_state, "step": step + 1}
            checkpoint.save(path, state)


def same(left: Any, right: Any) -> bool:
    """Whether two checkpoints are equal, bit for bit."""
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder, "whole.pt"), Path(folder, "broken.pt")
        train(whole)
        child = multiprocessing.get_context("spawn").Process(target=train, args=(broken,))
        child.start()
        while child.is_alive() and not broken.exists():
            time.sleep(0.01)
        child.kill()
        child.join()
        if child.exitcode != -signal.SIGKILL:
            raise SystemExit("The child finished before it was killed.")
        print(f"killed when {checkpoint.load(broken)['step']} of {STEPS} steps were saved")

        train(broken)
        left, right = checkpoint.load(whole), checkpoint.load(broken)
        applied = left["mp"]["followed"][0][1]["last_epoch"]
        if not same(left, right):
            raise SystemExit("The two runs differ.")
        if not 0 < applied < STEPS:
            raise SystemExit("Some steps, but not all, should have overflowed.")
    print(f"resumed: after {applied} applied steps everything is equal, bit for bit")


if __name__ == "__main__":
    main()
