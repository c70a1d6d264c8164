"""What a step takes: the rule of an optimizer, and its parameters in batches, with their states."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch.grads.dispatch import DTYPES
from gradscale.torch.grads.dtensor import all_plain, lay_out, local, local_grad, locals_of
from gradscale.torch.optim import master_bits

Group = dict[str, Any]
"""One of an optimizer's `param_groups`."""


class TensorLists(NamedTuple):
    """What torch operations step: plain tensors of one device and dtype, in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    """A list for each name that `Rule.state_names` gives, but "step"."""
    steps: list[Tensor]
    """Step counters; empty if the rule counts none."""


class Scaling(NamedTuple):
    """How a step treats the scale of its gradients."""

    divisor: Tensor | None = None
    """What gradients are divided by; None if they are unscaled."""
    skip: Tensor | None = None
    """float32: not 0 skips the step; None if it surely takes place."""
    unscale_grads: bool = False
    """Whether the gradients are left divided."""


class KernelRule(NamedTuple):
    """What the kernel takes of a group of this optimizer: see grads/triton/fused_step.py."""

    name: str
    states: int
    """How many there are that are as large as the parameter."""
    numbers: tuple[float, ...]
    decoupled: bool = False
    nesterov: bool = False


class Rule(Protocol):
    """The update rule of an optimizer; `FusedStep` does the rest."""

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The states, in the kernel's order: as large as the parameter; then "step", if counted."""

    def kernel_rule(self, group: Group) -> KernelRule:
        """How the kernel steps a group."""

    def step(self, group: Group, lists: TensorLists, scaling: Scaling) -> None:
        """Takes the step in torch operations; `scaling` is on the device of the parameters."""


class Batch:
    """Parameters of one group, device and dtype that have gradients, with their states.

    `places` are where they are among all parameters of the step, `names` those of the tensors in
    each state that a step takes.
    """

    def __init__(
        self,
        group: Group,
        params: list[Tensor],
        places: list[int],
        states: list[dict[str, Any]],
        names: tuple[str, ...],
    ) -> None:
        self.group, self.params, self.states, self.names = group, params, states, names
        self.dtype, self.device = params[0].dtype, params[0].device
        self.half = self.dtype in master_bits.HALF_DTYPES
        self.sharded = not all_plain(params)
        self.getters = list(map(itemgetter, names))
        self.columns = [locals_of(list(map(getter, states))) for getter in self.getters]
        """For each of `names` the states of all parameters, this rank's parts of them."""
        whole = range(places[0], places[0] + len(places))
        contiguous = places == list(whole)
        self.own: Callable[[Any], Any] = itemgetter(
            *([slice(whole.start, whole.stop)] if contiguous else places)
        )
        """Picks what is for these out of values for each parameter of the step."""


def batches_of(optimizer: Optimizer, params: list[Tensor], rule: Rule, master: str) -> list[Batch]:
    """`params`, those with gradients, in batches, with states that are made if there are none."""
    batches = []
    numbers = {id(param): number for number, param in enumerate(params)}
    for group in optimizer.param_groups:
        mine: dict[Any, list[Tensor]] = {}
        for param in group["params"]:
            if id(param) in numbers:
                mine.setdefault((param.device, param.dtype), []).append(param)
        names = rule.state_names(group)
        for (_, dtype), some in mine.items():
            half = dtype in master_bits.HALF_DTYPES
            rows = (*names, master_bits.KEYS[master]) if half else names
            states = [_state_of(optimizer, p, names, master) if rows else {} for p in some]
            places = [numbers[id(p)] for p in some]
            batches.append(Batch(group, some, places, states, rows))
    return batches


def _state_of(
    optimizer: Optimizer, param: Tensor, names: tuple[str, ...], master: str
) -> dict[str, Any]:
    """The state of `param`, made if there is none, as steps take it."""
    state: dict[str, Any] = optimizer.state[param]
    wide = torch.float32 if param.dtype in DTYPES else param.dtype
    large = [name for name in names if name != "step"]
    if len(large) < len(names):
        # torch's SGD does not count; it has a buffer from the first step on.
        begun = any(state.get(name) is not None for name in large)
        steps = state.get("step", float(begun))
        state["step"] = torch.as_tensor(steps, dtype=torch.float32, device=param.device)
    for name in large:
        value = state.get(name)
        if value is None:
            state[name] = torch.zeros_like(param, dtype=wide)
        else:
            state[name] = master_bits.as_state(param, value, name, wide)
    if param.dtype in master_bits.HALF_DTYPES:
        kinds = ((master_bits.MASTER, torch.float32), (master_bits.LOW_BITS, torch.int16))
        for name, dtype in kinds:
            if name in state:
                state[name] = master_bits.as_state(param, state[name], name, dtype)
        known = master_bits.MASTER in state
        master_bits.ensure_master(param, state, master)
        if known and master == "float32":
            master_bits.adopt_edits([local(param)], [local(state[master_bits.MASTER])])
    return state


def strides_of(tensors: list[Any]) -> bool | list[tuple[int, ...]]:
    """True if all are contiguous, else their strides."""
    return all(map(Tensor.is_contiguous, tensors)) or list(map(Tensor.stride, tensors))


def grads_laid_out(params: list[Tensor]) -> list[Tensor] | None:
    """This rank's gradients of `params`, laid out as these; None if one is missing."""
    grads = list(map(local_grad, params))
    if any(grad is None for grad in grads):
        return None
    if any(grad.layout is not torch.strided for grad in grads):
        raise RuntimeError(
            "Optimizers of gradscale support only dense gradients, got sparse ones. Use "
            "sparse=False in embeddings, or torch.optim.SparseAdam for their parameters."
        )
    if strides_of(grads) != strides_of(locals_of(params)):
        for param in params:
            lay_out(param)
        grads = list(map(local_grad, params))
    return grads
