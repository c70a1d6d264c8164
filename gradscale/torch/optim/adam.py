"""Adam and AdamW."""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.features import ADAM_TAKES_DECOUPLED
from gradscale.torch.optim.batch import Group, KernelRule, Scaling, TensorLists
from gradscale.torch.optim.fused import FusedStep, always_fused, steps_fused

_DECOUPLED = "decoupled_weight_decay"


class AdamRule:
    """The rule of Adam and of AdamW, which differ in a setting of their groups.

    Args:
        decoupled: The setting of a group that has none, as one that torch before 2.7 has saved.
    """

    def __init__(self, decoupled: bool = False) -> None:
        self._decoupled = decoupled

    def state_names(self, group: Group) -> tuple[str, ...]:
        """Both averages; the largest second one, for torch's step alone; and the counter."""
        largest = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return "exp_avg", "exp_avg_sq", *largest, "step"

    def kernel_rule(self, group: Group) -> KernelRule:
        """Both averages."""
        beta1, beta2 = group["betas"]
        numbers = (*_numbers(beta1, beta2), float(group["eps"]))
        return KernelRule("adam", 2, numbers, decoupled=self._is_decoupled(group))

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """Takes the step by torch's fused operator, without torch's search for tensors."""
        averages, squares, *largest = lists.states
        beta1, beta2 = group["betas"]
        lr, device = group["lr"], lists.params[0].device
        fused = torch._fused_adamw_ if self._is_decoupled(group) else torch._fused_adam_
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

    def _is_decoupled(self, group: Group) -> bool:
        """Whether weight decay is, in the steps of `group`."""
        return bool(group.get(_DECOUPLED, self._decoupled))


@functools.lru_cache(maxsize=64)
def _numbers(beta1: float, beta2: float) -> tuple[float, ...]:
    """What the kernel takes of the betas."""
    logs = [math.log2(beta) if beta else -1e30 for beta in (beta1, beta2)]
    pairs = [part for log in logs for part in _two_floats(log)]
    return float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, *pairs


def _two_floats(value: float) -> tuple[float, float]:
    """`value` as a sum of two float32 numbers."""
    large: float = struct.unpack("f", struct.pack("f", value))[0]
    return large, value - large


@steps_fused
class Adam(torch.optim.Adam):
    """`torch.optim.Adam` in one pass over memory on CUDA.

        optimizer = Adam(model.parameters(), lr=3e-4)

    It takes torch's arguments and is always fused.

    Args:
        *args: As in torch.
        master: How the 32-bit masters of float16 and bfloat16 parameters are stored: "float32", a
            copy of each, or "split", 16 additional bits of each.
        unscale_grads: Whether gradients are unscaled after a step, which takes one more write.
        **settings: As in torch.
    """

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        decoupled = bool(settings.get(_DECOUPLED, False))
        self._fused = FusedStep(AdamRule(decoupled), master, unscale_grads)
        rest = always_fused(type(self), settings)
        if not ADAM_TAKES_DECOUPLED:
            rest.pop(_DECOUPLED, None)
        super().__init__(*args, **rest)
        for where in (self.defaults, *self.param_groups):
            where.setdefault(_DECOUPLED, decoupled)


@steps_fused
class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in one pass over memory on CUDA.

        optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    It takes torch's arguments, and `master` and `unscale_grads` as in `Adam`; it is always fused.
    """

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        self._fused = FusedStep(AdamRule(decoupled=True), master, unscale_grads)
        super().__init__(*args, **always_fused(type(self), settings))
