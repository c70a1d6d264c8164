"""What all trainings share.

A training makes its model, its optimizers and its batches from a seed, so that every arm starts
with the same weights and sees the same data. `turns` yields a loss and the optimizer that follows
it, once or more often in a step; whoever asks for the next turn has dealt with the one before.

AdamW's `eps` is tiny everywhere: what is measured is the format, not a threshold of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

EPS = 1e-25


class Place(NamedTuple):
    """Where and how a training runs."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float16
    """Of the forward and the backward pass."""
    large: bool = False
    seed: int = 0


class Turn(NamedTuple):
    """A loss, and whose step follows its backward pass."""

    loss: Tensor
    optimizer: Optimizer
    again: Callable[[], Tensor] | None = None
    """Computes the loss of the same batch once more, where a training has that."""


class Training:
    """What all trainings share."""

    name: ClassVar[str]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    noise: ClassVar[float] = 0.005
    """Metrics that differ by a smaller share than this are equally good."""
    clip_norm: ClassVar[float | None] = None
    steps: ClassVar[tuple[int, int]] = (300, 2000)
    """By default, when small and when large."""
    sequential: ClassVar[bool] = False
    """Whether the model is a chain of blocks, each of which can have a scale of its own."""
    spiky: ClassVar[bool] = False
    """Whether single batches have far larger gradients than the others."""
    model: nn.Module

    def __init__(self, place: Place, num_steps: int) -> None:
        self.place, self.num_steps = place, num_steps
        self.generator = torch.Generator().manual_seed(place.seed)
        torch.manual_seed(place.seed)
        self.build()

    def build(self) -> None:
        """Makes the model and the optimizers."""
        raise NotImplementedError

    def turns(self, step: int) -> Iterator[Turn]:
        """The losses of a step, one by one."""
        raise NotImplementedError

    def validate(self) -> float:
        """The metric, on data that is never trained on."""
        raise NotImplementedError

    def precision(self) -> AbstractContextManager[object]:
        """Autocast in the format of this training; nothing in float32."""
        dtype = self.place.dtype
        return torch.autocast(self.place.device, dtype=dtype, enabled=dtype is not torch.float32)

    def adamw(self, params: Iterable[Tensor], lr: float) -> Optimizer:
        """The optimizer of all trainings but one."""
        return torch.optim.AdamW(params, lr=lr, eps=EPS, fused=True)

    def slow_down(self, step: int, *optimizers: Optimizer) -> None:
        """Lowers the rate, to 0 at the end: else the metric depends on the last few batches."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * (1 - step / self.num_steps)

    def calm_after(self) -> int:
        """The step from which on nothing disturbs the scale but the training itself."""
        return 0
