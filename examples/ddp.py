"""Data parallel (DDP): all ranks skip the same step, also if only one of them overflows.

torchrun --nproc-per-node 2 examples/ddp.py      # or plain python, which starts two ranks
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import MixedPrecision

STEPS = 30


def train(cuda: bool) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    mp = MixedPrecision(model, optimizer, "fp16")  # finds the ranks that must agree from DDP

    torch.manual_seed(rank)
    applied = []
    for step in range(STEPS):
        inputs = torch.randn(32, 8, device=device)
        with mp.autocast():
            loss = nn.functional.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True))
        mp.backward(loss)
        if step == 10 and rank == 1:  # an overflow after the reduction of DDP
            for param in net.parameters():
                torch.nn.init.constant_(param.grad, math.inf)  # type: ignore[arg-type]
        outcome = mp.step(clip_norm=1.0)
        applied.append(bool(outcome.applied))

    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    ours = torch.cat([weights, torch.tensor([mp.scaler.get_scale()], device=device)])
    everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, ours)
    if not all(torch.equal(each, ours) for each in everyone):
        raise SystemExit("The ranks have different results.")
    if applied != [step != 10 for step in range(STEPS)]:
        raise SystemExit("Step 10, and no other step, should have been skipped.")
    if rank == 0:
        print(f"{len(everyone)} ranks, step 10 skipped by all of them, loss {loss.item():.3f}")


def main() -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if cuda else "gloo")
    # A separate function: when it returns, only torch refers to the group, so destroying the group
    # ends gloo's threads. A thread that runs when the interpreter exits can abort the process.
    train(cuda)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([sys.executable, *launch, __file__]).returncode)
