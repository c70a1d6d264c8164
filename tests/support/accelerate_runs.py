"""Trainings with Accelerate that several test files look at."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn, optim

from gradscale.plugins.accelerate import use_gradscale
from gradscale.torch.optim import AdamW

STEPS, BAD = 8, 4
"""Batches, and the one whose gradients overflow."""
HUGE = 2.0**30
"""What makes gradients overflow in float16, and the loss not in float32."""


def reset() -> None:
    """Accelerate keeps its state in the classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=made) for _ in range(STEPS)]


def loss_of(outputs: Tensor, batch: Tensor, number: int) -> Tensor:
    loss = (outputs.float() - batch.sum(dim=1, keepdim=True)).square().mean()
    return loss * (HUGE if number == BAD else 1.0)


def optimizer_of(model: nn.Module, kind: str) -> optim.Optimizer:
    if kind == "lbfgs":
        return optim.LBFGS(model.parameters(), max_iter=3)
    if kind == "ours":
        return AdamW(model.parameters(), lr=0.05)
    return optim.AdamW(model.parameters(), lr=0.05, **{kind: True})


def decay(optimizer: Any) -> Any:
    return optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def clip(how: str, params: Any, norm: Any, value: Any) -> None:
    if how == "norm":
        norm(params, 0.1)
    elif how == "value":
        value(params, 0.01)


class Run:
    """A training with Accelerate, ready to go on."""

    def __init__(
        self,
        kind: str = "fused",
        precision: str = "fp16",
        accumulate: int = 1,
        late: bool = False,
        device: str = "cpu",
        sharded: bool = False,
        **settings: Any,
    ) -> None:
        reset()
        self.accelerator = Accelerator(
            cpu=device == "cpu",
            mixed_precision=precision,
            gradient_accumulation_steps=accumulate,
        )
        if sharded:
            use_fsdp2(self.accelerator)
        settings = {"init_scale": 2.0**10, "growth_interval": 3, **settings}
        if not late:
            self.scaler = use_gradscale(self.accelerator, **settings)
        model = net()
        optimizer = optimizer_of(model, kind)
        self.device = device
        parts = self.accelerator.prepare(model, optimizer, decay(optimizer))
        self.model, self.optimizer, self.scheduler = parts
        if late:
            self.scaler = use_gradscale(self.accelerator, **settings)
        self.own_autocast = precision == "no"
        self.skipped: list[int] = []

    def forward(self, batch: Tensor) -> Tensor:
        if not self.own_autocast:
            return self.model(batch)
        with torch.autocast(self.device, dtype=torch.float16):
            return self.model(batch)

    def step(self, number: int, batch: Tensor, clips: str = "") -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(loss_of(self.forward(batch), batch, number))
            if self.accelerator.sync_gradients:
                ours = self.accelerator
                clip(clips, self.model.parameters(), ours.clip_grad_norm_, ours.clip_grad_value_)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        if self.accelerator.sync_gradients and self.accelerator.optimizer_step_was_skipped:
            self.skipped.append(number)

    def state(self) -> list[Any]:
        """All that a step can move."""
        inner = self.optimizer.optimizer
        return [
            *(p.detach().clone() for p in self.model.parameters()),
            copy.deepcopy(inner.state_dict()),
            copy.deepcopy(self.scheduler.state_dict()),
        ]


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def use_fsdp2(accelerator: Accelerator) -> None:
    """Has Accelerate shard models, which it does not offer for ranks on CPUs; torch does."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    plugin.set_mixed_precision("fp16")
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
