"""Ranks on a GPU: one by NCCL, which takes all the paths of many, and two that share the GPU.

A group of one rank has nobody to agree with, so here it is told that it has.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.device_mesh import init_device_mesh

import gradscale as gs
from gradscale.torch import GradScaler
from gradscale.torch.distributed import groups as agree
from gradscale.torch.optim import SGD, AdamW
from ranks import be_a_rank, everyone, run_check
from sharded_names import CPUOffloadPolicy, fully_shard
from shared_models import (
    OPTIMIZERS,
    Setup,
    batch,
    by_torchs_name,
    ddp,
    fsdp1,
    fsdp2,
    given,
    half,
    loss_of,
    net,
)

pytestmark = pytest.mark.gpu
POLICIES: list[Callable[[], Any]] = [
    lambda: gs.Dynamic(init_scale=2.0**8, growth_interval=2),
    gs.Headroom,
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises if the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def scaler_for(setup: Setup, policy: Any) -> GradScaler:
    if setup.scaler is not None:
        return setup.scaler("cuda", policy=policy)
    scaler = GradScaler("cuda", policy=policy, groups=setup.groups)
    if setup.named is not None:
        scaler.name(setup.named)
    return scaler


def check_nccl() -> None:
    """Raises if a step that asks other ranks is not the step of one that does not, or waits."""
    agree.ALONE = 0
    for make_setup in (ddp, given, fsdp2, fsdp1, by_torchs_name):
        for kind, make in OPTIMIZERS.items():
            for policy in POLICIES:
                for way in ("apply", "step"):
                    setup, twin = make_setup(), net()
                    optimizer, other = make(setup.params), make(twin.parameters())
                    scaler = scaler_for(setup, policy())
                    lone = GradScaler("cuda", policy=policy(), groups=None)
                    for step in range(8):
                        loss, same = loss_of(setup.call, batch(step)), loss_of(twin, batch(step))
                        scaler.backward(loss)
                        lone.backward(same)
                        if step == 3:
                            setup.params[0].grad.fill_(math.inf)
                            twin.wide.weight.grad.fill_(math.inf)
                        quiet = kind != "foreach" and step > 1 and make_setup is not fsdp1
                        with no_waiting() if quiet else warnings.catch_warnings():
                            take(scaler, optimizer, way)
                        take(lone, other, way)
                        assert bool(scaler.outcome().applied) == (step != 3)
                        assert scaler.get_scale() == lone.get_scale()
                    case = f"{make_setup.__name__}, {kind}, {way}"
                    for param, expected in zip(setup.weights(), twin.parameters(), strict=True):
                        # Norms in another order may clip by another rounding, in each of 7 steps.
                        bound = 7 * 2**-20 * expected.abs().max().clamp(min=0.1)
                        assert (param - expected).abs().max() <= bound, case


def take(scaler: GradScaler, optimizer: optim.Optimizer, way: str) -> None:
    """Everything after the backward pass."""
    if way == "apply":
        scaler.apply(optimizer, clip_norm=0.3)
    else:
        scaler.clip_grad_norm_(optimizer, 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def check_half() -> None:
    """Raises if FSDP2 with float16 passes does not train by our optimizers on shards."""
    agree.ALONE = 0
    for make in (lambda p: AdamW(p, lr=0.01), lambda p: SGD(p, lr=0.05, momentum=0.9)):
        model = net()
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)), mp_policy=half())
        optimizer: Any = make(model.parameters())
        scaler = GradScaler("cuda", policy=gs.Headroom())
        losses = []
        for step in range(60):
            loss = loss_of(model, batch(step % 4))
            scaler.backward(loss)
            scaler.apply(optimizer, clip_norm=1.0)
            losses.append(loss.item())
        assert optimizer._fused._launch_plan is not None
        assert sum(losses[-4:]) < 0.7 * sum(losses[:4]), (losses[:4], losses[-4:])


def check_offload() -> None:
    """Raises if gradients that are on the CPU by the time of the step are not agreed on."""
    agree.ALONE = 0
    for kind, make in OPTIMIZERS.items():
        for device in ("cuda", "cpu"):
            model, twin = net(), net().cpu()
            mesh = init_device_mesh("cuda", (1,))
            fully_shard(model.wide, mesh=mesh, offload_policy=CPUOffloadPolicy())
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
            optimizer, other = make(model.parameters()), make(twin.parameters())
            scaler, lone = GradScaler(device, init_scale=2.0**8), GradScaler("cpu", groups=None)
            for step in range(4):
                scaler.backward(loss_of(model, batch(step)))
                lone.backward(loss_of(twin, batch(step).cpu()))
                if step == 2:
                    next(model.parameters()).grad.fill_(math.inf)
                    next(twin.parameters()).grad.fill_(math.inf)
                outcome, expected = scaler.apply(optimizer), lone.apply(other)
                assert bool(outcome.applied) == bool(expected.applied) == (step != 2), kind
            for param, whole in zip(model.parameters(), twin.parameters(), strict=True):
                assert param.device.type == "cpu"
                # A GPU and a CPU add up in another order: 32 roundings, divided by eps 0.1.
                far = (param.full_tensor() - whole).abs().max().item()
                assert far <= 3 * 32 * 2**-23, (kind, device, tuple(whole.shape), far)


def check_graph() -> None:
    """Raises if a captured step does not ask and move the scale in every replay."""
    agree.ALONE = 0
    model, twin = net(), net()
    optimizer, other = AdamW(model.parameters(), lr=0.01), AdamW(twin.parameters(), lr=0.01)
    scaler = GradScaler("cuda", init_scale=2.0**8, growth_interval=2, groups=dist.group.WORLD)
    lone = GradScaler("cuda", init_scale=2.0**8, growth_interval=2, groups=None)
    x = batch(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            scaler.backward(loss_of(model, x))
            scaler.apply(optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.backward(loss_of(model, x))
        scaler.apply(optimizer)
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        lone.backward(loss_of(twin, x))
        lone.apply(other)
    assert scaler.get_scale() == lone.get_scale() == 2.0**11
    for param, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert (param - expected).abs().max() <= 7 * 2**-20


def check_devices() -> None:
    """Raises if parameters on a CPU and a GPU are not one step, of two ranks."""
    rank = dist.get_rank()
    for make in (lambda p: optim.SGD(p, lr=0.1), lambda p: optim.AdamW(p, fused=False)):
        first, last = net(), net().cpu()
        params = [*first.parameters(), *last.parameters()]
        optimizer = make(params)
        scaler = GradScaler("cuda", init_scale=2.0**8, groups=dist.group.WORLD)
        for step in range(4):
            x = batch(step)
            scaler.backward((last(first(x).cpu()) - x.cpu()).square().mean())
            for param in params:
                dist.all_reduce(param.grad)
            if step == 1 and rank == 1:
                last.wide.bias.grad.fill_(math.inf)
            if step == 2 and rank == 0:
                first.wide.bias.grad.fill_(math.nan)
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in params)) / 2.0**8
            outcome = scaler.apply(optimizer)
            told = everyone((bool(outcome.applied), scaler.get_scale(), float(outcome.grad_norm)))
            assert told[0][:2] == told[1][:2]
            assert told[0][0] == (step not in (1, 2))
            if step == 0:
                assert math.isclose(told[0][2], norm, rel_tol=2**-16)


@pytest.mark.parametrize("check", ["nccl", "half", "offload", "graph"])
def test_one_rank_by_nccl(check: str, tmp_path: Path) -> None:
    run_check(__file__, check, 1, tmp_path, RANKS_DEVICE="cuda", RANKS_BACKEND="nccl")


def test_two_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    run_check(__file__, "devices", 2, tmp_path, RANKS_DEVICE="cuda")


if __name__ == "__main__":
    be_a_rank(globals())
