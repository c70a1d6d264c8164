"""Sharded parameters (FSDP2): one rank has an infinity in its shard, and all ranks skip the step.

torchrun --nproc-per-node 2 examples/fsdp2.py    # or plain python, which starts two ranks
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradscale as gs
from gradscale.torch import GradScaler
from gradscale.torch.optim import AdamW

STEPS = 30


def train(mesh: DeviceMesh) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).to(mesh.device_type)
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=half)
    optimizer = AdamW(model.parameters(), lr=1e-2)  # steps the shards of this rank
    # The meshes of the gradients determine which ranks must agree.
    scaler = GradScaler(mesh.device_type, policy=gs.Headroom())

    torch.manual_seed(rank)
    applied, norms = [], []
    for step in range(STEPS):
        inputs = torch.randn(32, 8, device=mesh.device_type)
        outputs = model(inputs).float()
        loss = nn.functional.mse_loss(outputs, inputs.sum(1, keepdim=True))
        scaler.backward(loss)
        if step == 10 and rank == 1:
            shard: Any = next(model.parameters()).grad
            shard.to_local().fill_(math.inf)
        outcome = scaler.apply(optimizer, clip_norm=1.0)  # the norm of all shards
        applied.append(bool(outcome.applied))
        norms.append(float(outcome.grad_norm))  # type: ignore[arg-type]

    found: list[Any] = [None] * world
    dist.all_gather_object(found, (applied, norms[:10], scaler.get_scale()))
    if any(each != found[0] for each in found):
        raise SystemExit("The ranks have different results.")
    if applied != [step != 10 for step in range(STEPS)]:
        raise SystemExit("Step 10, and no other step, should have been skipped.")
    if rank == 0:
        print(f"{world} ranks, step 10 skipped by all of them, loss {loss.item():.3f}")


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    # A separate function: when it returns, only torch refers to the group, so destroying the group
    # ends gloo's threads. A thread that runs when the interpreter exits can abort the process.
    train(init_device_mesh("cuda" if cuda else "cpu", (world,)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([sys.executable, *launch, __file__]).returncode)
