"""torch's optimizers with everything after the backward pass folded into the step.

Each is torch's optimizer of the same name: its constructor, its state, its `state_dict`. On CUDA a
kernel divides by the scale, clips, skips and steps in one pass over memory; elsewhere, and for what
the kernel does not do, torch's own fused step does the same in its way. Under a scaler, ours or
torch's, nobody waits for the device. After a step by the kernel `.grad` is still scaled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import SettingError, caller_level
from gradscale.torch import kernels
from gradscale.torch.ties import OptimizerTie

if TYPE_CHECKING:
    from gradscale.torch._triton.tables import Table

_NOT_HERE = {"fused": True, "foreach": False, "differentiable": False}
"""Settings of torch's that have but one value here."""


class _Members(NamedTuple):
    """The parameters of a group that have gradients, and what belongs to them."""

    facts: list[tuple[Any, ...]]
    """Who they and their states are, sizes and formats, and whether they are contiguous."""
    odd: str | None
    """Why the kernel cannot take them; None if it can."""
    states: tuple[list[Tensor], ...]
    """Both averages and the step counters; held, so that nobody else gets their ids."""
    fixed: list[int]
    """Their addresses, which are ours to keep."""
    table: Table
    """Where they lie."""


class _OnePass(torch.optim.Adam):
    """What Adam and AdamW share."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        for name, value in _NOT_HERE.items():
            if settings.pop(name, None) not in (None, value):
                raise SettingError(
                    f"{name} is {value} in gradscale's {type(self).__name__}, got {not value}."
                )
        super().__init__(*args, fused=True, **settings)
        self._members: dict[int, _Members] = {}
        self._told: set[str] = set()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, or, where a scaler says so, does not; what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        devices = {param.device for params in lists for param in params}
        if not any(map(kernels.take, devices)):
            super().step()
            return loss
        if len(devices) > 1:
            return self._step_by_torch("the parameters are on several devices", loss)
        groups = []
        for number, (group, params) in enumerate(zip(self.param_groups, lists, strict=True)):
            odd = _odd_settings(group)
            if odd is None and params:
                odd, _, fixed, table = self._members_of(number, params)[1:]
                groups.append((group, params, fixed, table))
            if odd is not None:
                return self._step_by_torch(odd, loss)
        divisor, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group, params, fixed, table in groups:
            grads = [param.grad for param in params]
            if not all(grad.is_contiguous() for grad in grads):
                grads = [grad.contiguous() for grad in grads]
            table.point_to(grads, params, fixed=fixed)
            kernels.adam().step(
                table,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled=group["decoupled_weight_decay"],
                maximize=group["maximize"],
                divisor=divisor,
                skip=skip,
            )
        return loss

    def _step_by_torch(self, odd: str, loss: Any) -> Any:
        """Takes torch's own fused step, and says once why."""
        if odd not in self._told:
            self._told.add(odd)
            warnings.warn(
                f"{type(self).__name__} takes torch's own fused step: {odd}.",
                stacklevel=caller_level(),
            )
        super().step()
        return loss

    def _members_of(self, number: int, params: list[Tensor]) -> _Members:
        """What belongs to `params`, the members of a group that have gradients."""
        facts = self._facts(params)
        members = self._members.get(number)
        if members is None or members.facts != facts:
            odd = _odd_params(params)
            states = [] if odd is not None else [self._state_of(param) for param in params]
            facts = self._facts(params)
            lists = tuple([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            if not all(_fits_the_kernel(s, params[0]) for each in lists for s in each):
                odd = "the kernel takes a float32 state beside the parameters"
            fixed = [state.data_ptr() for each in lists for state in each]
            table = kernels.new_table([param.numel() for param in params], params[0].device)
            members = self._members[number] = _Members(facts, odd, lists, fixed, table)
        return members

    def _facts(self, params: list[Tensor]) -> list[tuple[Any, ...]]:
        """What must stay as it is for a table to stay true."""
        return [
            (id(p), p.numel(), p.dtype, p.is_contiguous(), *map(id, self.state[p].values()))
            for p in params
        ]

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        """The state of `param`, made if there is none."""
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(param)
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does, also for compiled functions."""
        super().add_param_group(param_group)
        self._tie = OptimizerTie(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._members, self._told = {}, set()
        if not hasattr(self, "_tie"):
            self._tie = OptimizerTie(self)
        # A state of torch's optimizer that was not fused says so, and counts steps on the CPU.
        for group in self.param_groups:
            group.update(_NOT_HERE)
            for param in group["params"]:
                steps = self.state.get(param, {}).get("step")
                if steps is not None:
                    self.state[param]["step"] = steps.to(param.device, torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key not in ("_members", "_told")}


class Adam(_OnePass):
    """`torch.optim.Adam`, one pass over memory on CUDA, for float32 parameters.

        optimizer = Adam(model.parameters(), lr=3e-4)

    Takes torch's arguments; it is always fused.
    """


class AdamW(_OnePass, torch.optim.AdamW):
    """`torch.optim.AdamW`, one pass over memory on CUDA, for float32 parameters.

        optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    Takes torch's arguments; it is always fused.
    """


def _fits_the_kernel(state: Tensor, param: Tensor) -> bool:
    """Whether the kernel can take `state` beside `param`."""
    beside = state.device == param.device and state.dtype is torch.float32
    return beside and state.is_contiguous()


def _odd_settings(group: dict[str, Any]) -> str | None:
    """What the kernel does not do of a group's settings; None if it does all."""
    if group["amsgrad"]:
        return "the kernel does not do amsgrad"
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        return "the kernel does not take betas that are tensors"
    lr = group["lr"]
    if isinstance(lr, Tensor) and not kernels.take(lr.device):
        return "the kernel takes a learning rate that is a number or a tensor on the device"
    return None


def _odd_params(params: list[Tensor]) -> str | None:
    """What the kernel does not do of `params`; None if it does all."""
    if not all(param.dtype is torch.float32 for param in params):
        return "the kernel takes float32 parameters"
    if not all(param.is_contiguous() for param in params):
        return "the kernel takes contiguous parameters"
    return None
