"""Masters for any optimizer: it works on float32 numbers, and the model has float16 weights.

The optimizer's groups hold the weights, so that `zero_grad()`, groups added later, schedulers and
checkpoints are what they always were; masters lie beside the averages, in the optimizer's state.
Only while it steps they stand in the groups, with the gradients in float32.

Our own optimizers have masters themselves, and take them with less memory: see optim/onepass.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from gradscale.torch.optim import masters
from gradscale.torch.optim.masters import HALVES, LOW, WHOLE


class Masters:
    """The masters of the float16 and bfloat16 parameters of an optimizer.

        masters = Masters(optimizer)
        masters.gather()            # after the backward pass
        with masters.in_place():
            optimizer.step()        # moves the masters; afterwards the weights are written

    Args:
        optimizer: Whose groups hold the weights.
        mode: "float32" beside each weight, or "split": 16 more bits, which make a whole float32 for
            the time of a step.
    """

    def __init__(self, optimizer: Optimizer, mode: str = "float32") -> None:
        self._optimizer = optimizer
        self._mode = masters.mode_named(mode)
        self._stands: dict[int, tuple[Tensor, Tensor]] = {}
        """Weights and the masters that have their gradients, by the id of the weight."""
        self._weights: list[list[Tensor]] | None = None
        """The groups' own parameters while masters stand there."""
        self._versions: Any = WeakIdKeyDictionary()
        """Of the weights, when we wrote to them last."""
        self._saved: dict[str, Any] = {}
        optimizer.register_load_state_dict_pre_hook(self._note_saved)
        optimizer.register_load_state_dict_post_hook(self._take_saved, prepend=True)

    @property
    def are_in(self) -> bool:
        """Whether masters stand in the optimizer's groups now."""
        return self._weights is not None

    def with_grad(self) -> list[Tensor]:
        """The weights that have gradients."""
        own = self._own_params()
        return [weight for weight in own if weight.dtype in HALVES and weight.grad is not None]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Weights and the masters that have their gradients."""
        return list(self._stands.values())

    @torch.no_grad()
    def gather(self) -> None:
        """Moves the gradients of weights to their masters, in float32, and adds them up there."""
        made, grads = [], []
        for weight in self.with_grad():
            stand, grad = self._stand_for(weight), weight.grad
            if grad is None:  # one that comes twice
                continue
            if grad.layout is not torch.strided or stand.grad is not None:
                wide = grad.float()
                stand.grad = wide if stand.grad is None else stand.grad + wide
            else:
                stand.grad = torch.empty_like(stand)
                made.append(stand.grad)
                grads.append(grad)
            weight.grad = None
        if made:
            torch._foreach_copy_(made, grads)

    def params(self) -> Iterator[Tensor]:
        """What the optimizer works on, in order: masters where there are some."""
        for weight in self._own_params():
            yield self._stand_for(weight) if weight.dtype in HALVES else weight

    def make_all(self) -> None:
        """Makes the masters of all weights, for a step that computes gradients itself."""
        for _ in self.params():
            pass

    def put_in(self) -> None:
        """Has masters stand in the groups: those with gradients, and those that were asked for."""
        if self._weights is not None:
            return
        state = self._optimizer.state
        self._weights = [list(group["params"]) for group in self._optimizer.param_groups]
        for weight, stand in self._stands.values():
            if weight in state:
                own = {k: _widen(v) for k, v in state[weight].items() if k not in (WHOLE, LOW)}
                if own:
                    state[stand] = own
        for group in self._optimizer.param_groups:
            # In the very lists: some optimizers keep them.
            group["params"][:] = [self._stands.get(id(p), (p, p))[1] for p in group["params"]]

    def take_out(self, done: bool = True) -> None:
        """Has the weights stand in the groups again, as their masters are now.

        Gradients are cleared, unless the step is not `done`: then weights have them again, and it
        can be tried once more.
        """
        if self._weights is None:
            return
        weights, self._weights = self._weights, None
        for group, own in zip(self._optimizer.param_groups, weights, strict=False):
            group["params"][: len(own)] = own
        state = self._optimizer.state
        for weight, stand in self._stands.values():
            if stand in state:
                state[weight].update(state.pop(stand))
            if not done and stand.grad is not None:
                weight.grad = stand.grad.to(weight.dtype)
            stand.grad = None
        self.write()
        self._stands.clear()

    @torch.no_grad()
    def write(self) -> None:
        """Writes the weights of the masters that have moved."""
        pairs = self._stands.values()
        if self._mode == "float32":
            if pairs:
                torch._foreach_copy_([weight for weight, _ in pairs], [one for _, one in pairs])
        else:
            for weight, stand in pairs:
                masters.put(weight, self._optimizer.state[weight], stand, self._mode)
        for weight, _ in pairs:
            self._versions[weight] = weight._version

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has masters stand in the groups for a while; weights have gradients if that fails."""
        self.put_in()
        try:
            yield
        except BaseException:
            self.take_out(done=False)
            raise
        self.take_out()

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, computed with the weights of masters that move, and its gradients gathered."""

        def evaluate() -> Any:
            self.write()
            for _, stand in self._stands.values():
                stand.grad = None  # a closure may clear those of the model alone
            result = closure()
            self.gather()
            return result

        return evaluate

    def zero_grad(self) -> None:
        """Clears the gradients of weights and masters."""
        for _, stand in self._stands.values():
            stand.grad = None
        if self._weights is None:
            self._stands.clear()
        for weight in self._own_params():
            weight.grad = None

    def _note_saved(self, _: Optimizer, saved: dict[str, Any]) -> None:
        """Remembers what is about to be loaded."""
        self._saved = saved

    def _take_saved(self, optimizer: Optimizer) -> None:
        """Takes states as they were saved, masters among them."""
        masters.take_unrounded(optimizer, self._saved)
        self._saved = {}
        self._stands.clear()
        self._versions.clear()

    def _own_params(self) -> list[Tensor]:
        """The parameters of the groups, with weights where masters stand."""
        groups = self._optimizer.param_groups
        if self._weights is None:
            return [param for group in groups for param in group["params"]]
        return [param for own in self._weights for param in own]

    @torch.no_grad()
    def _stand_for(self, weight: Tensor) -> Tensor:
        """The master of `weight`, made if there is none."""
        if id(weight) in self._stands:
            return self._stands[id(weight)][1]
        state: dict[str, Any] = self._optimizer.state[weight]
        known = WHOLE in state
        if known:
            state[WHOLE] = masters.like(weight, state[WHOLE], WHOLE, torch.float32)
        masters.settle(weight, state, self._mode)
        # Somebody may have written to the weight, by loading it or by hand.
        if known and WHOLE in state and self._versions.get(weight) != weight._version:
            masters.follow(weight, state)
            self._versions[weight] = weight._version
        stand = masters.master_of(weight, state)
        self._stands[id(weight)] = weight, stand
        return stand


def _widen(value: Any) -> Any:
    """`value`, a state that an optimizer may have made like the weight, like the master."""
    half = isinstance(value, Tensor) and value.dtype in HALVES
    return value.float() if half else value
