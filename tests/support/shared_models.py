"""A model on several ranks, in every way that torch knows."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler, ShardedGradScaler
from gradscale.torch.distributed.groups import Shards
from gradscale.torch.optim import AdamW
from sharded_names import MixedPrecisionPolicy, Replicate, Shard, fully_shard

DEVICE = torch.device(os.environ.get("RANKS_DEVICE", "cpu"))
"""Where the models are: on a GPU, which ranks share, if `run_check` is given one."""
WIDTH, BATCH = 8, 8
# With so large an eps small errors of gradients stay small errors of weights.
HOW = {"lr": 0.1, "eps": 0.1}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "fused": lambda params: optim.AdamW(params, fused=True, **HOW),
    "foreach": lambda params: optim.AdamW(params, foreach=True, **HOW),
    "ours": lambda params: AdamW(params, **HOW),
}


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.narrow(torch.tanh(self.wide(x)))).clone()  # FSDP2 wants no views


def net(norm: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(norm).to(DEVICE)


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def error_of(y: Tensor, x: Tensor) -> Tensor:
    return (y.float() - x.flip(1)).square().mean()


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return error_of(model(x), x)


class Setup(NamedTuple):
    """A model on several ranks."""

    call: Any
    """What is called, on data."""
    params: list[nn.Parameter]
    groups: Any = "auto"
    shares: int = 0
    """Into how many parts a batch is cut, from rank to rank; 0 for as many as there are ranks."""
    named: Any = None
    norm: bool = True
    """Whether the model has its norm."""
    make: Callable[..., optim.Optimizer] | None = None
    scaler: Callable[..., GradScaler] | None = None
    own: Callable[[Net], list[nn.Parameter]] | None = None
    """Those of a whole model that this rank has; else it has a part of all of them."""
    run: Callable[[GradScaler, Tensor], None] | None = None
    """A backward pass, if it is not that of a loss that every rank has."""

    def backward(self, scaler: GradScaler, x: Tensor) -> None:
        """Gives this rank its gradients for the batch `x`, scaled."""
        if self.run is not None:
            self.run(scaler, x)
            return
        rank, shares = dist.get_rank(), self.shares or dist.get_world_size()
        mine = x.chunk(shares)[rank * shares // dist.get_world_size()]
        scaler.scale(loss_of(self.call, mine)).backward()

    def weights(self) -> list[Tensor]:
        """The parameters, whole where ranks have parts of them."""
        if isinstance(self.call, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.call):
                return [param.detach().clone() for param in self.call.parameters()]
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.params]


def ddp() -> Setup:
    model = net()
    wrapped = DistributedDataParallel(model)
    return Setup(wrapped, list(model.parameters()), named=wrapped)


def given() -> Setup:
    return ddp()._replace(named=None, groups=dist.group.WORLD)


def fsdp2(mesh: Any = None) -> Setup:
    """Sharded over all ranks, or, over a mesh of two dimensions, sharded and copied."""
    model = net()
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),)) if mesh is None else mesh
    fully_shard(model.wide, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Setup(model, list(model.parameters()))


def hsdp() -> Setup:
    return fsdp2(init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("copies", "shards")))


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, groups: Any = None) -> Setup:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so
        model = FullyShardedDataParallel(
            net(),
            process_group=groups,
            sharding_strategy=strategy,
            device_id=DEVICE,
            use_orig_params=True,
        )
    return Setup(model, list(model.parameters()), named=model)


def hybrid() -> Setup:
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("copies", "shards"))
    return fsdp1(ShardingStrategy.HYBRID_SHARD, (mesh.get_group(1), mesh.get_group(0)))


def by_torchs_name() -> Setup:
    """As it was written for torch's class."""
    return fsdp1()._replace(named=None, scaler=ShardedGradScaler)


def tensor_parallel(mesh: Any = None) -> Setup:
    """Layers in parts, with a bias that every rank has.

    Without the norm: torch's fused optimizers do not take plain tensors beside DTensors.
    """
    model = net(norm=False)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),)) if mesh is None else mesh
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return Setup(model, list(model.parameters()), shares=1, norm=False)


def mixed_placements() -> Setup:
    """Rows, columns, copies, and a norm of whose gradient every rank has a summand."""
    model = net()
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    plan = {
        "wide": ColwiseParallel(),
        "narrow": RowwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
    }
    parallelize_module(model, mesh, plan)
    whole = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    parallelize_module(model, mesh, whole)
    return Setup(model, list(model.parameters()), shares=1)


def grid() -> Setup:
    """Tensor parallel, and sharded over the other dimension of the mesh."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("data", "tensor"))
    parts = tensor_parallel(mesh["tensor"])
    fully_shard(parts.call, mesh=mesh["data"])
    return parts._replace(params=list(parts.call.parameters()), shares=2)


def zero() -> Setup:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses what it has deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(params: Any) -> optim.Optimizer:
        return ZeroRedundancyOptimizer(params, optimizer_class=optim.AdamW, **HOW)

    return ddp()._replace(make=make)


def pipeline() -> Setup:
    """Two stages, of which the last one has the loss."""
    rank, model = dist.get_rank(), net()
    stages = [nn.Sequential(model.wide, nn.Tanh()), nn.Sequential(model.narrow, model.norm)]
    place = PipelineStage(stages[rank], rank, 2, DEVICE)

    def own(whole: Net) -> list[nn.Parameter]:
        layers = [whole.narrow, whole.norm] if rank else [whole.wide]
        return [param for layer in layers for param in layer.parameters()]

    def run(scaler: GradScaler, x: Tensor) -> None:
        def loss(y: Tensor, target: Tensor) -> Tensor:
            return scaler.scale(error_of(y, target))

        schedule = ScheduleGPipe(place, n_microbatches=2, loss_fn=loss)
        schedule.step(target=x) if rank else schedule.step(x)

    groups = Shards(dist.group.WORLD)
    return Setup(stages[rank], list(stages[rank].parameters()), groups=groups, own=own, run=run)


def half() -> MixedPrecisionPolicy:
    """float16 in the passes, float32 in sums and steps."""
    return MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def spoil(params: list[nn.Parameter], fault: str) -> None:
    """Plants a fault in this rank's gradients, after they were reduced."""
    grads = [p.grad for p in params if p.grad is not None and p.grad.numel()]
    first: Any = next(
        part for grad in grads if (part := getattr(grad, "_local_tensor", grad)).numel()
    )
    if fault == "no gradient":
        for param in params:
            # Summands are on all ranks or on none: torch's own step adds them up.
            if not _is_summand(param.grad):
                param.grad = None
    elif fault != "none":
        first.view(-1)[0] = math.inf if fault == "inf" else math.nan


def _is_summand(grad: Any) -> bool:
    """Whether all ranks must take part in whatever becomes of `grad`."""
    return any(each.is_partial() for each in getattr(grad, "placements", ()))
