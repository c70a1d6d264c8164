"""Lion: steps by the sign of an average of gradients, with one state where Adam has two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gradscale.errors import SettingError
from gradscale.torch.compile.handles import OptimizerHandle
from gradscale.torch.optim.batch import Group, Scaling, TensorLists
from gradscale.torch.optim.fused import FusedStep
from gradscale.torch.optim.launch_plan import PlannedStep
from gradscale.torch.optim.master_bits import exact_states


class LionRule:
    """The rule of Lion."""

    kernel = "lion"

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The average."""
        return ("exp_avg",)

    def unsupported(self, group: Group) -> str | None:
        """None: the kernel implements all settings."""
        return None

    def kernel_arguments(self, group: Group) -> tuple[Any, ...]:
        """Both betas."""
        return (group["betas"],)

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """One parameter after the other, in torch operations."""
        divisor, skip = scaling.divisor, scaling.skip
        for param, grad, average in zip(lists.params, lists.grads, lists.states[0], strict=True):
            unscaled = grad if divisor is None else grad / divisor
            new, new_average = _stepped(param, unscaled, average, group)
            if skip is not None:
                new = torch.where(skip != 0, param, new)
                new_average = torch.where(skip != 0, average, new_average)
            if divisor is not None and scaling.unscale_grads:
                grad.copy_(unscaled)
            param.copy_(new)
            average.copy_(new_average)


def _stepped(param: Tensor, grad: Tensor, average: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The parameter and the average after a step."""
    first, second = group["betas"]
    lr = group["lr"].to(param.device) if isinstance(group["lr"], Tensor) else group["lr"]
    grad = -grad if group["maximize"] else grad
    direction = (first * average + (1 - first) * grad).sign()
    new = param * (1 - lr * group["weight_decay"]) - lr * direction
    return new, second * average + (1 - second) * grad


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), one pass over memory on CUDA.

        optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=1.0)

    Args:
        params: As torch's optimizers take them.
        lr: The size of every step of every weight.
        betas: How much the direction and the average keep of the average.
        weight_decay: The share of a weight, times `lr`, that every step takes away.
        maximize: Whether to step up and not down.
        master: As in `Adam`.
        unscale_grads: As in `Adam`.
    """

    _step_supports_amp_scaling = True

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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, or skips where a scaler says so; returns what `closure` returned."""
        return self._fused.step(self, closure)

    def fused_plan(self) -> PlannedStep | None:
        """The step with the gradients that there are now, for a scaler; None without kernels."""
        return self._fused.planned(self)

    def keep_masters(self, master: str) -> None:
        """Keeps masters in another way from here on, and converts those that exist."""
        self._fused.keep_masters(master)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does, also for compiled functions."""
        super().add_param_group(param_group)
        self._handle = OptimizerHandle(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of the same name, ours or torch's."""
        with exact_states(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": copy.copy(self._fused)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fused.adapt(self)
        if not hasattr(self, "_handle"):  # a copy, and not a state that is loaded
            self._handle = OptimizerHandle(self)
