"""What a step by kernels is made of, kept as long as it is true.

A kernel is handed addresses, so whatever they stand for is looked at before every step: who the
parameters are, where they, their gradients and their states lie, and in what layout. All of it the
same as in the step before is the usual case, and then nothing is sent to the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.torch import kernels
from gradscale.torch.kernels import Spots
from gradscale.torch.shards import all_plain, local, local_grad, locals_of

if TYPE_CHECKING:
    from gradscale.torch._triton.tables import Table

Groups = list[dict[str, Any]]
_GRAD, _BYTES = attrgetter("grad"), attrgetter("nbytes")


class Members:
    """Parameters of one group and one format, with gradients, and where everything lies."""

    def __init__(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        places: list[int],
        states: list[dict[str, Any]],
        names: Sequence[str],
    ) -> None:
        self.group = group
        self.states = states
        self.dtype = params[0].dtype
        self._sharded = not all_plain(params)
        here = locals_of(params)
        self.table: Table = kernels.new_table([p.numel() for p in here], params[0].device)
        """Rows of addresses: gradients, parameters, and the states called `names`."""
        self._places = places
        """Where they are among all parameters of the plan."""
        self._pick = itemgetter(*names) if len(names) > 1 else partial(_picked, names)
        self._held = list(self._states())
        """The states, so that no other tensor comes to lie where one of them lies."""
        self._addresses = list(map(Tensor.data_ptr, self._held))
        rows = [self._addresses[row :: len(names)] for row in range(len(names))]
        self._fixed = [*[param.data_ptr() for param in here], *chain.from_iterable(rows)]

    def _states(self) -> Iterator[Tensor]:
        """The states that the kernel takes, parameter by parameter, as far as they are here."""
        states = chain.from_iterable(map(self._pick, self.states))
        return map(local, states) if self._sharded else states

    def stand(self) -> bool:
        """Whether the states still lie where they lay."""
        try:
            return list(map(Tensor.data_ptr, self._states())) == self._addresses
        except (KeyError, TypeError):  # one is gone, or is no tensor any more
            return False

    def own(self, values: Tensor) -> Tensor:
        """Those of `values`, one for each parameter of the plan, that are for these."""
        first, count = self._places[0], len(self._places)
        if self._places == list(range(first, first + count)):
            return values[first : first + count]
        return torch.stack([values[place] for place in self._places])

    def point_to(self, addresses: list[int]) -> None:
        """Takes the `addresses` of all gradients of the plan."""
        self.table.point_to([*[addresses[place] for place in self._places], *self._fixed])


class Plan:
    """Everything that the kernels step, and what it is true of."""

    def __init__(
        self,
        groups: Groups,
        params: list[Tensor],
        members: list[Members],
        state: dict[Any, dict[str, Any]],
    ) -> None:
        self.params = params
        """All that have gradients, in order."""
        self.members = members
        self._groups = list(groups)
        self._lists = [list(group["params"]) for group in groups]
        chosen = set(map(id, params))
        self._idle = [p for each in self._lists for p in each if id(p) not in chosen]
        self._sharded = not all_plain(params)
        self._spots = kernels.spots_of_plain(locals_of(params))
        self._states = list(state.values())
        self._sizes: list[int] = []
        """Bytes of the gradients."""
        self._grads: Spots | None = None
        self.versions = [param._version for param in params]
        """Of the parameters, when we looked at them or wrote to them last."""

    def point_to(self, grads: list[Any]) -> bool:
        """Takes the addresses of `grads`, this rank's; False if they are not like those before."""
        known = self._grads
        try:
            spots: Spots | None = kernels.spots_of_plain(grads)
        except (TypeError, RuntimeError):  # one is missing, or sparse
            return False
        # What a shorter view, or another format, at the same address has fewer or more of.
        sizes = list(map(_BYTES, grads))
        if known is not None and sizes != self._sizes:
            return False
        self._sizes = sizes
        if known is not None and spots == known and not kernels.capturing():
            return True
        spots = kernels.spots_of(grads)
        if spots is None or (known is not None and spots.layout != known.layout):
            return False
        self._grads = spots
        for some in self.members:
            some.point_to(spots.addresses)
        return True

    def sees(self, groups: Groups) -> bool:
        """Whether these are still the parameters with gradients; takes the addresses of those."""
        # By identity and in C, because Python takes half a microsecond for each of 161 parameters.
        if not _same(groups, self._groups):
            return False
        for group, known in zip(groups, self._lists, strict=True):
            if not _same(group["params"], known):
                return False
        if any(param.grad is not None for param in self._idle):
            return False
        get = local_grad if self._sharded else _GRAD
        return self.point_to(list(map(get, self.params)))

    def stands(self, state: dict[Any, dict[str, Any]]) -> bool:
        """Whether the parameters and their states lie where they lay."""
        if not _same(state.values(), self._states):
            return False
        if not all(some.stand() for some in self.members):
            return False
        here = locals_of(self.params) if self._sharded else self.params
        return kernels.spots_of_plain(here) == self._spots

    def note_written(self, watch: bool) -> None:
        """Tells autograd that the parameters have changed: a kernel leaves no trace of it.

        `watch` if we want to know of others who write to them.
        """
        torch.autograd.graph.increment_version(self.params)
        if watch:
            self.versions = [param._version for param in self.params]

    def edited(self) -> list[int]:
        """The places of the parameters that somebody else has written to since."""
        pairs = enumerate(zip(self.params, self.versions, strict=True))
        return [place for place, (param, version) in pairs if param._version != version]


def _same(some: Collection[Any], others: Collection[Any]) -> bool:
    """Whether both hold the very same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def _picked(names: Sequence[str], state: dict[str, Any]) -> list[Any]:
    """What `itemgetter` gives for two names or more."""
    return [state[name] for name in names]
