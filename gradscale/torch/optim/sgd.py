"""SGD, with momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.torch import kernels
from gradscale.torch.optim.onepass import OnePass, always_fused

if TYPE_CHECKING:
    from gradscale.torch._triton.pieces import Step


class SGD(OnePass, torch.optim.SGD):
    """`torch.optim.SGD`, one pass over memory on CUDA.

        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    Takes the arguments of torch's, and `master` and `unscale_grads` as `Adam` here; it is always
    fused. With momentum its state counts steps, because the first one takes no dampening.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **always_fused(type(self), settings))

    def _averages(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _counts(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def _launch(self, step: Step, group: dict[str, Any]) -> None:
        kernels.stepping("sgd").step(step, group["momentum"], group["dampening"], group["nesterov"])

    def _step_by_torch(self) -> None:
        counted = [
            (param, group, self._state_of(param, group))
            for group in filter(self._counts, self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        first = {id(p) for p, group, state in counted if group["dampening"] and state["step"] == 0}
        # torch tells a first step, which takes no dampening, by a buffer that is not there, and
        # leaves a new one with whatever was in memory if the step is skipped. Zeros will do.
        self._step_some(lambda param: id(param) not in first)
        if first:
            self._step_some(lambda param: id(param) in first, dampening=0.0)
        skip = getattr(self, "found_inf", None)
        for _, _, state in counted:
            state["step"] += 1.0 if skip is None else 1.0 - skip.to(state["step"].device)

    def _step_some(self, chosen: Callable[[Tensor], bool], **settings: float) -> None:
        """Takes torch's step with the `chosen` parameters alone, and these `settings`."""
        before = [dict(group) for group in self.param_groups]
        try:
            for group in self.param_groups:
                group.update(settings, params=[p for p in group["params"] if chosen(p)])
            super()._step_by_torch()
        finally:
            for group, old in zip(self.param_groups, before, strict=True):
                group.update(old)
