"""The cached plan of a step by kernels, checked before every step.

A kernel is handed addresses, so everything behind them is checked: who the parameters are, where
they, their gradients and their states lie, and in what layout. If all of it is as in the step
before, which is the usual case, nothing is sent to the device.
"""

from __future__ import annotations

import functools
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradscale.torch.grads import dispatch
from gradscale.torch.grads.dtensor import all_plain, local, local_grad, locals_of
from gradscale.torch.optim import master_bits
from gradscale.torch.optim.batch import Batch, Group, Scaling
from gradscale.torch.step.contract import step_on_device

if TYPE_CHECKING:
    from gradscale.torch.grads.triton.tables import Table
    from gradscale.torch.optim.fused import Members

_BYTES, _VERSION = attrgetter("nbytes"), attrgetter("_version")
_INSTANCE_OVERRIDES = {"step", "grad_scale", "found_inf"}
"""What somebody may have put on an optimizer that only `step()` takes into account."""


def unsupported(groups: list[Group], params: list[Tensor]) -> str | None:
    """Why kernels cannot step `params`, those with gradients; None if they can."""
    if len({param.device for param in params}) > 1:
        return "the parameters are on several devices"
    if len(set(map(id, params))) < len(params):
        return "the kernel does not support parameters that occur twice"
    reasons = chain([_unsupported_setting(groups)], map(_unsupported_param, params))
    return next(filter(None, reasons), None)


def _unsupported_setting(groups: list[Group]) -> str | None:
    """Which setting the kernel does not implement; None if it does all."""
    for group in groups:
        lr = group["lr"]
        if isinstance(lr, Tensor) and not dispatch.uses_triton(lr.device):
            return (
                "the kernel supports only learning rates that are numbers or tensors on the device"
            )
        if group.get("amsgrad"):
            return "the kernel does not support amsgrad"
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            return "the kernel does not support betas that are tensors"
    return None


def _unsupported_param(param: Tensor) -> str | None:
    """Why the kernel cannot step `param` with its gradient; None if it can."""
    grad, here = local_grad(param), local(param)
    if param.dtype not in dispatch.DTYPES:
        return "the kernel supports only float32, float16 and bfloat16 parameters"
    if grad.layout is not torch.strided:
        return "the kernel supports only dense gradients"
    if grad.dtype is not here.dtype or grad.shape != here.shape:
        return "the kernel supports only gradients of the format and shape of their parameters"
    if not all_plain([grad]):
        return "the kernel supports only gradients that are plain tensors"
    return (
        None
        if dispatch.dense(here)
        else ("the kernel supports only parameters without gaps in memory")
    )


class _Launch:
    """One launch of the kernel: a batch, and the addresses of everything in it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        here = locals_of(batch.params)
        self.table: Table = dispatch.new_table([p.numel() for p in here], batch.device)
        """Rows of addresses: gradients, parameters, and the states called `batch.names`."""
        # The batch holds the states, so that no other tensor comes to lie where one of them lies.
        self._states_at = list(map(Tensor.data_ptr, chain.from_iterable(batch.columns)))
        self._fixed = [*map(Tensor.data_ptr, here), *self._states_at]

    def states_hold(self) -> bool:
        """Whether the states are where they were."""
        batch = self.batch
        found = chain.from_iterable([map(getter, batch.states) for getter in batch.getters])
        try:
            here = map(local, found) if batch.sharded else found
            return list(map(Tensor.data_ptr, here)) == self._states_at
        except (KeyError, TypeError):  # one is gone, or is no tensor any more
            return False

    def point_to(self, addresses: list[int]) -> None:
        """Takes the `addresses` of all gradients of the step."""
        self.table.point_to([*self.batch.own(addresses), *self._fixed])

    def run(self, members: Members, scaling: Scaling) -> None:
        """Launches the kernel."""
        batch, divisor = self.batch, scaling.divisor
        dispatch.module("fused_step").step(
            self.table,
            batch.dtype,
            members.master if batch.half else None,
            batch.group,
            None if divisor is None else divisor.to(torch.float32),
            scaling.skip,
            scaling.unscale_grads,
            *members.rule.kernel_rule(batch.group),
        )


class LaunchPlan:
    """Everything that the kernels step, with its addresses."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._launches = [_Launch(batch) for batch in members.batches]
        self._params_at = dispatch.addresses_of(locals_of(members.params))
        self._grads_at: Any = None
        self._bytes: list[int] = []
        """Of the gradients: a view, or another format, at the same address has another number."""
        self._adopts = members.master == "float32" and any(b.half for b in members.batches)
        """Whether there are float32 masters, which must take over what others write to weights."""
        self._versions = list(map(_VERSION, members.params))
        """Of the parameters, when they were last read or written here."""

    def tables(self) -> list[tuple[torch.dtype, Table]]:
        """The dtype and the table of each launch; the first row of a table are gradients."""
        return [(launch.batch.dtype, launch.table) for launch in self._launches]

    def point_to(self, grads: list[Any]) -> bool:
        """Takes the addresses of `grads`, this rank's; False if they are not like those before."""
        known = self._grads_at
        try:
            found: Any = dispatch.addresses_of(grads)
        except (TypeError, RuntimeError):  # one is missing, or sparse
            return False
        sizes = list(map(_BYTES, grads))
        if known is not None and sizes != self._bytes:
            return False
        self._bytes = sizes
        if known is not None and found == known and not dispatch.capturing():
            return True
        if not all_plain(grads) or (known is not None and found.layout != known.layout):
            return False
        self._grads_at = found
        for launch in self._launches:
            launch.point_to(found.pointers)
        return True

    def grads_hold(self, optimizer: Optimizer) -> bool:
        """Whether kernels step the same parameters as before; takes their gradients' addresses."""
        members = self.members
        return (
            dispatch.uses_triton(members.params[0].device)
            and members.same_params(optimizer)
            and self.point_to(members.grads())
        )

    def rest_holds(self, optimizer: Optimizer) -> bool:
        """Whether all but the gradients is as it was: settings, states, and where they are."""
        members = self.members
        return (
            _unsupported_setting(optimizer.param_groups) is None
            and members.same_states(optimizer)
            and all(launch.states_hold() for launch in self._launches)
            and dispatch.addresses_of(locals_of(members.params)) == self._params_at
        )

    def run(self, state: dict[Any, dict[str, Any]], scaling: Scaling) -> None:
        """Takes the step."""
        params = self.members.params
        if self._adopts:
            self._adopt_edits(state)
        for launch in self._launches:
            launch.run(self.members, scaling)
        # A kernel leaves no trace for autograd.
        torch.autograd.graph.increment_version(params)
        if self._adopts:
            self._versions = list(map(_VERSION, params))

    @torch.no_grad()
    def _adopt_edits(self, state: dict[Any, dict[str, Any]]) -> None:
        """Writes weights that others have changed since the last step to their masters."""
        params = self.members.params
        versions = list(map(_VERSION, params))
        if versions == self._versions:
            return
        for param, then, now in zip(params, self._versions, versions, strict=True):
            if then != now and param.dtype in master_bits.HALF_DTYPES:
                master = state[param][master_bits.MASTER]
                master_bits.adopt_edits([local(param)], [local(master)])


class PlannedStep(NamedTuple):
    """A step whose gradients have been found and checked: `step.contract.FusedPlan`."""

    optimizer: Optimizer
    plan: LaunchPlan
    checked: bool
    """Whether all but the gradients has been checked, too."""
    unscale_grads: bool

    @property
    def params(self) -> list[Tensor]:
        """The parameters that have gradients, in the order of the groups."""
        return self.plan.members.params

    def tables(self) -> list[tuple[torch.dtype, Table]]:
        """The dtype and the address table of every launch; a table's first row are gradients."""
        return self.plan.tables()

    def step(self, divisor: Tensor, skip: Tensor) -> None:
        """Steps with gradients divided by `divisor`, unless `skip` is not 0."""
        optimizer, plan = self.optimizer, self.plan
        if _calls_user_code(optimizer) or not (self.checked or plan.rest_holds(optimizer)):
            step_on_device(optimizer, divisor, skip, (), {})
        else:
            # The wrapper that torch puts around `step()` costs as much as the launch of a kernel.
            plan.run(optimizer.state, Scaling(divisor, skip, self.unscale_grads))


def _calls_user_code(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step()` would run more than our own step: hooks, overrides, a profiler."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or profiler._is_profiler_enabled
        or not vars(optimizer).keys().isdisjoint(_INSTANCE_OVERRIDES)
        or not _steps_by_us(type(optimizer))  # type: ignore[arg-type]
    )


_HOOK_CODE = Optimizer.profile_hook_step(len).__code__
"""Of the wrapper that torch puts around `step()` of every class."""


@functools.cache
def _steps_by_us(kind: type) -> bool:
    """Whether such optimizers step by our own `step()`, and not by one of a subclass."""
    step: Any = kind.step  # type: ignore[attr-defined]
    while getattr(step, "__code__", None) is _HOOK_CODE:
        step = step.__wrapped__
    return str(getattr(step, "__globals__", {}).get("__name__")).startswith(f"{__package__}.")
