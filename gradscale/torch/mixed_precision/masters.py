"""Masters for any optimizer: it steps float32 numbers, and the model has half weights.

The optimizer's groups hold the weights, so `zero_grad()`, groups added later and schedulers see
what they always do. Only while it steps, masters take their places, with gradients in float32 and
with the states of the weights: the same dictionaries, under one more key. Masters are kept
here and not in the optimizer's state, because torch takes a state that is not empty for one that an
optimizer has made. `optimizer.state_dict()` has them all the same, beside the averages.

The optimizers of gradscale.torch.optim have masters of their own, see optim/fused.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch.grads.collect import local_grads, with_grad
from gradscale.torch.grads.dtensor import all_plain, local
from gradscale.torch.grads.scale import move
from gradscale.torch.mixed_precision.members import (
    KeptMaster,
    Members,
    are_few,
    give_gradients,
    make_whole,
    multiply_grads,
    write_float32,
    write_split,
)
from gradscale.torch.optim import master_bits
from gradscale.torch.optim.master_bits import HALF_DTYPES, LOW_BITS, MASTER

_DTYPE = attrgetter("dtype")
_HALVES = frozenset(HALF_DTYPES)


class Masters:
    """The masters of the float16 and bfloat16 parameters of an optimizer.

        masters = Masters(optimizer)
        masters.gradients(factor)       # after the backward pass
        try:
            optimizer.step()            # moves the masters
        finally:
            masters.write_back(done)    # rounds them to the weights

    Args:
        optimizer: Whose groups hold the weights.
        mode: "float32" beside each weight, or "split": 16 more bits, which make a whole float32 for
            the time of a step.
    """

    def __init__(self, optimizer: Optimizer, mode: str = "float32") -> None:
        self._optimizer = optimizer
        self._mode = master_bits.check_mode(mode)
        self._kept: dict[int, KeptMaster] = {}
        """By the id of the weight."""
        self._plan: Members | None = None
        """The members of the last step, if the next one may have the same."""
        self._entered: Members | None = None
        self._saved: dict[str, Any] = {}
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._add_to_saved),
            optimizer.register_load_state_dict_pre_hook(self._note_saved),
            optimizer.register_load_state_dict_post_hook(self._take_saved, prepend=True),
        ]

    def detach(self) -> None:
        """Removes the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    # What there is.

    @property
    def in_place(self) -> bool:
        """Whether masters are in the optimizer's groups now."""
        return self._entered is not None

    def needed(self, params: Sequence[Tensor]) -> bool:
        """Whether one of `params` must have a master to be stepped, or may have had one."""
        return bool(params) and (bool(self._kept) or not _HALVES.isdisjoint(map(_DTYPE, params)))

    def weights(self) -> list[Tensor]:
        """The parameters of the optimizer, with weights also while masters are in their places."""
        return [param for group in self.weight_groups() for param in group["params"]]

    def weight_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with weights also while masters are in their places."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        entered = self._entered
        return groups if entered is None else [{"params": own} for own in entered.own]

    def params(self) -> list[Tensor]:
        """What the optimizer works on, in order: a master for every half weight."""
        return [self.master(p) if p.dtype in _HALVES else p for p in self.weights()]

    def aliases(self) -> dict[int, Tensor]:
        """The weights of the masters that are in the groups now, by the id of the master."""
        members = self._entered
        pairs = [] if members is None else zip(members.masters, members.weights, strict=True)
        return {id(master): weight for master, weight in pairs}

    @torch.no_grad()
    def master(self, weight: Tensor) -> Tensor:
        """The master of `weight`, made if there is none; a copy in the mode "split"."""
        kept = self._kept.get(id(weight))
        if kept is None or kept.weight is not weight or kept.dtype is not weight.dtype:
            kept = self._kept[id(weight)] = KeptMaster(weight)
        values = kept.values
        if MASTER in values:
            values[MASTER] = master_bits.as_state(weight, values[MASTER], MASTER, torch.float32)
        known = MASTER in values
        master_bits.ensure_master(weight, values, self._mode)
        version = local(weight)._version
        if known and MASTER in values and kept.version != version:
            # Somebody may have written to the weight, by loading it or by hand.
            master_bits.adopt_edits([local(weight)], [local(values[MASTER])])
        kept.version = version
        return master_bits.master_of(weight, values)

    def set_master(self, weight: Tensor, value: Tensor) -> None:
        """Makes float32 `value`, the number that `weight` was before it was cast, its master."""
        kept = self._kept[id(weight)] = KeptMaster(weight)
        master_bits.set_master(weight, kept.values, value, self._mode)
        kept.version = local(weight)._version

    def values(self, weight: Tensor) -> dict[str, Any]:
        """The master of `weight` as an optimizer's state would have it; empty if there is none."""
        kept = self._kept.get(id(weight))
        return kept.values if kept is not None and kept.weight is weight else {}

    def pairs(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """All weights that have a master, with what `values` returns, for a copy."""
        return [(kept.weight, kept.values) for kept in self._kept.values()]

    def set_pairs(self, pairs: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
        """Takes over what `pairs()` returned, of this one or of another, and nothing else."""
        self._kept, self._plan = {}, None
        for weight, values in pairs:
            kept = self._kept[id(weight)] = KeptMaster(weight)
            kept.values = values

    # A step.

    @torch.no_grad()
    def gradients(self, factor: Tensor) -> None:
        """Puts masters into the groups, with the weights' gradients times `factor`, in float32.

        The gradients of the weights stay as they are; those of float32 parameters are put aside.
        """
        members = self._members(with_grad(self._optimizer.param_groups))
        give_gradients(members, factor)
        members.aside = [(param, param.grad) for param in members.others]
        multiply_grads(members.others, factor)
        self._enter(members)

    @torch.no_grad()
    def accumulate(self, factor: Tensor) -> None:
        """Adds the gradients of weights, times `factor`, to those of their masters, in float32."""
        for weight in with_grad(self._optimizer.param_groups):
            if weight.dtype in _HALVES:
                master = self.master(weight)
                (grad,) = local_grads([weight])
                wide = grad.float() * move(factor, grad.device)
                master.grad = wide if master.grad is None else master.grad + wide

    def enter(self, weights: list[Tensor] | None = None) -> None:
        """Puts masters into the groups, with the gradients they have; without `weights`, all."""
        if self._entered is None:
            self._enter(self._new_members(self.weights() if weights is None else weights))

    @torch.no_grad()
    def write_weights(self) -> None:
        """Rounds the masters that are in the groups to their weights."""
        members = self._entered
        if members is None or not members.weights:
            return
        if self._mode == "float32":
            write_float32(members.local_weights, members.masters, members.flat)
        else:
            write_split(members)
        if not all_plain(members.weights):  # their parts were written
            torch.autograd.graph.increment_version(members.weights)
        for kept, weight in zip(members.kept, members.local_weights, strict=True):
            kept.version = weight._version

    def write_back(self, done: bool) -> None:
        """Puts the weights back into the groups; if `done`, written from the masters."""
        members = self._entered
        if members is None:
            return
        if done:
            self.write_weights()
        self._entered = None
        for group, own in zip(self._optimizer.param_groups, members.own, strict=False):
            group["params"][: len(own)] = own
        self._give_states_back(members)
        for param, grad in members.aside:
            param.grad = grad
        members.aside = []
        if members.flat is None:
            for master in members.masters:
                master.grad = None

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, computed with the weights of masters that move, and its gradients moved there.

        All masters must be in the groups, see `enter()`.
        """

        @torch.no_grad()
        def evaluate() -> Any:
            members: Any = self._entered
            self.write_weights()
            for master in members.masters:
                master.grad = None  # a closure may clear those of the model alone
            with torch.enable_grad():
                result = closure()
            for weight, master in zip(members.weights, members.masters, strict=True):
                if weight.grad is not None:
                    (grad,) = local_grads([weight])
                    master.grad, weight.grad = grad.float(), None
            return result

        return evaluate

    def _members(self, params: list[Tensor]) -> Members:
        """The members of a step with the gradients of `params`; the last ones if they hold."""
        plan = self._plan
        if plan is None or not plan.holds(params, self._optimizer.param_groups):
            self._plan = None
            plan = self._new_members(params)
            if self._mode == "float32":
                plan.plan()
                self._plan = plan
            return plan
        for kept, master, weight in zip(plan.kept, plan.masters, plan.local_weights, strict=True):
            if kept.version != weight._version:
                master_bits.adopt_edits([weight], [local(master)])
                kept.version = weight._version
        return plan

    def _new_members(self, params: list[Tensor]) -> Members:
        """Finds the masters of `params`, and forgets those of weights that are no longer there."""
        here = set(map(id, self.weights()))
        self._kept = {key: kept for key, kept in self._kept.items() if key in here}
        weights: list[Tensor] = []
        others: list[Tensor] = []
        for param in {id(p): p for p in params}.values():
            (weights if param.dtype in _HALVES else others).append(param)
            if id(param) in self._kept and param.dtype not in _HALVES:
                make_whole(self._kept.pop(id(param)))
        masters = self._masters(weights)
        kept = [self._kept[id(weight)] for weight in weights]
        return Members(params, weights, masters, others, kept, self._optimizer.param_groups)

    def _masters(self, weights: list[Tensor]) -> list[Tensor]:
        """The masters of all of `weights`; those of many small split ones in a few operations."""
        low = [self.values(weight).get(LOW_BITS) for weight in weights]
        if self._mode == "float32" or not are_few(weights) or any(bits is None for bits in low):
            return [self.master(weight) for weight in weights]
        flat = torch._C._nn.flatten_dense_tensors
        with torch.no_grad():
            joined = master_bits.join(flat(weights), flat([local(bits) for bits in low]))
        return list(torch._C._nn.unflatten_dense_tensors(joined, weights))

    def _enter(self, members: Members) -> None:
        """Puts masters into the groups, with the states of their weights."""
        state = self._optimizer.state
        members.states = list(map(state.__getitem__, members.weights))
        if members.new:
            members.new = False
            for own in members.states:  # made for the weights, before there were masters
                own.update({k: v.float() for k, v in own.items() if _is_half(v)})
        state.update(zip(members.masters, members.states, strict=True))
        for group, standing in zip(self._optimizer.param_groups, members.standing, strict=True):
            # In the very lists: some optimizers keep them.
            group["params"][:] = standing
        self._entered = members

    def _give_states_back(self, members: Members) -> None:
        """Leaves the states of masters to their weights alone."""
        state = self._optimizer.state
        moved = [state.pop(master, None) for master in members.masters]
        if not all(map(is_, moved, members.states)):  # an optimizer has made another
            for weight, own in zip(members.weights, moved, strict=True):
                if own is not None:
                    state[weight] = own
        if not all(moved):
            for weight in members.weights:
                if not state.get(weight):
                    state.pop(weight, None)
        members.states = []

    # Saving and loading.

    def _add_to_saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Adds the masters to what `optimizer.state_dict()` returns."""
        states = dict(saved["state"])
        for number, weight in _numbered(saved, self.weights()):
            values = self.values(weight)
            if values:
                states[number] = {**states.get(number, {}), **values}
        return {**saved, "state": states}

    def _note_saved(self, _: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """What torch loads of `saved`: all but the masters, which it would round."""
        self._saved = saved
        states = {}
        for number, state in saved["state"].items():
            rest = state
            if isinstance(state, dict):
                rest = {k: v for k, v in state.items() if k not in (MASTER, LOW_BITS)}
            if rest or not state:
                states[number] = rest
        return {**saved, "state": states}

    def _take_saved(self, optimizer: Optimizer) -> None:
        """Takes states as they were saved, and the masters."""
        saved, self._saved = self._saved, {}
        exact = {}
        self._kept, self._plan = {}, None
        for number, weight in _numbered(saved, self.weights()):
            state = saved["state"].get(number, {})
            found = {k: state[k] for k in (MASTER, LOW_BITS) if k in state}
            exact[number] = {k: v for k, v in state.items() if k not in found}
            if found and weight.dtype in _HALVES:
                kept = self._kept[id(weight)] = KeptMaster(weight)
                device = local(weight).device
                kept.values = {k: v.to(device, copy=True) for k, v in found.items()}
        master_bits.restore_exact(optimizer, {**saved, "state": exact})


def _numbered(saved: dict[str, Any], params: list[Tensor]) -> list[tuple[Any, Tensor]]:
    """The parameters of an optimizer with the numbers that they have in `saved`."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    return list(zip(numbers, params, strict=True))


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALVES
