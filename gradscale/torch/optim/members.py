"""Parameters that one launch of a kernel steps, and where everything of theirs lies.

A kernel is handed addresses, so whatever they stand for is looked at before every step: who the
parameters are, where they, their gradients and their states lie, and in what layout. All of it the
same as in the step before is the usual case, and then nothing is sent to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import kernels
from gradscale.torch.kernels import Fact


class Members:
    """Parameters of one group and one format, with gradients, and their states."""

    def __init__(
        self, params: list[Tensor], states: list[dict[str, Any]], names: Sequence[str]
    ) -> None:
        self.params = params
        self.states = states
        self.dtype = params[0].dtype
        self._places = _places(params)
        self._held = [value for state in states for value in state.values()]
        self._ids = list(map(id, self._held))
        self._facts: list[Fact] = []
        self._fixed = [state[name].data_ptr() for name in names for state in states]
        self.table = kernels.new_table([param.numel() for param in params], params[0].device)
        self.versions = [param._version for param in params]
        """When we looked at or wrote to the parameters last."""

    def are(self, params: list[Tensor], facts: list[Fact]) -> bool:
        """Whether they are still `params`, all in their places, with gradients like `facts`."""
        if [*map(id, params)] != [*map(id, self.params)] or _places(params) != self._places:
            return False
        if [id(value) for state in self.states for value in state.values()] != self._ids:
            return False
        if facts != self._facts:
            if [f[1:] for f in facts] != [f[1:] for f in self._facts]:
                return False
            self.point_to(facts)
        elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.point_to(facts)  # so that what the graph reads is kept
        return True

    def point_to(self, facts: list[Fact]) -> None:
        """Takes the addresses of gradients."""
        self._facts = facts
        addresses = [fact[0] for fact in facts]
        self.table.point_to([*addresses, *[place[0] for place in self._places], *self._fixed])

    def note_written(self) -> None:
        """Tells autograd that the parameters have changed: a kernel leaves no trace of it."""
        torch.autograd.graph.increment_version(self.params)
        self.versions = [param._version for param in self.params]

    def edited(self) -> list[int]:
        """The places of the parameters that somebody else has written to since."""
        return [
            place
            for place, (param, version) in enumerate(zip(self.params, self.versions, strict=True))
            if param._version != version
        ]


def _places(params: list[Tensor]) -> list[tuple[int, Any]]:
    """Addresses and layouts of parameters."""
    return [(param.data_ptr(), param.is_contiguous() or param.stride()) for param in params]
