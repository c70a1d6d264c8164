"""A small network in every mode of MixedPrecision, and what its tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradscale as gs
from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision import MODES
from gradscale.torch.optim import AdamW

torch.set_num_threads(1)
HALF_WEIGHTS = [name for name, mode in MODES.items() if mode.casts]
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "ours": AdamW,
    "fused": lambda params, lr: optim.AdamW(params, lr=lr, fused=True),
    "foreach": lambda params, lr: optim.AdamW(params, lr=lr, foreach=True),
    "SGD": lambda params, lr: optim.SGD(params, lr=lr, momentum=0.9),
}
every_mode = pytest.mark.parametrize("mode", MODES)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Net(nn.Module):
    """Everything that a try must not count twice: dropout and a batch norm. `boost` overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.4)
        self.narrow = nn.Linear(16, 1)
        self.boost = 1.0
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(torch.tanh(self.wide(x))))
        self.masks.append(x.detach() == 0)
        return self.narrow(x) * self.boost


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(count: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x).float() - y).square().mean()


def built(mode: str, make: Any = AdamW, **settings: Any) -> tuple[Any, MixedPrecision]:
    model = net()
    return model, MixedPrecision(model, make(model.parameters(), lr=1e-2), mode, **settings)


def advance(model: Any, mp: MixedPrecision, steps: int = 1, **limits: Any) -> gs.torch.StepOutcome:
    for _ in range(steps):
        with mp.autocast():
            loss = loss_of(model, data())
        mp.backward(loss)
        outcome = mp.step(**limits)
    return outcome


def picture(mp: MixedPrecision) -> list[Tensor]:
    """All numbers of models and optimizers, masters and averages among them."""
    found: list[Tensor] = []
    for model in mp.models:
        found += [value.clone() for value in model.state_dict().values()]
    for optimizer in mp.optimizers:
        for state in optimizer.state_dict()["state"].values():
            found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found
