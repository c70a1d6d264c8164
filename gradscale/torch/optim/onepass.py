"""What our optimizers share: a kernel steps them where it can, and else torch does.

Masters of weights in float16 and bfloat16 are in the state, beside the averages, which are always
float32. After a step by the kernel `.grad` is still scaled, unless `unscale_grads` asks otherwise.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.errors import SettingError, caller_level
from gradscale.torch import kernels
from gradscale.torch.optim import masters
from gradscale.torch.optim.members import Members

if TYPE_CHECKING:
    from gradscale.torch._triton.pieces import Step

_FIXED = {"fused": True, "foreach": False, "differentiable": False}
"""Settings of torch's that have but one value here."""
_OTHER_LAYOUT = "the kernel takes gradients laid out as their parameters"
_LISTS = list[tuple[dict[str, Any], list[Tensor]]]
"""Groups, and their parameters with gradients."""


class OnePass(torch.optim.Optimizer):
    """An optimizer of torch's whose step a kernel can take."""

    _step_supports_amp_scaling = True
    _begins_with_zeros = True
    """A first step that is skipped leaves states as they are made."""

    def __init__(
        self, *args: Any, master: str = "float32", unscale_grads: bool = False, **settings: Any
    ) -> None:
        if master not in masters.MODES:
            raise SettingError(f"master must be one of {', '.join(masters.MODES)}, got {master!r}.")
        self._master = master
        self._unscale_grads = unscale_grads
        super().__init__(*args, **settings)
        self._forget()

    def _forget(self) -> None:
        """Drops everything that is known about addresses."""
        self._members: dict[int, list[Members]] = {}
        self._dicts: list[int] = []
        self._told: set[str] = set()
        self._copies = False
        """Whether there have been gradients laid out other than their parameters."""
        self._held: list[Any] = []
        """The gradients that the kernel reads, until it is launched."""

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps, or, where a scaler says so, does not; what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists: _LISTS = [
            (group, [param for param in group["params"] if param.grad is not None])
            for group in self.param_groups
        ]
        devices = {param.device for _, params in lists for param in params}
        if not any(map(kernels.take, devices)):
            self._step_by_torch()
            return loss
        odd = next(filter(None, map(self._odd, self.param_groups)), None)
        odd = odd if len(devices) == 1 else "the parameters are on several devices"
        members = self._find_members(lists) if odd is None else []
        if isinstance(members, str):
            odd = members
        if odd is not None:
            if odd not in self._told:
                self._told.add(odd)
                name = type(self).__name__
                warnings.warn(f"{name} takes the reference path: {odd}.", stacklevel=caller_level())
            self._step_by_torch()
            return loss
        for number, (group, _) in enumerate(lists):
            for some in members[number]:
                self._launch(self._told_to(some, group), group)
        self._held = []
        for each in members.values():
            for some in each:
                some.note_written()
        return loss

    def _told_to(self, members: Members, group: dict[str, Any]) -> Step:
        """What the kernel is told of `members`."""
        from gradscale.torch._triton.pieces import Step

        return Step(
            table=members.table,
            dtype=members.dtype,
            master=self._master if members.dtype in masters.HALVES else None,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            divisor=getattr(self, "grad_scale", None),
            skip=getattr(self, "found_inf", None),
            back=self._unscale_grads,
        )

    def _find_members(self, lists: _LISTS) -> dict[int, list[Members]] | str:
        """What the kernels step, by the number of the group; or why they cannot."""
        params = [param for _, each in lists for param in each]
        grads = [param.grad for param in params]
        self._held = _laid_out(grads, params) if self._copies else grads
        facts = kernels.facts_of(self._held)
        if facts is None:
            return "the kernel takes dense gradients of plain tensors"
        dicts = list(map(id, self.state.values()))
        known = dicts == self._dicts
        place = 0
        for number, (group, each) in enumerate(lists):
            mine = facts[place : place + len(each)]
            place += len(each)
            odd = self._find_in_group(number, group, each, mine, known)
            if odd is _OTHER_LAYOUT and not self._copies and not self._unscale_grads:
                self._copies = True
                return self._find_members(lists)
            if odd is not None:
                return odd
        self._dicts = list(map(id, self.state.values()))
        return self._members

    def _find_in_group(
        self,
        number: int,
        group: dict[str, Any],
        params: list[Tensor],
        facts: list[kernels.Fact],
        known: bool,
    ) -> str | None:
        """Finds the members of a group; or says why they cannot be found.

        `known` if the states are the same dictionaries as before.
        """
        before = self._members.get(number, [])
        formats = {fact[2]: None for fact in facts}
        if known and len(before) == len(formats) > 0:
            lists = [_of_format(dtype, params, facts) for dtype in formats]
            if all(some.are(*each) for some, each in zip(before, lists, strict=True)):
                self._follow_edits(before)
                return None
        self._members[number] = []
        for dtype in formats:
            own, theirs = _of_format(dtype, params, facts)
            odd = _odd_params(own, theirs)
            if odd is not None:
                return odd
            names = [*self._averages(group), *(["step"] if self._counts(group) else [])]
            if dtype in masters.HALVES:
                names.append(masters.WHOLE if self._master == "float32" else masters.LOW)
            states = [self._state_of(param, group) for param in own]
            members = Members(own, states, names)
            members.point_to(theirs)
            self._members[number].append(members)
        return None

    def _follow_edits(self, members: list[Members]) -> None:
        """Takes what others have written to weights over into their float32 masters."""
        for some in members if self._master == "float32" else ():
            if some.dtype in masters.HALVES:
                for place in some.edited():
                    masters.follow(some.params[place], some.states[place])

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of `param`, made if there is none, as the kernel takes it."""
        state: dict[str, Any] = self.state[param]
        averages = self._averages(group)
        if self._counts(group):
            # torch's SGD does not count; it has a buffer from the first step on.
            begun = any(state.get(name) is not None for name in averages)
            steps = state.get("step", float(begun))
            state["step"] = torch.as_tensor(steps, dtype=torch.float32, device=param.device)
        for name in averages:
            value = state.get(name)
            if value is None:
                state[name] = torch.zeros_like(param, dtype=torch.float32)
            elif value.dtype is not torch.float32 or value.stride() != param.stride():
                state[name] = torch.zeros_like(param, dtype=torch.float32).copy_(value)
        if param.dtype in masters.HALVES:
            new = masters.WHOLE not in state
            masters.settle(param, state, self._master)
            if self._master == "float32" and not new:
                masters.follow(param, state)
        return state

    # torch's own step.

    def _step_by_torch(self) -> None:
        """Takes torch's own step, with masters in the place of their weights."""
        # Without the wrapper that calls the hooks, which our own step has called already.
        step = inspect.unwrap(super().step.__func__)  # type: ignore[attr-defined]
        with self._masters_in_place():
            step(self)

    @contextmanager
    def _masters_in_place(self) -> Iterator[None]:
        """Has masters stand where their weights are, and writes the weights afterwards."""
        lists = [group["params"] for group in self.param_groups]
        stands: dict[int, Tensor] = {}
        for group, params in zip(self.param_groups, lists, strict=True):
            for param in params:
                if param.dtype in masters.HALVES and param.grad is not None:
                    state = self._state_of(param, group)
                    stand = masters.master_of(param, state)
                    stand.grad = param.grad.float()
                    kept = (masters.WHOLE, masters.LOW)
                    self.state[stand] = {k: v for k, v in state.items() if k not in kept}
                    stands[id(param)] = stand
        try:
            for group, params in zip(self.param_groups, lists, strict=True):
                group["params"] = [stands.get(id(param), param) for param in params]
            yield
        finally:
            for group, params in zip(self.param_groups, lists, strict=True):
                group["params"] = params
                for param in params:
                    stand_in = stands.get(id(param))
                    if stand_in is not None:
                        self._write_back(param, stand_in)

    def _write_back(self, param: Tensor, stand: Tensor) -> None:
        """Takes what became of `stand` over into `param` and its state."""
        self.state[param].update(self.state.pop(stand))
        if self._unscale_grads and param.grad is not None and stand.grad is not None:
            param.grad.copy_(stand.grad)
        stand.grad = None
        masters.put(param, self.state[param], stand, self._master)

    # Saving and loading.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the state of an optimizer of the same name, ours or torch's."""
        seen: list[dict[str, Any]] = []
        # torch rounds every state to the format of its parameter; so look once more at what was
        # loaded, after all hooks of the user have been at it.
        hook = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        saved = seen[0]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, value in saved["state"].get(number, {}).items():
                if param.dtype in masters.HALVES and isinstance(value, Tensor) and name != "step":
                    self.state[param][name] = value.to(param.device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        # A state of torch's optimizer that was not fused says so, and counts steps on the CPU.
        for group in self.param_groups:
            group.update({name: value for name, value in _FIXED.items() if name in group})
            for param in group["params"]:
                steps = self.state.get(param, {}).get("step")
                if steps is not None:
                    steps = torch.as_tensor(steps, dtype=torch.float32, device=param.device)
                    self.state[param]["step"] = steps

    def __getstate__(self) -> dict[str, Any]:
        own = {"_master": self._master, "_unscale_grads": self._unscale_grads}
        return {**super().__getstate__(), **own}


def always_fused(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` for torch's constructor; a SettingError if they ask for another step."""
    rest = dict(settings)
    for name, value in _FIXED.items():
        if rest.pop(name, None) not in (None, value):
            raise SettingError(
                f"{name} is {value} in gradscale's {kind.__name__}, got {not value}."
            )
    return {**rest, "fused": True}


def _laid_out(grads: list[Any], params: list[Tensor]) -> list[Any]:
    """`grads`, copied where they are not laid out as their `params`."""
    return [
        grad
        if grad.layout is not torch.strided or grad.stride() == param.stride()
        else torch.empty_like(param).copy_(grad)
        for grad, param in zip(grads, params, strict=True)
    ]


def _of_format(
    dtype: torch.dtype, params: list[Tensor], facts: list[kernels.Fact]
) -> tuple[list[Tensor], list[kernels.Fact]]:
    """Those of `params` and `facts` whose gradients have this format."""
    if all(fact[2] is dtype for fact in facts):
        return params, facts
    chosen = [(p, f) for p, f in zip(params, facts, strict=True) if f[2] is dtype]
    return [p for p, _ in chosen], [f for _, f in chosen]


def _odd_params(params: list[Tensor], facts: list[kernels.Fact]) -> str | None:
    """What the kernel does not do of `params` with such gradients; None if it does all."""
    if not all(param.dtype in kernels.DTYPES for param in params):
        return "the kernel takes float32, float16 and bfloat16 parameters"
    for param, (_, numel, dtype, layout) in zip(params, facts, strict=True):
        if dtype is not param.dtype or numel != param.numel():
            return "the kernel takes gradients of the format and size of their parameters"
        if not kernels.dense(param):
            return "the kernel takes parameters without gaps"
        if layout != (param.is_contiguous() or param.stride()):
            return _OTHER_LAYOUT
    return None
