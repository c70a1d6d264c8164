"""On several ranks: gradients are counted as optimizers see them, and this rank's part of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradscale.policy import Static
from gradscale.torch import GradScaler, Inspector
from gradscale.torch.grads.dtensor import local
from ranks import everyone, on_ranks, run_check


def check_counts(kind: str) -> None:
    """Raises if counts are not those of the gradients that are there after the pass."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from sharded_names import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", policy=Static(init_scale=8.0))
    inspector = Inspector(model, scaler, every=1)
    # Some units of the first layer are dead on rank 1 alone: zeros that an average does not have.
    x = torch.randn(16, 8) * 0.5 ** dist.get_rank()
    x[:, 4:] *= 1 - dist.get_rank()
    scaler.scale(model(x).square().mean()).backward()
    inner = model.module if kind == "DDP" else model
    true = {name: local(param.grad).clone() for name, param in inner.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    (sample,) = inspector.samples
    found = {t.name: (t.numel, t.zeros, t.high()) for t in sample.of("weight_grad")}
    for name, grad in true.items():
        high = int(torch.frexp(grad.abs().max())[1]) - 1
        assert found[name] == (grad.numel(), int((grad == 0).sum()), high), name
    if kind == "DDP":
        counts = [t for t in sample.tensors if t.kind == "weight_grad"]
        assert all(each == counts for each in everyone(counts))


def check_ddp() -> None:
    check_counts("DDP")


def check_fsdp2() -> None:
    check_counts("FSDP2")


@pytest.mark.parametrize(("check", "world"), on_ranks(2, "ddp fsdp2"))
def test_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
