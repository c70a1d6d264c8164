"""A run that is killed and resumed ends bit for bit where an uninterrupted run ends.

A child process trains and is killed with SIGKILL at whatever moment that catches it. The run then
goes on from the last checkpoint, which is whole at any time: it is written beside the old one and
takes its place in a single step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler

STEPS = 400
SAVE_EVERY = 20


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def train(path: Path) -> None:
    """To the end, from the checkpoint at `path` if there is one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    # A short interval, so that the scale grows until steps overflow and are skipped.
    scaler = GradScaler(device, growth_interval=25)
    scaler.follow(scheduler)
    data = torch.Generator().manual_seed(1)
    parts: dict[str, Any] = {"net": net, "optimizer": optimizer}
    parts |= {"scheduler": scheduler, "scaler": scaler}

    start = 0
    if path.exists():
        checkpoint = torch.load(path, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(checkpoint[name])
        data.set_state(checkpoint["data"].cpu())
        start = checkpoint["step"]

    for step in range(start, STEPS):
        inputs = torch.randn(64, 8, generator=data).to(device)
        with torch.autocast(device, dtype=torch.float16):
            outputs = net(inputs)
        loss = nn.functional.mse_loss(outputs.float(), inputs.sum(dim=1, keepdim=True))
        scaler.backward(loss)
        scaler.apply(optimizer, clip_norm=1.0)

        if (step + 1) % SAVE_EVERY == 0:
            scaler.flush()  # first let the scheduler catch up with the last step
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            save(path, {**checkpoint, "data": data.get_state(), "step": step + 1})


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
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
            raise SystemExit("The child came to its end before it was killed.")
        print(f"killed when {torch.load(broken)['step']} of {STEPS} steps were saved")
        train(broken)
        if not same(torch.load(whole), torch.load(broken)):
            raise SystemExit("The two runs differ.")
    print("resumed: parameters, optimizer, scheduler, scaler and data are equal, bit for bit")


if __name__ == "__main__":
    main()
