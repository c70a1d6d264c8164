"""Restoring the state before a backward pass."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.step.snapshot import Snapshot, random_state, set_random_state


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1)]


def test_random_numbers_come_again() -> None:
    random.gauss(0, 1)  # keeps a second one for the next call
    state = random_state()
    first = draw()
    assert draw() != first
    set_random_state(state)
    assert draw() == first


class Counter(nn.Module):
    """Counts its calls in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))
        self.register_buffer("none", None)
        self.register_buffer("spread", torch.zeros(1).expand(4))

    def forward(self, x: Tensor) -> Any:
        self.in_place += 1
        self.anew = self.anew + 1
        self.spread = (self.spread[:1] + 1).expand(4)
        return self.norm(x)


def test_what_models_count_is_put_back() -> None:
    model = Counter()
    model(torch.randn(4, 2))
    held = model.anew
    before = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot = Snapshot([model])
    model(torch.randn(4, 2) + 5)
    now = model.state_dict()
    assert all(
        not torch.equal(now[name], before[name])
        for name in before
        if "norm.w" not in name and "norm.b" not in name
    )
    snapshot.restore()
    now = model.state_dict()
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert model.anew is held
