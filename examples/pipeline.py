"""Pipeline parallel: the last stage scales the loss, and all stages skip the same steps.

torchrun --nproc-per-node 2 examples/pipeline.py # or plain python, which starts two ranks
"""

from __future__ import annotations

import math
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import gradscale as gs
from gradscale.torch import GradScaler, Shards

STEPS = 30


class Half(nn.Module):
    """A stage that computes in float16 and returns float32."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.float16):
            outputs: Tensor = self.layers(x).float()
        return outputs


def train(cuda: bool) -> None:
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(rank)
    layers = [nn.Linear(8, 32), nn.GELU()] if rank == 0 else [nn.Linear(32, 1)]
    stage = Half(*layers).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2, fused=True)
    # Stages hold different parameters in plain tensors, which the scaler cannot detect.
    scaler = GradScaler(device.type, policy=gs.Headroom(), groups=Shards(dist.group.WORLD))
    losses: list[Tensor] = []

    def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Called for every micro-batch, on the last stage only."""
        loss = nn.functional.mse_loss(outputs, targets)
        losses.append(loss.detach())
        scaled: Tensor = scaler.scale(loss)
        return scaled

    place = PipelineStage(stage, rank, 2, device)
    schedule = ScheduleGPipe(place, n_microbatches=4, loss_fn=scaled_loss)
    inputs = torch.randn(STEPS, 32, 8, generator=torch.Generator().manual_seed(1)).to(device)
    applied = []
    for step in range(STEPS):
        if rank == 0:
            schedule.step(inputs[step])
        else:
            schedule.step(target=inputs[step].sum(1, keepdim=True))
        if step == 10 and rank == 0:
            for param in stage.parameters():
                torch.nn.init.constant_(param.grad, math.inf)  # type: ignore[arg-type]
        applied.append(bool(scaler.apply(optimizer, clip_norm=1.0).applied))

    found: list[object] = [None, None]
    dist.all_gather_object(found, (applied, scaler.get_scale()))
    if found[0] != found[1]:
        raise SystemExit("The stages have different results.")
    if applied != [step != 10 for step in range(STEPS)]:
        raise SystemExit("Step 10, and no other step, should have been skipped.")
    if rank == 1:
        print(f"2 stages, step 10 skipped by both, loss {torch.stack(losses[-4:]).mean():.3f}")


def main() -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= 2
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
