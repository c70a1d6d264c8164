"""SGD, with momentum."""

from __future__ import annotations

from itertools import compress
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.optim.batch import Group, KernelRule, Scaling, TensorLists
from gradscale.torch.optim.fused import FusedStep, always_fused, steps_fused


class SGDRule:
    """The rule of SGD."""

    def state_names(self, group: Group) -> tuple[str, ...]:
        """With momentum its buffer, and a counter: the first step takes no dampening."""
        return ("momentum_buffer", "step") if group["momentum"] else ()

    def kernel_rule(self, group: Group) -> KernelRule:
        """The momentum, and the share of a gradient that dampening leaves."""
        momentum = float(group["momentum"])
        numbers = (momentum, 1.0 - group["dampening"])
        return KernelRule("sgd", int(momentum != 0), numbers, nesterov=group["nesterov"])

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """Takes torch's fused step."""
        lr, dampening, parts = group["lr"], group["dampening"], [(lists, group["dampening"])]
        if isinstance(lr, Tensor) and not lr.is_cpu:
            lr = lr.to(lists.params[0].device)
        if dampening and lists.steps:
            # torch recognises a first step by a buffer that does not exist, and leaves a new one
            # uninitialised if the step is skipped. Zeros, and no dampening, have the same result.
            first = [float(count) == 0 for count in lists.steps]
            later = [not each for each in first]
            parts = [(_chosen(lists, first), 0.0), (_chosen(lists, later), dampening)]
        for some, share in parts:
            if some.params:
                torch._fused_sgd_(
                    some.params,
                    some.grads,
                    some.states[0] if some.states else [],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                    lr=lr,
                    dampening=share,
                    nesterov=group["nesterov"],
                    maximize=group["maximize"],
                    is_first_step=False,
                    grad_scale=scaling.divisor,
                    found_inf=scaling.skip,
                )
        if lists.steps:
            one = torch.ones((), device=lists.steps[0].device)
            count = one if scaling.skip is None else one - scaling.skip
            torch._foreach_add_(lists.steps, [count] * len(lists.steps))


def _chosen(lists: TensorLists, mask: list[bool]) -> TensorLists:
    """Those of `lists` where `mask` is True."""
    return TensorLists(
        list(compress(lists.params, mask)),
        list(compress(lists.grads, mask)),
        [list(compress(each, mask)) for each in lists.states],
        list(compress(lists.steps, mask)),
    )


@steps_fused
class SGD(torch.optim.SGD):
    """`torch.optim.SGD` in one pass over memory on CUDA.

        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    It takes torch's arguments, and `master` and `unscale_grads` as in `Adam`; it is always fused.
    With momentum its state counts steps, because dampening does not apply to the first one.
    """

    _begins_with_zeros = True
    """A first step that is skipped leaves zeros in the momentum buffers."""

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        self._fused = FusedStep(SGDRule(), master, unscale_grads)
        super().__init__(*args, **always_fused(type(self), settings))
