"""Lion: steps by the sign of an average of gradients, with one state where Adam has two."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradscale.errors import SettingError
from gradscale.torch.optim.batch import Group, KernelRule, Scaling, TensorLists
from gradscale.torch.optim.fused import FusedStep, steps_fused


class LionRule:
    """The rule of Lion."""

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The average."""
        return ("exp_avg",)

    def kernel_rule(self, group: Group) -> KernelRule:
        """Both betas."""
        numbers = [number for beta in group["betas"] for number in (float(beta), 1.0 - beta)]
        return KernelRule("lion", 1, tuple(numbers), decoupled=True)

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """One parameter after the other, in torch operations."""
        divisor, skip, (first, second) = scaling.divisor, scaling.skip, group["betas"]
        device = lists.params[0].device
        lr = group["lr"].to(device) if isinstance(group["lr"], Tensor) else group["lr"]
        for param, grad, average in zip(lists.params, lists.grads, lists.states[0], strict=True):
            unscaled = grad if divisor is None else grad / divisor
            g = -unscaled if group["maximize"] else unscaled
            direction = (first * average + (1 - first) * g).sign()
            new = param * (1 - lr * group["weight_decay"]) - lr * direction
            new_average = second * average + (1 - second) * g
            if skip is not None:
                new = torch.where(skip != 0, param, new)
                new_average = torch.where(skip != 0, average, new_average)
            if divisor is not None and scaling.unscale_grads:
                grad.copy_(unscaled)
            param.copy_(new)
            average.copy_(new_average)


@steps_fused
class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023) in one pass over memory on CUDA.

        optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=1.0)

    Args:
        params: Parameters or groups, as in torch's optimizers.
        lr: Learning rate: the size of every step of every weight.
        betas: Coefficients of the average in the direction and in the average itself.
        weight_decay: Decoupled weight decay: every step removes this share of a weight times `lr`.
        maximize: Whether to maximize the objective.
        master: As in `Adam`.
        unscale_grads: As in `Adam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str = "float32",
        unscale_grads: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise SettingError(f"lr must be >= 0, got {lr}.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise SettingError(f"betas must be two numbers >= 0 and < 1, got {betas}.")
        if not weight_decay >= 0:
            raise SettingError(f"weight_decay must be >= 0, got {weight_decay}.")
        self._fused = FusedStep(LionRule(), master, unscale_grads)
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings)
