"""MixedPrecision of a model that FSDP2 shards: all ranks decide alike, and it trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

from gradscale.torch import MixedPrecision
from ranks import everyone, run_check
from sharded_names import MixedPrecisionPolicy, fully_shard

STEPS, BAD_LOSS, OVERFLOW = 8, 4, 6


def sharded(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def batch(step: int) -> Tensor:
    """What this rank trains on."""
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def loss_of(model: Any, x: Tensor, overflow: bool = False) -> Tensor:
    outputs = model(x)
    if overflow:
        outputs.register_hook(lambda grad: grad * math.inf)
    return (outputs.float() - x.sum(1, keepdim=True)).square().mean()


def check_modes() -> None:
    """Raises if a NaN loss of rank 1 or an overflow of rank 0 is not found by both ranks."""
    rank = dist.get_rank()
    for mode, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model = sharded(dtype)
        optimizer = optim.AdamW(model.parameters(), lr=5e-2)
        mp = MixedPrecision(model, optimizer, mode)
        first = loss_of(model, batch(0)).item()
        found = []
        for step in range(STEPS):
            with mp.autocast():
                loss = loss_of(model, batch(step), (step, rank) == (OVERFLOW, 0))
            mp.backward(loss * math.nan if (step, rank) == (BAD_LOSS, 1) else loss)
            outcome = mp.step(clip_norm=1.0)
            found.append((outcome.verdict(), str(float(outcome.grad_norm)), mp.scaler.get_scale()))
        assert all(each == found for each in everyone(found))
        verdicts = [verdict for verdict, _, _ in found]
        assert verdicts[BAD_LOSS] == "loss not finite"
        assert [*verdicts[:BAD_LOSS], *verdicts[BAD_LOSS + 1 : OVERFLOW]] == ["applied"] * 5
        assert verdicts[OVERFLOW] != "applied"
        assert verdicts[-1] == "applied"
        assert loss_of(model, batch(0)).item() < 0.8 * first


def test_both_ranks_of_a_sharded_model_decide_alike(tmp_path: Path) -> None:
    run_check(__file__, "modes", 2, tmp_path)
