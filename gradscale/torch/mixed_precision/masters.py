"""Masters for any optimizer: it steps float32 numbers, and the model has half weights.

The optimizer's groups hold the weights, so `zero_grad()`, groups added later and schedulers see
what they always do. Only while it steps, masters take their places, with gradients in float32 and
with the states of the weights: the same dictionaries, under one more key. Masters are kept
here and not in the optimizer's state, because torch takes a state that is not empty for one that an
optimizer has made. `optimizer.state_dict()` has them all the same, beside the averages.

The optimizers of gradscale.torch.optim have masters of their own, see optim/fused.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError
from gradscale.torch.grads.collect import local_grads, with_grad
from gradscale.torch.grads.dtensor import all_plain, local, locals_of
from gradscale.torch.grads.scale import constant, move
from gradscale.torch.mixed_precision.master_store import KeptMaster, MasterStore
from gradscale.torch.optim import master_bits
from gradscale.torch.optim.master_bits import HALF_DTYPES, LARGEST, FlatWeights

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")
_VERSION, _TENSOR_VERSION = attrgetter("version"), attrgetter("_version")
_HALVES, _STRIDED = frozenset(HALF_DTYPES), {torch.strided}


@dataclass(slots=True, eq=False)
class Members:
    """The parameters of a step: half weights and their masters, and others."""

    source: dict[int, KeptMaster]
    """Where the masters come from, which is another after loading."""
    params: list[Tensor]
    """All of them, as the step was given them."""
    weights: list[Tensor]
    others: list[Tensor]
    kept: list[KeptMaster]
    masters: list[Tensor]
    own: list[list[Tensor]]
    """The parameters of every group."""
    standing: list[list[Tensor]]
    """What is in every group while masters are."""
    local_weights: list[Tensor]
    addresses: list[int]
    plain: bool
    """Whether no weight is a DTensor."""
    lows: list[Tensor]
    """The low bits, in the mode "split"."""
    flat: FlatWeights | None
    new: bool = True
    """Whether the states of weights have not been looked at."""
    states: list[dict[str, Any]] = field(default_factory=list)
    aside: list[tuple[Tensor, Any]] = field(default_factory=list)
    """Gradients of other parameters, as they were before the step."""


class Masters:
    """The masters of the float16 and bfloat16 parameters of an optimizer.

        masters = Masters(optimizer)
        with masters.stepped(factor):   # after the backward pass
            optimizer.step()            # moves the masters, which are then rounded to the weights

    Args:
        optimizer: Whose groups hold the weights.
        mode: "float32" beside each weight, or "split": 16 more bits, which make a whole float32 for
            the time of a step.
    """

    def __init__(self, optimizer: Optimizer, mode: str = "float32") -> None:
        self._optimizer = optimizer
        self.store = MasterStore(optimizer, mode, self.weights)
        self._plan: Members | None = None
        """The members of the last step, if the next one may have the same."""
        self._entered: Members | None = None
        self._making_states = False
        """Whether the optimizer takes a step that moves nothing, to make its states."""

    # What there is.

    @property
    def in_place(self) -> bool:
        """Whether masters are in the optimizer's groups now."""
        return self._entered is not None

    def needed(self, params: Sequence[Tensor]) -> bool:
        """Whether one of `params` must have a master to be stepped, or may have had one."""
        return bool(params) and (
            bool(self.store.kept) or not _HALVES.isdisjoint(map(_DTYPE, params))
        )

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

    def master(self, weight: Tensor) -> Tensor:
        """The master of `weight`, made if there is none; a copy in the mode "split"."""
        return master_bits.master_of(weight, self.store.keep(weight).values)

    # A step.

    def begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook of the optimizer: refuses steps that would move weights and not their masters."""
        params = with_grad(optimizer.param_groups)
        if self._entered is not None or not self.needed(params):
            return
        if _moves_nothing(optimizer, params):
            self.gradients(constant(1.0))  # so that the states are float32
            self._making_states = True
            return
        raise CallOrderError(
            "optimizer.step() was called, which would update the weights and not their "
            "masters. Call mp.step() instead. With Lightning, call step() of the optimizer "
            "that self.optimizers() or fabric.setup() returned."
        )

    def end_step(self, *_: Any) -> None:
        """A hook of the optimizer: ends a step that was taken to make its states."""
        if self._making_states:
            self._making_states = False
            self.write_back(False)

    @torch.no_grad()
    def gradients(self, factor: Tensor) -> None:
        """Puts masters into the groups, with the weights' gradients times `factor`, in float32.

        The gradients of the weights stay as they are; those of float32 parameters are put aside.
        """
        self.end_step()  # one that has raised
        members = self._members(with_grad(self._optimizer.param_groups))
        for master, grad in zip(members.masters, _widened(members, factor), strict=True):
            master.grad = grad
        members.aside = [(param, param.grad) for param in members.others]
        for param, before in members.aside:
            param.grad = before * move(factor, before.device)
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
        weights, flat = members.local_weights, members.flat
        if flat is not None and flat.views and torch.cat(flat.views).abs().amax() <= LARGEST:
            torch._foreach_copy_(weights, members.masters)  # none becomes infinite
        else:
            master_bits.write_all(weights, members.lows, members.masters, flat)
        if not members.plain:  # their parts were written
            torch.autograd.graph.increment_version(members.weights)
        for kept, weight in zip(members.kept, weights, strict=True):
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
        for master in members.masters:
            master.grad = None

    @contextmanager
    def stepped(self, factor: Tensor) -> Iterator[None]:
        """`gradients()` before the block, and `write_back()` after it, done unless it raises."""
        self.gradients(factor)
        done = False
        try:
            yield
            done = True
        finally:
            self.write_back(done)

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

    def moved_by(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of the optimizer, which moves masters, and the weights after them."""

        def move_masters(*args: Any, **kwargs: Any) -> Any:
            if self.in_place or not self.needed(self.weights()):
                return method(*args, **kwargs)
            self.enter()
            try:
                return method(*args, **kwargs)
            finally:
                self.write_back(True)

        return move_masters

    def _members(self, params: list[Tensor]) -> Members:
        """The members of a step with the gradients of `params`; the last ones if they hold."""
        plan = self._plan
        known = plan is not None and plan.source is self.store.kept
        if plan is None or not known or not _holds(plan, params, self._optimizer.param_groups):
            plan = self._new_members(params, again=True)
            self._plan = None if plan.lows and plan.flat is None else plan
        elif plan.flat is not None and plan.lows:
            plan.flat.join(plan.local_weights)
        elif list(map(_VERSION, plan.kept)) != list(map(_TENSOR_VERSION, plan.local_weights)):
            for kept, master, weight in zip(
                plan.kept, plan.masters, plan.local_weights, strict=True
            ):
                if kept.version != weight._version:
                    master_bits.adopt_edits([weight], [local(master)])
                    kept.version = weight._version
        return plan

    def _new_members(self, params: list[Tensor], again: bool = False) -> Members:
        """Finds the masters of `params`, and forgets those of weights that are no longer there.

        `again` says that they may be used in further steps.
        """
        store, mode = self.store, self.store.mode
        store.drop_others()
        each_once = {id(param): param for param in params}.values()
        weights = [param for param in each_once if param.dtype in _HALVES]
        others = [param for param in each_once if param.dtype not in _HALVES]
        for param in others:
            store.make_whole(param)
        kept = list(map(store.keep, weights))
        parts: list[Tensor] = locals_of(weights)
        stored = [local(each.values[master_bits.KEYS[mode]]) for each in kept]
        lows = stored if mode == "split" else []
        small = again and master_bits.are_small(parts)
        flat = FlatWeights(parts, stored, mode) if small else None
        with torch.no_grad():
            masters = master_bits.join_all(parts, lows, flat) if lows else stored
        own = [list(group["params"]) for group in self._optimizer.param_groups]
        places = dict(zip(map(id, weights), masters, strict=True))
        return Members(
            source=store.kept,
            params=params,
            weights=weights,
            others=others,
            kept=kept,
            masters=masters,
            own=own,
            standing=[[places.get(id(p), p) for p in each] for each in own],
            local_weights=parts,
            addresses=list(map(Tensor.data_ptr, parts)),
            plain=all_plain(weights),
            lows=lows,
            flat=flat,
        )

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


def _holds(plan: Members, params: list[Tensor], groups: list[dict[str, Any]]) -> bool:
    """Whether a step with the gradients of `params` has the members of `plan`."""
    return (
        len(params) == len(plan.params)
        and all(map(is_, params, plan.params))
        and len(groups) == len(plan.own)
        and all(
            len(group["params"]) == len(own) and all(map(is_, group["params"], own))
            for group, own in zip(groups, plan.own, strict=True)
        )
        and list(map(Tensor.data_ptr, plan.local_weights)) == plan.addresses
    )


def _widened(members: Members, factor: Tensor) -> list[Tensor]:
    """The gradients of the weights times `factor`, in float32."""
    weights = members.weights
    grads: list[Any] = [w.grad for w in weights] if members.plain else local_grads(weights)
    if set(map(_LAYOUT, grads)) == _STRIDED:
        flat = members.flat
        wide = list(map(torch.empty_like, members.masters)) if flat is None else flat.wides
        torch._foreach_copy_(wide, grads)
        if flat is not None:
            flat.wide.mul_(factor)
            return wide
        for device in {grad.device for grad in grads}:
            here = [each for each in wide if each.device == device]
            torch._foreach_mul_(here, move(factor, device))
        return wide
    return [
        torch.empty_like(master).copy_(grad).mul_(move(factor, grad.device))
        if grad.layout is torch.strided
        else grad.float() * move(factor, grad.device)
        for master, grad in zip(members.masters, grads, strict=True)
    ]


def _moves_nothing(optimizer: Optimizer, params: list[Tensor]) -> bool:
    """Whether gradients and learning rates are 0, as where torch's `get_state_dict()` steps."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    if not all(rate is not None and float(rate) == 0 for rate in rates):
        return False
    grads = local_grads(params)
    return all(grad.layout is torch.strided and not grad.count_nonzero() for grad in grads)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALVES
