"""The step of our optimizers: by one kernel where that can be, else by torch's own fused step.

Each optimizer holds a `FusedStep` with its `Rule`. Masters of weights in float16 and bfloat16 are
in the optimizer's state, beside the averages, which are always float32. After a step by the kernel
`.grad` is still scaled, unless `unscale_grads` asks otherwise.

Finding the tensors of 1,000 small parameters takes torch longer than its fused kernel on the CPU
takes to step them; checking that they are the same takes a tenth of that. Checks compare
identities, in C: Python takes half a microsecond for each parameter.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from gradscale.errors import SettingError, caller_level
from gradscale.torch.compile.handles import OptimizerHandle
from gradscale.torch.grads import dispatch
from gradscale.torch.grads.collect import with_grad
from gradscale.torch.grads.dtensor import PLAIN, lay_out, local, local_grad, locals_of
from gradscale.torch.optim import launch_plan, master_bits
from gradscale.torch.optim.batch import (
    Rule,
    Scaling,
    TensorLists,
    batches_of,
    grads_laid_out,
    strides_of,
)
from gradscale.torch.optim.launch_plan import LaunchPlan, PlannedStep

_GRAD, _DTYPE, _ON_CPU = attrgetter("grad"), attrgetter("dtype"), attrgetter("is_cpu")
_PARAMS = itemgetter("params")
_FIXED = {"fused": True, "foreach": False, "differentiable": False}
"""Settings of torch's that have but one value here."""
Kind = TypeVar("Kind", bound=Optimizer)


class FusedStep:
    """Steps an optimizer; keeps the plan of the last step, and checks it before the next one.

    Args:
        rule: What the optimizer computes.
        master: Where the masters of half weights are: "float32" or "split".
        unscale_grads: Whether a step leaves the gradients unscaled.
    """

    def __init__(self, rule: Rule, master: str = "float32", unscale_grads: bool = False) -> None:
        self._rule = rule
        self._master = master_bits.check_mode(master)
        self._unscale_grads = unscale_grads
        self._reasons: set[str] = set()
        """Why kernels were not used, as far as that was said."""
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have plans of their own."""
        return FusedStep, (self._rule, self._master, self._unscale_grads)

    def forget(self) -> None:
        """Drops the plans."""
        self._launch_plan: LaunchPlan | None = None
        self._tensor_plan: TensorPlan | None = None

    def keep_masters(self, master: str) -> None:
        """Keeps masters in the mode `master` from the next step on, and converts existing ones."""
        self._master = master_bits.check_mode(master)
        self.forget()

    def make_states(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        """Makes the states of `params`, which a step would make.

        torch's `get_state_dict()` does so by a step, unless there is a state already, say a master.
        """
        batches_of(optimizer, params, self._rule, self._master)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Steps, or skips where `found_inf` says so; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        divisor = getattr(optimizer, "grad_scale", None)
        scaling = Scaling(divisor, getattr(optimizer, "found_inf", None), self._unscale_grads)
        plan, grads = self._tensor_plan, None
        with torch.no_grad():
            if plan is not None and (
                dispatch._path != "triton"
                if plan.on_cpu
                else not any(map(dispatch.uses_triton, plan.devices))
            ):
                grads = plan.grads(optimizer)
            if plan is not None and grads is not None:
                plan.run(grads, scaling)
            elif (launch := self._current_launch_plan(optimizer)) is not None:
                launch.run(optimizer.state, scaling)
            else:
                self._step_by_torch(optimizer, scaling)
        return loss

    def _step_by_torch(self, optimizer: Optimizer, scaling: Scaling) -> None:
        """Takes the step in torch operations."""
        plan = self._tensor_plan
        grads = None if plan is None else plan.grads(optimizer)
        if plan is None or grads is None:
            self.forget()
            params = with_grad(optimizer.param_groups)
            plan = TensorPlan(Members(optimizer, params, self._rule, self._master))
            self._tensor_plan, grads = plan, grads_laid_out(params) or []
        plan.run(grads, scaling)

    def planned(self, optimizer: Optimizer) -> PlannedStep | None:
        """The step by kernels with the gradients that there are now; None if kernels cannot."""
        plan, checked = self._launch_plan, False
        if plan is None or not plan.grads_hold(optimizer):
            plan, checked = self._current_launch_plan(optimizer), True
        if plan is None:
            return None
        return PlannedStep(optimizer, plan, checked, self._unscale_grads)

    def _current_launch_plan(self, optimizer: Optimizer) -> LaunchPlan | None:
        """The plan of a step by kernels, or None; warns once why."""
        plan = self._launch_plan
        if plan is not None and plan.grads_hold(optimizer) and plan.rest_holds(optimizer):
            return plan
        self._launch_plan = None
        groups = optimizer.param_groups
        params = with_grad(groups)
        if not any(map(dispatch.uses_triton, {param.device for param in params})):
            return None
        reason = launch_plan.unsupported(groups, params)
        if reason is not None:
            if reason not in self._reasons:
                self._reasons.add(reason)
                text = f"{type(optimizer).__name__} uses the reference path: {reason}."
                warnings.warn(text, stacklevel=caller_level())
            return None
        self.forget()
        with torch.no_grad():
            for param in params:
                lay_out(param)
            plan = LaunchPlan(Members(optimizer, params, self._rule, self._master))
        self._launch_plan = plan
        plan.point_to(plan.members.grads())
        return plan

    def adapt(self, optimizer: Optimizer) -> None:
        """Brings the groups and counters of an optimizer that was just loaded into our form."""
        self.forget()
        # A state of torch's optimizer that was not fused says so, and counts steps on the CPU.
        for group in optimizer.param_groups:
            for name, value in _FIXED.items():
                # None lets torch choose, which it must not do for "fused".
                if group.get(name) is not None or (name == "fused" and name in group):
                    group[name] = value
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if state.get("step") is not None:
                    steps = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
                    state["step"] = steps


class Members:
    """The parameters of an optimizer that had gradients, and their states.

    Args:
        optimizer: Whose they are.
        params: Those with gradients, in the order of the groups.
        rule: What the optimizer computes.
        master: Where the masters of half weights are.
    """

    def __init__(self, optimizer: Optimizer, params: list[Tensor], rule: Rule, master: str) -> None:
        groups = optimizer.param_groups
        self.params, self.rule, self.master = params, rule, master
        self.batches = batches_of(optimizer, params, rule, master)
        self.sharded = any(batch.sharded for batch in self.batches)
        self._names = list(map(rule.state_names, groups))
        self._groups = list(groups)
        self._lengths = list(map(len, map(_PARAMS, groups)))
        self._all = list(chain.from_iterable(map(_PARAMS, groups)))
        self._without = [param for param in self._all if param.grad is None]
        self._states = list(optimizer.state.values())

    def same_params(self, optimizer: Optimizer) -> bool:
        """Whether none joined, left, or has a gradient for the first time."""
        groups = optimizer.param_groups
        return (
            len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
            and list(map(len, map(_PARAMS, groups))) == self._lengths
            and all(map(is_, chain.from_iterable(map(_PARAMS, groups)), self._all))
            and not any(map(is_not, map(_GRAD, self._without), repeat(None)))
        )

    def same_states(self, optimizer: Optimizer) -> bool:
        """Whether each still has the state it had, and needs no other; not what is in it."""
        state = optimizer.state
        return (
            list(map(self.rule.state_names, optimizer.param_groups)) == self._names
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
        )

    def grads(self) -> list[Any]:
        """This rank's gradients, None where there is none any more."""
        return list(map(local_grad if self.sharded else _GRAD, self.params))


class TensorPlan:
    """Everything that torch operations step."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._halves = [
            master_bits.HalfStep(batch.params, batch.columns[-1], members.master)
            if batch.half
            else None
            for batch in members.batches
        ]
        self._dtypes = list(map(_DTYPE, members.params))
        self._sizes = list(map(Tensor.numel, members.params))
        self._strides = strides_of(locals_of(members.params))
        self.on_cpu = all(map(_ON_CPU, members.params))
        """Whether kernels are only used if somebody asks for them."""
        self.devices = {param.device for param in members.params}

    def grads(self, optimizer: Optimizer) -> list[Tensor] | None:
        """This rank's gradients, laid out as the parameters; None if anything else has changed.

        torch's fused step on the CPU takes all tensors for flat memory in the same order.
        """
        members, params = self._members, self._members.params
        if not (
            members.same_params(optimizer)
            and members.same_states(optimizer)
            and list(map(_DTYPE, params)) == self._dtypes
            and list(map(Tensor.numel, params)) == self._sizes
            and all(map(_ON_CPU, params)) is self.on_cpu
        ):
            return None
        here = params if set(map(type, params)) <= PLAIN else locals_of(params)
        if (all(map(Tensor.is_contiguous, here)) or strides_of(here)) != self._strides:
            return None
        try:
            for batch in members.batches:
                for getter, column in zip(batch.getters, batch.columns, strict=True):
                    found: Any = map(getter, batch.states)
                    if not all(map(is_, map(local, found) if batch.sharded else found, column)):
                        return None
        except KeyError:  # one is gone
            return None
        grads = list(map(_GRAD, params))
        if self._strides is True and set(map(type, grads)) <= PLAIN:
            try:
                if all(map(Tensor.is_contiguous, grads)):
                    return grads
            except RuntimeError:  # torch says so of sparse tensors
                pass
        return grads_laid_out(params)

    def run(self, grads: list[Tensor], scaling: Scaling) -> None:
        """Takes the step with `grads`."""
        divisor, skip, unscale_grads = scaling
        if skip is not None and skip.is_cpu:
            if skip:
                return
            skip = None
        for batch, half in zip(self._members.batches, self._halves, strict=True):
            columns, count = batch.columns, len(batch.names)
            own, device = list(batch.own(grads)), batch.device
            moved = Scaling(
                None if divisor is None else divisor.to(device, non_blocking=True),
                None if skip is None else skip.to(device, non_blocking=True),
                unscale_grads,
            )
            params, wide = locals_of(batch.params) if batch.sharded else batch.params, own
            if half is not None:
                count -= 1
                params, wide = half.begin(own)
            steps: list[Tensor] = []
            if count and batch.names[count - 1] == "step":
                count -= 1
                steps = columns[count]
            try:
                lists = TensorLists(params, wide, columns[:count], steps)
                self._members.rule.step(batch.group, lists, moved)
            finally:
                if half is not None:
                    half.end(params)
            if half is not None and unscale_grads and divisor is not None:
                torch._foreach_copy_(own, wide)
        if self._members.sharded:  # their parts were written
            torch.autograd.graph.increment_version(self._members.params)


def always_fused(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` for torch's constructor; a SettingError if they ask for another step."""
    rest = dict(settings)
    for name, value in _FIXED.items():
        given = rest.pop(name, None)
        if given not in (None, value):
            raise SettingError(
                f"{name} must be {value} in gradscale's {kind.__name__}, got {given!r}."
            )
    return {**rest, "fused": True}


def steps_fused(kind: type[Kind]) -> type[Kind]:
    """`kind`, optimizers that hold a `FusedStep` as `_fused`, with the methods that use it."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, or skips where a scaler says so; returns what `closure` returned."""
        return self._fused.step(self, closure)

    def fused_plan(self: Any) -> PlannedStep | None:
        """The step with the gradients that there are now, for a scaler; None without kernels."""
        plan: PlannedStep | None = self._fused.planned(self)
        return plan

    def keep_masters(self: Any, master: str) -> None:
        """Keeps masters in another way from here on, and converts those that exist."""
        self._fused.keep_masters(master)

    def make_states(self: Any, params: list[Tensor]) -> None:
        """Makes the states of `params`, which their first step would make."""
        self._fused.make_states(self, params)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does, also for compiled functions."""
        theirs = "fused" in self.defaults  # torch's setting: not of an optimizer that is only ours
        super(kind, self).add_param_group(
            always_fused(type(self), param_group) if theirs else param_group
        )
        found = next((p for p in self.param_groups[-1]["params"] if p.is_complex()), None)
        if found is not None:
            self.param_groups.pop()
            name = type(self).__name__
            raise SettingError(
                f"gradscale's {name} does not support complex parameters, got {found.dtype}. Pass "
                "those to an optimizer of torch.optim."
            )
        self._handle = OptimizerHandle(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Loads the state of an optimizer of the same name, ours or torch's."""
        with master_bits.exact_states(self):
            super(kind, self).load_state_dict(state_dict)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {**super(kind, self).__getstate__(), "_fused": copy.copy(self._fused)}

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        super(kind, self).__setstate__(
            _counted(state) if issubclass(kind, (Adam, AdamW)) else state
        )
        self._fused.adapt(self)
        if not hasattr(self, "_handle"):  # a copy, and not a state that is loaded
            self._handle = OptimizerHandle(self)

    methods = (step, fused_plan, keep_masters, make_states, add_param_group, load_state_dict)
    for method in (*methods, __getstate__, __setstate__):
        method.__qualname__ = f"{kind.__qualname__}.{method.__name__}"
        setattr(kind, method.__name__, method)
    kind._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return kind


def _counted(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with a counter for every parameter that has a master and was never stepped.

    torch's Adam looks for one in every state that is not empty.
    """
    states = {}
    for key, own in state["state"].items():
        missing = isinstance(own, dict) and bool(own) and "step" not in own
        states[key] = {**own, "step": torch.zeros(())} if missing else own
    return {**state, "state": defaultdict(dict, states)}
