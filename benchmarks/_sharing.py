"""One small model on several ranks, shared in every way that torch has, and the scalers for it.

A `Setup` is built on every rank at the same time. What differs between the ways (who calls whom,
which parameters an optimizer takes together, whom a scaler must be told of) is said in its fields,
so that whoever trains it needs not know which one it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchsSharded
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch import GradScaler, ShardedGradScaler
from gradscale.torch.distributed.groups import Shards

WIDTH, BATCH = 8, 8
# With so large an eps small errors of gradients stay small errors of weights.
HOW = {"lr": 0.1, "eps": 0.1}
Scale = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A norm and two layers."""

    def __init__(self, width: int = WIDTH, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def first(self, x: Tensor) -> Tensor:
        """The stage that sees the data."""
        return torch.tanh(self.wide(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.first(x))


def net(width: int = WIDTH, norm: bool = True) -> Net:
    """The same one on every rank."""
    torch.manual_seed(0)
    return Net(width, norm)


class Setup(NamedTuple):
    """A model on several ranks."""

    params: list[list[nn.Parameter]]
    """In groups: torch's optimizers take no plain tensors beside DTensors in one."""
    backward: Callable[[Scale, Tensor], None]
    """Scales the loss of a batch, and leaves gradients."""
    named: nn.Module | None = None
    """Whom our scaler is told of."""
    groups: Any = "auto"
    shares_data: bool = False
    """Whether all ranks see the whole batch."""
    struck: int = 0
    """From which parameter on faults are planted."""
    zero: bool = False
    """Whether the states of the optimizer are spread over the ranks."""

    def mine(self, x: Tensor) -> Tensor:
        """What this rank sees of a batch."""
        return x if self.shares_data else x.chunk(dist.get_world_size())[dist.get_rank()]

    def flat(self) -> list[nn.Parameter]:
        """All parameters."""
        return [param for group in self.params for param in group]


def of_model(model: nn.Module, **settings: Any) -> Setup:
    """The setup of a model that is called on every rank."""

    def backward(scale: Scale, x: Tensor) -> None:
        scale(loss_of(model(x), x)).backward()

    settings.setdefault("params", [list(model.parameters())])
    return Setup(backward=backward, **settings)


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    """How far the outputs are from the inputs, backwards."""
    return (y - x.flip(1)).square().mean()


def ddp(mesh: Any) -> Setup:
    """Copies everywhere, gradients averaged."""
    model = DistributedDataParallel(net())
    return of_model(model, named=model)


def fsdp2(mesh: Any, width: int = WIDTH) -> Setup:
    """Parameters in parts, as DTensors."""
    model = net(width)
    fully_shard(model.wide, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return of_model(model)


def fsdp1(mesh: Any, width: int = WIDTH) -> Setup:
    """Parameters in parts, as plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so
        model = FullyShardedDataParallel(
            net(width), device_id=torch.device("cpu"), use_orig_params=True
        )
    return of_model(model, named=model)


def tensor_parallel(mesh: Any) -> Setup:
    """Layers in parts, and a bias that every rank has, all DTensors; the first one is in parts."""
    model = _in_parts(net(norm=False), mesh)
    return of_model(model, shares_data=True)


def mixed(mesh: Any) -> Setup:
    """The same after a norm that every rank has, as DTensors; a fault is in a layer."""
    model = _in_parts(net(), mesh)

    def copies(_: nn.Module, inputs: Any, mesh: Any) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()])

    distribute_module(model.norm, mesh, None, copies, lambda _, output, mesh: output.to_local())
    return of_model(model, shares_data=True, struck=2)


def mixed_plain(mesh: Any) -> Setup:
    """The same, but the norm is in plain tensors; a fault is in the norm."""
    model = _in_parts(net(), mesh)
    params = list(model.parameters())
    return of_model(model, params=[params[:2], params[2:]], shares_data=True)


def _in_parts(model: Net, mesh: Any) -> Net:
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model


def pipeline(mesh: Any) -> Setup:
    """Two stages, of which the second has the loss."""
    model = net()
    if dist.get_rank() == 0:
        model.narrow = nn.Identity()  # type: ignore[assignment]
    else:
        model.norm, model.wide = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def backward(scale: Scale, x: Tensor) -> None:
        hidden = torch.empty(len(x), 2 * WIDTH)
        if dist.get_rank() == 0:
            output = model.first(x)
            dist.send(output.detach(), 1)
            dist.recv(hidden, 1)
            scale(torch.zeros(()))  # a scaler must have scaled something
            output.backward(hidden)
        else:
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            scale(loss_of(model.narrow(hidden), x)).backward()
            dist.send(hidden.grad, 0)  # type: ignore[arg-type]

    groups = Shards(dist.group.WORLD)
    return Setup([list(model.parameters())], backward, groups=groups, shares_data=True)


def zero(mesh: Any) -> Setup:
    """Copies everywhere, and states of the optimizer in parts."""
    return ddp(mesh)._replace(zero=True)


SETUPS: dict[str, Callable[[Any], Setup]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP1": fsdp1,
    "tensor parallel": tensor_parallel,
    "mixed placements": mixed,
    "mixed with plain tensors": mixed_plain,
    "pipeline": pipeline,
    "ZeRO": zero,
}
OPTIMIZERS = ("fused", "foreach")


def optimizer_for(setup: Setup, kind: str) -> optim.Optimizer:
    """AdamW, fused or foreach."""
    how: dict[str, Any] = {**HOW, kind: True}
    if not setup.zero:
        return optim.AdamW([{"params": params} for params in setup.params], **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses what it has deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(setup.flat(), optimizer_class=optim.AdamW, **how)


TORCHS, TORCHS_SHARDED = "torch GradScaler", "torch ShardedGradScaler"
OURS, OURS_SHARDED = "gradscale GradScaler", "gradscale ShardedGradScaler"
ALONE = "gradscale GradScaler, groups=None"


def scalers_for(name: str) -> tuple[str, ...]:
    """The scalers that are made for the setup of this name; torch's is the first."""
    return (TORCHS_SHARDED, OURS, OURS_SHARDED) if name == "FSDP1" else (TORCHS, OURS)


def scaler_for(setup: Setup, kind: str, **settings: Any) -> Any:
    """A scaler, which has been told what it must know."""
    if kind in (TORCHS, TORCHS_SHARDED):
        return (torch.amp.GradScaler if kind == TORCHS else TorchsSharded)("cpu", **settings)
    if kind == OURS_SHARDED:
        return ShardedGradScaler("cpu", **settings)
    groups = None if kind == ALONE else setup.groups
    scaler = GradScaler("cpu", groups=groups, **settings)
    if setup.named is not None:
        scaler.name(setup.named)
    return scaler
