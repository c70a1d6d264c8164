"""Adam and AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.torch import kernels
from gradscale.torch.optim.onepass import OnePass, always_fused

if TYPE_CHECKING:
    from gradscale.torch._triton.pieces import Step


class Adam(OnePass, torch.optim.Adam):
    """`torch.optim.Adam`, one pass over memory on CUDA.

        optimizer = Adam(model.parameters(), lr=3e-4)

    Takes torch's arguments; it is always fused.

    Args:
        args: As torch's.
        settings: As torch's; and `master`, where the 32 bits of float16 and bfloat16 parameters
            are kept: in a "float32" beside each, or "split", in 16 bits more; and `unscale_grads`,
            whether a step leaves the gradients unscaled, which takes one more write of each.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **always_fused(type(self), settings))

    def _averages(self, group: dict[str, Any]) -> tuple[str, ...]:
        # The third is torch's business, but a state that has some must have all.
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return "exp_avg", "exp_avg_sq", *largest

    def _counts(self, group: dict[str, Any]) -> bool:
        return True

    def _launch(self, step: Step, group: dict[str, Any]) -> None:
        kernels.stepping("adam").step(
            step, group["betas"], group["eps"], group["decoupled_weight_decay"]
        )

    def _odd(self, group: dict[str, Any]) -> str | None:
        if group["amsgrad"]:
            return "the kernel does not do amsgrad"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "the kernel does not take betas that are tensors"
        return super()._odd(group)


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW`, one pass over memory on CUDA.

        optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    Takes the arguments of torch's, and those of `Adam` here; it is always fused.
    """
