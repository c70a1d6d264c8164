"""The smallest training run, with either scaler: what the tests of known mistakes are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradscale.torch import GradScaler

TORCH, OURS = torch.amp.GradScaler, GradScaler
Kind = type[torch.amp.GradScaler]
HUGE = 2.0**120
"""A gradient that overflows float32 at any scale from 2**8 on."""


def line(weight: float = 1.0) -> nn.Linear:
    """The model y = weight * x."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


class Run:
    """Gradient descent with rate 1 on y = weight * x, where the gradient is x; and its scaler."""

    def __init__(self, kind: Kind, weight: float = 1.0, fused: bool = False, **settings: Any):
        if issubclass(kind, GradScaler):
            settings.setdefault("on_stuck", "ignore")  # many runs here are stuck on purpose
        self.scaler: Any = kind("cpu", **settings)
        self.model = line(weight)
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=1.0, fused=fused)

    def loss(self, x: float) -> Tensor:
        return self.model(torch.tensor([x])).sum()

    def backward(self, x: float) -> None:
        self.scaler.scale(self.loss(x)).backward()

    def train(self, *inputs: float, loss: Callable[[Tensor], Tensor] = torch.sum) -> list[float]:
        """torch's loop; the scale after every step."""
        scales = []
        for x in inputs:
            self.optimizer.zero_grad()
            self.scaler.scale(loss(self.model(torch.tensor([x])))).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales

    @property
    def weight(self) -> float:
        return self.model.weight.item()


def step_by_closure(run: Run, x: float) -> None:
    def closure() -> Tensor:
        loss = run.loss(x)
        run.scaler.backward(loss)
        return loss

    run.scaler.step(run.optimizer, closure)


def root(outputs: Tensor) -> Tensor:
    """At 0 a finite loss whose gradient is infinite, whatever the scale."""
    return outputs.sqrt().sum()


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returned, or the type of what it raised."""
    try:
        return call()
    except Exception as error:
        return type(error)
