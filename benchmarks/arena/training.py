"""What all trainings share.

A training makes its model, its optimizers and its batches from a seed, so that every arm starts
with the same weights and sees the same data. `turns` yields a loss and the optimizer that follows
it, once or more often in a step; whoever asks for the next turn has dealt with the one before.

AdamW's `eps` is tiny everywhere: what is measured is the format, not a threshold of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

EPS = 1e-25
SIZES = ("small", "medium")
"""The first takes seconds a run on one core of a CPU, the second on a part of a GPU."""
Choice = TypeVar("Choice")


class Place(NamedTuple):
    """Where and how a training runs."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float16
    """Of the forward and the backward pass."""
    size: str = SIZES[0]
    seed: int = 0

    def pick(self, small: Choice, medium: Choice) -> Choice:
        """What belongs to the size."""
        return (small, medium)[SIZES.index(self.size)]


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
    second_metric: ClassVar[str] = ""
    """What `validate_second` returns, where a training has two metrics."""
    steps: ClassVar[tuple[int, int]] = (300, 300)
    """By default, in each of the sizes."""
    cost: ClassVar[float] = 1.0
    """How long a step takes beside those of the other trainings, roughly: long runs start first."""
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

    def validate_second(self) -> float:
        """The second metric; NaN where there is none."""
        return math.nan

    def there(self, batch: Tensor) -> Tensor:
        """The batch on the device; the host does not wait for it.

        What is copied from memory that is not pinned has been read when the call returns.
        """
        return batch.to(self.place.device, non_blocking=True)

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
