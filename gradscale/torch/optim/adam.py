"""Adam and AdamW."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.compile.handles import OptimizerHandle
from gradscale.torch.optim.batch import Group, Scaling, TensorLists
from gradscale.torch.optim.fused import FusedStep, always_fused
from gradscale.torch.optim.launch_plan import PlannedStep
from gradscale.torch.optim.master_bits import exact_states


class AdamRule:
    """The rule of Adam and of AdamW, which differ in a setting of their groups."""

    kernel = "adam"

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Both averages; the largest second one, for torch's step alone; and the counter."""
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return "exp_avg", "exp_avg_sq", *largest, "step"

    def unsupported(self, group: Group) -> str | None:
        """Why the kernel cannot step `group`, or None."""
        if group["amsgrad"]:
            return "the kernel does not do amsgrad"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "the kernel does not take betas that are tensors"
        return None

    def kernel_arguments(self, group: Group) -> tuple[Any, ...]:
        """betas, eps, and whether weight decay is decoupled."""
        return group["betas"], group["eps"], group["decoupled_weight_decay"]

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """Takes the step by torch's fused operator, without torch's search for tensors."""
        averages, squares, *largest = lists.states
        beta1, beta2 = group["betas"]
        lr, device = group["lr"], lists.params[0].device
        fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        # By a list: a number, or one tensor, takes four times as long on the CPU (torch 2.13).
        torch._foreach_add_(lists.steps, [torch.ones((), device=device)] * len(lists.steps))
        fused(
            lists.params,
            lists.grads,
            averages,
            squares,
            largest[0] if largest else [],
            lists.steps,
            amsgrad=group["amsgrad"],
            lr=lr if not isinstance(lr, Tensor) or lr.is_cpu else lr.to(device),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=scaling.divisor,
            found_inf=scaling.skip,
        )
        if scaling.skip is not None:
            torch._foreach_sub_(lists.steps, [scaling.skip] * len(lists.steps))


def counted(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with a counter for every parameter that has a master and was never stepped.

    torch looks for one in every state that is not empty.
    """
    states = {}
    for key, own in state["state"].items():
        missing = isinstance(own, dict) and bool(own) and "step" not in own
        states[key] = {**own, "step": torch.zeros(())} if missing else own
    return {**state, "state": defaultdict(dict, states)}


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`, one pass over memory on CUDA.

        optimizer = Adam(model.parameters(), lr=3e-4)

    Takes torch's arguments; it is always fused.

    Args:
        args: As torch's.
        master: Where the 32 bits of float16 and bfloat16 parameters are kept: in a "float32" beside
            each, or "split", in 16 bits more.
        unscale_grads: Whether a step leaves the gradients unscaled, which takes one more write of
            each.
        settings: As torch's.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        self._fused = FusedStep(AdamRule(), master, unscale_grads)
        super().__init__(*args, **always_fused(type(self), settings))

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
        super().add_param_group(always_fused(type(self), param_group))
        self._handle = OptimizerHandle(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of the same name, ours or torch's."""
        with exact_states(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": copy.copy(self._fused)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(counted(state))  # type: ignore[no-untyped-call]
        self._fused.adapt(self)
        if not hasattr(self, "_handle"):  # a copy, and not a state that is loaded
            self._handle = OptimizerHandle(self)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, one pass over memory on CUDA.

        optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    Takes the arguments of torch's, and those of `Adam` here; it is always fused.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        self._fused = FusedStep(AdamRule(), master, unscale_grads)
        super().__init__(*args, **always_fused(type(self), settings))

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
        super().add_param_group(always_fused(type(self), param_group))
        self._handle = OptimizerHandle(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of the same name, ours or torch's."""
        with exact_states(self):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": copy.copy(self._fused)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(counted(state))  # type: ignore[no-untyped-call]
        self._fused.adapt(self)
        if not hasattr(self, "_handle"):  # a copy, and not a state that is loaded
            self._handle = OptimizerHandle(self)
