"""Lion: steps by the sign of an average of gradients, with one state where Adam has two."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradscale.errors import SettingError
from gradscale.torch import kernels
from gradscale.torch.optim.onepass import OnePass

if TYPE_CHECKING:
    from gradscale.torch._triton.pieces import Step


class _PlainLion(torch.optim.Optimizer):
    """Lion in torch operations, for every device."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not isinstance(lr, Tensor) and not lr >= 0:
            raise SettingError(f"lr must be >= 0, got {lr}.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise SettingError(f"betas must be two numbers >= 0 and < 1, got {betas}.")
        if not weight_decay >= 0:
            raise SettingError(f"weight_decay must be >= 0, got {weight_decay}.")
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient; what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param)
                grad = param.grad if divisor is None else param.grad / divisor.to(param.device)
                if divisor is not None and getattr(self, "_unscale_grads", False):
                    param.grad.copy_(grad)
                new, average = _stepped(param, grad, state["exp_avg"], group)
                if skip is not None:
                    skipped = skip.to(param.device) != 0
                    new = torch.where(skipped, param, new)
                    average = torch.where(skipped, state["exp_avg"], average)
                param.copy_(new)
                state["exp_avg"].copy_(average)
        return loss


def _stepped(
    param: Tensor, grad: Tensor, average: Tensor, group: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The parameter and the average after a step."""
    first, second = group["betas"]
    lr = group["lr"].to(param.device) if isinstance(group["lr"], Tensor) else group["lr"]
    grad = -grad if group["maximize"] else grad
    direction = (first * average + (1 - first) * grad).sign()
    new = param * (1 - lr * group["weight_decay"]) - lr * direction
    return new, second * average + (1 - second) * grad


class Lion(OnePass, _PlainLion):
    """Lion (Chen et al., 2023), one pass over memory on CUDA.

        optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=1.0)

    Args:
        args: As in the settings, in this order.
        settings: `params`; `lr`, the size of every step of every weight; `betas`, how much the
            direction and the average keep of the average; `weight_decay`; `maximize`; and `master`
            and `unscale_grads` as in `Adam`.
    """

    def _averages(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _counts(self, group: dict[str, Any]) -> bool:
        return False

    def _launch(self, step: Step, group: dict[str, Any]) -> None:
        kernels.stepping("lion").step(step, group["betas"])
