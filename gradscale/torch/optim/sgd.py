"""SGD, with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

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
        counted = []
        for group in filter(self._counts, self.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    counted.append((group, self._state_of(param, group)))
        skip = getattr(self, "found_inf", None)
        first = [state for group, state in counted if group["dampening"] and state["step"] == 0]
        if first:
            # torch's kernel tells a first step by a buffer that is not there, and then leaves a
            # new one with whatever was in memory if the step is skipped.
            if skip is not None and bool(skip):
                return
            for state in first:
                state["momentum_buffer"] = None
        super()._step_by_torch()
        for _, state in counted:
            state["step"] += 1.0 if skip is None else 1.0 - skip.to(state["step"].device)
