"""What our optimizers share: a kernel steps them where it can, and else torch does.

Masters of weights in float16 and bfloat16 are in the state, beside the averages, which are always
float32. After a step by the kernel `.grad` is still scaled, unless `unscale_grads` asks otherwise.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradscale.errors import SettingError, caller_level
from gradscale.torch import kernels
from gradscale.torch.optim import masters
from gradscale.torch.optim.plan import Members, Plan
from gradscale.torch.shards import all_plain, lay_out, local, local_grad
from gradscale.torch.ties import OptimizerTie

if TYPE_CHECKING:
    from gradscale.torch._triton.pieces import Step

_OURS_TO_CALL = {"step", "grad_scale", "found_inf"}
"""What somebody may have put on an optimizer that `step()` has to know of."""
_FIXED = {"fused": True, "foreach": False, "differentiable": False}
"""Settings of torch's that have but one value here."""


class OnePass(torch.optim.Optimizer):
    """An optimizer of torch's whose step a kernel can take."""

    _step_supports_amp_scaling = True
    _begins_with_zeros = True
    """A first step that is skipped leaves states as they are made."""

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        self._master = masters.mode_named(master)
        self._unscale_grads = unscale_grads
        super().__init__(*args, **settings)
        self._forget()

    def keep_masters(self, master: str) -> None:
        """Keeps masters in another way from here on; those that there are go over to it."""
        self._master = masters.mode_named(master)
        self._forget()

    def _forget(self) -> None:
        """Drops everything that is known about addresses."""
        self._plan: Plan | None = None
        self._names: list[tuple[str, ...]] = []
        """What `_rows` said when it was made."""
        self._seen = False
        """Whether the plan is known to have the gradients of the step that comes now."""
        self._told: set[str] = set()

    # What each optimizer says of itself.

    def _averages(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that are as large as the parameters, in the kernel's order."""
        raise NotImplementedError

    def _counts(self, group: dict[str, Any]) -> bool:
        """Whether a state called "step" counts steps."""
        raise NotImplementedError

    def _launch(self, step: Step, group: dict[str, Any]) -> None:
        """Launches the kernel."""
        raise NotImplementedError

    def _odd(self, group: dict[str, Any]) -> str | None:
        """What the kernel does not do of a group's settings; None if it does all."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and not kernels.take(lr.device):
            return "the kernel takes a learning rate that is a number or a tensor on the device"
        return None

    # Stepping.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, or, where a scaler says so, does not; what `closure` returned."""
        loss = None
        if closure is not None:
            self._seen = False
            with torch.enable_grad():
                loss = closure()
        plan = self._look()
        if plan is None:
            with torch.no_grad():
                self._step_by_torch()
        else:
            divisor, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            self._step_by_kernels(plan, divisor, skip)
        return loss

    def step_unheard(self, divisor: Tensor, skip: Tensor) -> bool:
        """Takes the step that `see()` was about; False, with nothing done, if `step()` must.

        The wrapper that torch puts around `step()` costs as much as the launch of a kernel.
        """
        heard = (
            self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or profiler._is_profiler_enabled
            or not vars(self).keys().isdisjoint(_OURS_TO_CALL)
            or not _is_ours(type(self))  # type: ignore[arg-type]
        )
        if heard or not self._seen:
            return False
        plan = self._look()
        if plan is None:
            return False
        self._step_by_kernels(plan, divisor, skip)
        return True

    def _step_by_kernels(self, plan: Plan, divisor: Tensor | None, skip: Tensor | None) -> None:
        """Launches what is planned."""
        for members in plan.members:
            self._launch(self._told_to(members, divisor, skip), members.group)
        plan.note_written(watch=self._watches())

    def see(self) -> Plan | None:
        """The plan whose gradients are those that there are now; None if there is none.

        For a scaler that reads the gradients first: whether the rest of the plan still holds is
        looked at in the step, while the device reads. Hooks may do anything to it before that.
        """
        plan = self._plan
        usable = plan is not None and kernels.take(plan.params[0].device)
        if not usable or not plan.sees(self.param_groups):  # type: ignore[union-attr]
            plan = self._look()
        self._seen = plan is not None and not self._optimizer_step_pre_hooks
        return plan

    def look_away(self) -> None:
        """Ends what `see()` began, whether there was a step or not."""
        self._seen = False

    def _look(self) -> Plan | None:
        """What the kernels step; None, with a reason told once, if they do not."""
        plan, groups, seen = self._plan, self.param_groups, self._seen
        self._seen = False
        odd = next(filter(None, map(self._odd, groups)), None)
        if odd is None and plan is not None and self._names == self._rows(groups):
            there = kernels.take(plan.params[0].device) and (seen or plan.sees(groups))
            if there and plan.stands(self.state):
                if self._watches():
                    self._follow_edits(plan)
                return plan
        self._plan = None
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        devices = {param.device for param in params}
        if not any(map(kernels.take, devices)):
            return None
        if len(devices) > 1:
            odd = "the parameters are on several devices"
        made = self._make_plan(params) if odd is None else odd
        if isinstance(made, str):
            if made not in self._told:
                self._told.add(made)
                text = f"{type(self).__name__} takes the reference path: {made}."
                warnings.warn(text, stacklevel=caller_level())
            return None
        self._plan, self._names = made, self._rows(groups)
        return made

    @torch.no_grad()
    def _follow_edits(self, plan: Plan) -> None:
        """Takes what others have written to weights over into their float32 masters."""
        for place in plan.edited():
            param = plan.params[place]
            if param.dtype in masters.HALVES:
                masters.follow(param, self.state[param])

    def _rows(self, groups: list[dict[str, Any]]) -> list[tuple[str, ...]]:
        """The names of the states that the kernel takes, for every group."""
        return [(*self._averages(g), *(("step",) if self._counts(g) else ())) for g in groups]

    def _watches(self) -> bool:
        """Whether there are float32 masters, which must hear of it if others write to weights."""
        plan = self._plan
        halves = plan is not None and any(some.dtype in masters.HALVES for some in plan.members)
        return halves and self._master == "float32"

    @torch.no_grad()
    def _make_plan(self, params: list[Tensor]) -> Plan | str:
        """A plan for `params`; or why there can be none."""
        odd = next(filter(None, map(_odd_param, params)), None)
        if odd is not None:
            return odd
        for param in params:
            lay_out(param)
        grads = [local_grad(param) for param in params]
        members = []
        numbers = {id(param): number for number, param in enumerate(params)}
        for group, names in zip(self.param_groups, self._rows(self.param_groups), strict=True):
            mine = [param for param in group["params"] if id(param) in numbers]
            for dtype in {param.dtype: None for param in mine}:
                some = [param for param in mine if param.dtype is dtype]
                master = masters.WHOLE if self._master == "float32" else masters.LOW
                rows = (*names, master) if dtype in masters.HALVES else names
                places = [numbers[id(param)] for param in some]
                states = [self._state_of(param, group) for param in some]
                members.append(Members(group, some, places, states, rows))
        plan = Plan(self.param_groups, params, members, self.state)
        return plan if plan.point_to(grads) else "the kernel takes gradients of plain tensors"

    def _told_to(self, members: Members, divisor: Tensor | None, skip: Tensor | None) -> Step:
        """What the kernel is told of `members`."""
        from gradscale.torch._triton.pieces import Step

        group = members.group
        if divisor is not None and divisor.dim():
            divisor = members.own(divisor)
        return Step(
            members.table,
            members.dtype,
            self._master if members.dtype in masters.HALVES else None,
            group["lr"],
            group["weight_decay"],
            group["maximize"],
            None if divisor is None else divisor.to(torch.float32),
            skip,
            self._unscale_grads,
        )

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of `param`, made if there is none, as the kernel takes it."""
        state: dict[str, Any] = self.state[param]
        averages = self._averages(group)
        wide = param.dtype if param.dtype not in kernels.DTYPES else torch.float32
        if self._counts(group):
            # torch's SGD does not count; it has a buffer from the first step on.
            begun = any(state.get(name) is not None for name in averages)
            steps = state.get("step", float(begun))
            state["step"] = torch.as_tensor(steps, dtype=torch.float32, device=param.device)
        for name in averages:
            value = state.get(name)
            if value is None:
                state[name] = torch.zeros_like(param, dtype=wide)
            else:
                state[name] = masters.like(param, value, name, wide)
        if param.dtype in masters.HALVES:
            for name, dtype in ((masters.WHOLE, torch.float32), (masters.LOW, torch.int16)):
                if name in state:
                    state[name] = masters.like(param, state[name], name, dtype)
            new = masters.WHOLE not in state
            masters.settle(param, state, self._master)
            if self._master == "float32" and not new:
                masters.follow(param, state)
        return state

    # torch's own step.

    def _step_by_torch(self) -> None:
        """Takes torch's own step, with masters, and parts of DTensors, in the place of weights."""
        # Without the wrapper that calls the hooks, which our own step has called already.
        step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        # torch's fused step on the CPU takes everything for flat memory in the same order.
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    lay_out(param)
                    if self.state.get(param):
                        self._state_of(param, group)
        with self._stands_in_place():
            step(self)

    @contextmanager
    def _stands_in_place(self) -> Iterator[None]:
        """Has plain float32 tensors stand where half weights and DTensors are.

        Torch's fused steps take no DTensors beside plain tensors, and that of SGD takes none.
        """
        lists = [group["params"] for group in self.param_groups]
        stands: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            for group, params in zip(self.param_groups, lists, strict=True):
                for param in params:
                    odd = param.dtype in masters.HALVES or not all_plain([param])
                    if odd and param.grad is not None and id(param) not in stands:
                        stands[id(param)] = param, self._stand_for(param, group)
            for group, params in zip(self.param_groups, lists, strict=True):
                group["params"] = [stands.get(id(p), (p, p))[1] for p in params]
            yield
        finally:
            for group, params in zip(self.param_groups, lists, strict=True):
                group["params"] = params
            for param, stand in stands.values():
                self._write_back(param, stand)

    def _stand_for(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """What is stepped in the place of `param`, with its gradient and its state."""
        state = self._state_of(param, group)
        stand = local(param).detach()
        grad = local_grad(param)
        if param.dtype in masters.HALVES:
            stand, grad = masters.master_of(param, state), grad.float()
        stand.grad = grad
        kept = (masters.WHOLE, masters.LOW)
        self.state[stand] = {k: local(v) for k, v in state.items() if k not in kept}
        return stand

    def _write_back(self, param: Tensor, stand: Tensor) -> None:
        """Takes what became of `stand` over into `param` and its state."""
        state = self.state[param]
        # What a DTensor has of it was written to already.
        made = self.state.pop(stand).items()
        state.update({name: value for name, value in made if local(state.get(name)) is not value})
        half = param.dtype in masters.HALVES
        if half and self._unscale_grads and param.grad is not None and stand.grad is not None:
            local_grad(param).copy_(stand.grad)
        stand.grad = None
        if half:
            masters.put(param, state, stand, self._master)
        if not all_plain([param]):
            torch.autograd.graph.increment_version([param])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does, also for compiled functions."""
        if "fused" in self.defaults:
            param_group = always_fused(type(self), param_group)
        super().add_param_group(param_group)
        self._tie = OptimizerTie(self)

    # Saving and loading.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of an optimizer of the same name, ours or torch's."""
        seen: list[dict[str, Any]] = []
        # torch rounds every state to the format of its parameter; so look once more at what was
        # loaded: after the user's hooks that come before, and before those that come after.
        hooks = [
            self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given)),
            self.register_load_state_dict_post_hook(
                lambda _: masters.take_unrounded(self, seen[0]), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        if not hasattr(self, "_tie"):
            self._tie = OptimizerTie(self)
        # A state of torch's optimizer that was not fused says so, and counts steps on the CPU.
        for group in self.param_groups:
            for name, value in _FIXED.items():
                # None leaves it to torch, which must not be left whether it is fused.
                if group.get(name) is not None or (name == "fused" and name in group):
                    group[name] = value
            for param in group["params"]:
                steps = self.state.get(param, {}).get("step")
                if steps is not None:
                    steps = torch.as_tensor(steps, dtype=torch.float32, device=param.device)
                    self.state[param]["step"] = steps

    def __getstate__(self) -> dict[str, Any]:
        own = {"_master": self._master, "_unscale_grads": self._unscale_grads}
        return {**super().__getstate__(), **own}


@functools.cache
def _is_ours(kind: type) -> bool:
    """Whether such optimizers step by our `step()`, and not by one of a subclass."""
    step: Any = kind.step  # type: ignore[attr-defined]
    return inspect.unwrap(step) is inspect.unwrap(OnePass.step)


def always_fused(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` for torch's constructor; a SettingError if they ask for another step."""
    rest = dict(settings)
    for name, value in _FIXED.items():
        given = rest.pop(name, None)
        if given not in (None, value):
            raise SettingError(f"{name} is {value} in gradscale's {kind.__name__}, got {given!r}.")
    return {**rest, "fused": True}


def _odd_param(param: Tensor) -> str | None:
    """What the kernel does not do of `param` with its gradient; None if it does all."""
    grad, here = local_grad(param), local(param)
    if param.dtype not in kernels.DTYPES:
        return "the kernel takes float32, float16 and bfloat16 parameters"
    if grad.layout is not torch.strided:
        return "the kernel takes dense gradients"
    if grad.dtype is not here.dtype or grad.shape != here.shape:
        return "the kernel takes gradients of the format and shape of their parameters"
    return None if kernels.dense(here) else "the kernel takes parameters without gaps"
