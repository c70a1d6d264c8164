"""SGD, with momentum."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.compile.handles import OptimizerHandle
from gradscale.torch.optim.batch import Group, Scaling, TensorLists
from gradscale.torch.optim.fused import FusedStep, always_fused
from gradscale.torch.optim.launch_plan import PlannedStep
from gradscale.torch.optim.master_bits import exact_states


class SGDRule:
    """The rule of SGD."""

    kernel = "sgd"

    def state_names(self, group: Group) -> tuple[str, ...]:
        """With momentum its buffer, and a counter: the first step takes no dampening."""
        return ("momentum_buffer", "step") if group["momentum"] else ()

    def unsupported(self, group: Group) -> str | None:
        """None: the kernel implements all settings."""
        return None

    def kernel_arguments(self, group: Group) -> tuple[Any, ...]:
        """momentum, dampening, nesterov."""
        return group["momentum"], group["dampening"], group["nesterov"]

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """Takes torch's fused step."""
        # torch recognises a first step by a buffer that does not exist, and leaves a new one
        # uninitialised if the step is skipped. Zeros, and no dampening, have the same result.
        if group["dampening"] and lists.steps:
            first = [float(count) == 0 for count in lists.steps]
            _step(group, _chosen(lists, first), scaling, dampening=0.0)
            later = _chosen(lists, [not each for each in first])
            _step(group, later, scaling, group["dampening"])
        else:
            _step(group, lists, scaling, group["dampening"])
        if lists.steps:
            one = torch.ones((), device=lists.steps[0].device)
            count = one if scaling.skip is None else one - scaling.skip
            torch._foreach_add_(lists.steps, [count] * len(lists.steps))


def _step(group: Group, lists: TensorLists, scaling: Scaling, dampening: float) -> None:
    """Takes the step by torch's fused operator, with this `dampening`."""
    if not lists.params:
        return
    lr, device = group["lr"], lists.params[0].device
    torch._fused_sgd_(
        lists.params,
        lists.grads,
        lists.states[0] if lists.states else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=lr if not isinstance(lr, Tensor) or lr.is_cpu else lr.to(device),
        dampening=dampening,
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=scaling.divisor,
        found_inf=scaling.skip,
    )


def _chosen(lists: TensorLists, mask: list[bool]) -> TensorLists:
    """Those of `lists` where `mask` is True."""
    return TensorLists(
        list(compress(lists.params, mask)),
        list(compress(lists.grads, mask)),
        [list(compress(each, mask)) for each in lists.states],
        list(compress(lists.steps, mask)),
    )


class SGD(torch.optim.SGD):
    """`torch.optim.SGD`, one pass over memory on CUDA.

        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    Takes the arguments of torch's, and `master` and `unscale_grads` as `Adam` here; it is always
    fused. With momentum its state counts steps, because the first one takes no dampening.
    """

    _begins_with_zeros = True
    """A first step that is skipped leaves zeros in the momentum buffers."""
    _step_supports_amp_scaling = True

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        self._fused = FusedStep(SGDRule(), master, unscale_grads)
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
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._fused.adapt(self)
        if not hasattr(self, "_handle"):  # a copy, and not a state that is loaded
            self._handle = OptimizerHandle(self)
