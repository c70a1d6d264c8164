"""Ranks decide alike where gradients are accumulated before they are reduced, or are in float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler
from ranks import everyone, run_check
from sharded_names import MixedPrecisionPolicy, fully_shard
from shared_models import BATCH, HOW, OPTIMIZERS, WIDTH, error_of

MICRO, STEPS = 2, 5
FAULTS = ("none", "gradient", "loss")
"""What is not finite on one rank, in a pass that is not reduced."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(MICRO * step + micro)
    return torch.randn(BATCH, WIDTH, generator=generator)


class Setup(NamedTuple):
    """A model on several ranks."""

    call: nn.Module
    params: list[nn.Parameter]
    named: nn.Module | None
    """What must be named to the scaler."""
    unreduced: Callable[[], AbstractContextManager[Any]]
    """A context in which gradients are not reduced."""


def ddp() -> Setup:
    model = net()
    wrapped = DistributedDataParallel(model)
    return Setup(wrapped, list(model.parameters()), wrapped, wrapped.no_sync)


def fsdp2() -> Setup:
    model: Any = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)

    @contextmanager
    def unreduced() -> Any:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return Setup(model, list(model.parameters()), None, unreduced)


def full(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def spoil(grad: Tensor) -> Tensor:
    """`grad` with an infinity, as a backward pass in float16 has it."""
    spoilt = grad.clone()
    spoilt[0, 0] = math.inf
    return spoilt


def loss_of(model: nn.Module, x: Tensor, fault: str = "none") -> Tensor:
    out: Tensor = model(x)
    if fault == "gradient":
        out.register_hook(spoil)
    loss = error_of(out, x) / MICRO
    return loss * math.nan if fault == "loss" else loss


def accumulate(setup: Setup, kind: str, fault: str, way: str) -> tuple[list[bool], list[float]]:
    """Which steps were applied, and the scales after them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = OPTIMIZERS[kind](setup.params)
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    if setup.named is not None:
        scaler.name(setup.named)
    applied, scales = [], []
    for step in range(STEPS):
        for micro in range(MICRO):
            here = fault if (step, micro, rank) == (2, 0, world - 1) else "none"
            with setup.unreduced() if micro < MICRO - 1 else nullcontext():
                mine = batch(step, micro).chunk(world)[rank]
                scaler.backward(loss_of(setup.call, mine, here))
        if way == "apply":
            outcome = scaler.apply(optimizer)
        else:
            scaler.step(optimizer)
            outcome = scaler.outcome(optimizer)
            scaler.update()
            optimizer.zero_grad()
        applied.append(bool(outcome.applied))
        scales.append(scaler.get_scale())
    return applied, scales


def alone(kind: str, skip: set[int]) -> tuple[nn.Module, float]:
    """What one process makes of the same batches: the model, and its largest gradient."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    largest = 0.0
    for step in range(STEPS):
        for micro in range(MICRO):
            loss_of(model, batch(step, micro)).backward()
        grads = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
        largest = max(largest, float(max(grads)))
        if step not in skip:
            optimizer.step()
        optimizer.zero_grad()
    return model, largest


def check_accumulation() -> None:
    """Raises if ranks differ from one another, or from a process that is alone."""
    for make in (ddp, fsdp2):
        for kind in OPTIMIZERS:
            for fault in FAULTS:
                for way in ("apply", "step"):
                    case = f"{make.__name__}, {kind}, {fault}, {way}"
                    setup = make()
                    told = everyone(accumulate(setup, kind, fault, way))
                    assert all(each == told[0] for each in told), f"{case}: {told}"
                    bad = set() if fault == "none" else {2}
                    assert told[0][0] == [step not in bad for step in range(STEPS)], case
                    # Up after two good steps, down after an overflow, and not after a bad loss,
                    # for which no scale is to blame; it does not count as a good one.
                    later = {
                        "none": [2.0**9, 2.0**10, 2.0**10],
                        "gradient": [2.0**8, 2.0**8, 2.0**9],
                        "loss": [2.0**9, 2.0**9, 2.0**10],
                    }
                    assert told[0][1] == [2.0**8, 2.0**9, *later[fault]], f"{case}: {told[0]}"
                    model, largest = alone(kind, bad)
                    # Sums over 16 rows and 8 columns, in another order: at most 32 roundings of
                    # gradients; each step divides by eps at most.
                    error = 32 * torch.finfo(torch.float32).eps * largest
                    bound = STEPS * HOW["lr"] * 2 * error / HOW["eps"]
                    for mine, other in zip(setup.params, model.parameters(), strict=True):
                        assert (full(mine) - other).abs().max() <= bound, case


class Given(nn.Module):
    """A model whose gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def check_reduction() -> None:
    """Raises if an overflow of FSDP2's sum in float16 is not found, or not by all ranks alike.

    For three ranks FSDP2 divides by 2 before it adds up.
    """
    grad = torch.tensor([1.9, *[0.5] * 5])
    scale = 2.0**15
    assert grad.max() * scale < 65504  # so every rank's own gradient fits
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype, skipped in ((torch.float16, True), (torch.float32, False)):
        for way in ("apply", "step"):
            model = Given()
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            optimizer = optim.SGD(model.parameters(), lr=1.0)
            scaler = GradScaler("cpu", init_scale=scale)
            told = []
            for _ in range(2):
                scaler.backward(model(grad))
                if way == "apply":
                    outcome = scaler.apply(optimizer)
                else:
                    scaler.step(optimizer)
                    outcome = scaler.outcome(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                told.append((bool(outcome.applied), scaler.get_scale()))
                if not outcome.applied:
                    assert float(outcome.bad_rank) == 0  # who has the sum that overflowed
            assert all(each == told for each in everyone(told))
            after = scale / 2 if skipped else scale
            assert told == [(not skipped, after), (True, after)]
            # One or two steps; the mean is rounded to the format of the reduction four times.
            steps = 1 if skipped else 2
            off = (full(model.weight) + steps * grad).abs().max()
            assert off <= 4 * steps * torch.finfo(dtype).eps / 2 * 1.9


def test_passes_that_are_not_reduced(tmp_path: Path) -> None:
    run_check(__file__, "accumulation", 2, tmp_path)


def test_a_sum_in_float16_that_overflows(tmp_path: Path) -> None:
    run_check(__file__, "reduction", 3, tmp_path)
