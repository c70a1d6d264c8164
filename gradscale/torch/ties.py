"""What joins a compiled function to a scaler and to optimizers: numbers, which a graph can hold.

Operators are handed a number and find its owner again. What they must remember between two calls,
windows and outcomes, has numbers of its own, as tensors that travel through the graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError
from gradscale.torch.outcome import Culprit, StepOutcome
from gradscale.torch.window import Window

if TYPE_CHECKING:
    from gradscale.torch.scaling import Scaling

_Thing = TypeVar("_Thing")

KEPT = 100
"""So many windows and so many outcomes of a scaler can still be asked for."""

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Kept(Generic[_Thing]):
    """The last things of a kind, by numbers that can travel through a graph."""

    def __init__(self) -> None:
        self._things: OrderedDict[int, _Thing] = OrderedDict()

    def keep(self, thing: _Thing) -> Tensor:
        """The number of `thing`, as a tensor on the CPU; the old one if it came last."""
        last = next(reversed(self._things), 0)
        if self._things.get(last) is not thing:
            last += 1
            self._things[last] = thing
            if len(self._things) > KEPT:
                self._things.popitem(last=False)
        return torch.tensor(last, device="cpu")

    def recall(self, number: Tensor) -> _Thing:
        """What `keep` gave this number to."""
        thing = self._things.get(int(number))
        if thing is None:
            raise CallOrderError(
                f"A compiled step or loss is remembered for {KEPT} others, and this one is older. "
                "Run its backward pass, or ask what became of it, sooner."
            )
        return thing


class ScalerTie:
    """What a compiled function needs of a scaler."""

    def __init__(self, scaler: Scaling) -> None:
        self.number = register(scaler)
        with torch.inference_mode(False):
            self.order = torch.zeros((), device="cpu")
        """An argument of every operator, which `apply` claims to change: so they stay in order."""
        self.windows: Kept[Window] = Kept()
        self.outcomes: Kept[StepOutcome] = Kept()


class OptimizerTie:
    """What a compiled function needs of an optimizer: **not** `param_groups`.

    Looking there, it would compile anew for every learning rate.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.number = register(optimizer)
        self.params: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        """The very lists, so that what is added to a group is seen."""


def register(owner: object) -> int:
    """A number by which operators find `owner` as long as it lives."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def find(number: int) -> Any:
    """The scaler or optimizer of this `number`."""
    owner = _owners.get(number)
    if owner is None:
        raise CallOrderError(
            "The scaler or optimizer of a compiled function is gone. Keep it as long as its losses "
            "and gradients."
        )
    return owner


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class CompiledOutcome(StepOutcome):
    """The outcome of a compiled step: its values come from the graph, the rest from the original.

    `underflow` is NaN, not None, in a step that did not measure it.
    """

    _tie: ScalerTie
    _number: Tensor

    def _original(self) -> StepOutcome:
        """What the step told outside of the graph."""
        return self._tie.outcomes.recall(self._number)

    def ready(self) -> bool:
        """Whether reading it would wait for nothing."""
        return self._original().ready()

    def verdict(self) -> str:
        """What became of the step, in a few words; **waits for the device**."""
        return self._original().verdict()

    def culprits(self) -> list[Culprit]:
        """The parameters whose gradients were not finite; **waits for the device**."""
        return self._original().culprits()

    def __reduce__(self) -> tuple[Any, ...]:
        """The original alone is copied and pickled."""
        return _itself, (self._original(),)


def _itself(outcome: StepOutcome) -> StepOutcome:
    """`outcome`."""
    return outcome
