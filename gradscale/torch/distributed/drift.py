"""Whether ranks that should agree have the same scale, looked at every now and then."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.errors import SettingError, StateError, caller_level
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.telemetry.transport import Sent

Marks = list[tuple[Any, Tensor]]
"""Process groups, and the checksum of each of their ranks."""
EVERY = 64
"""Steps from one mark to the next."""


class Guarded(Protocol):
    """A state of which all ranks must have the same."""

    def guarded(self) -> list[Tensor]:
        """Its values."""

    def restore(self, values: Sequence[Tensor]) -> None:
        """Takes over such values."""


class Drift:
    """A guard against scales that differ from rank to rank, by a checksum of each.

    A mark travels with the words of every 64th step, and is looked at with the next one, so that
    nobody waits for the device.
    """

    def __init__(self, on_drift: str = "raise") -> None:
        if on_drift not in ("raise", "repair"):
            raise SettingError(f'on_drift must be "raise" or "repair", got {on_drift!r}.')
        self._repairs = on_drift == "repair"
        self.wait = 0
        """Steps until checksums travel."""
        self._sent: list[tuple[weakref.ref[Any], Sent]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ("repair" if self._repairs else "raise",)

    def mark(self, state: Guarded) -> Tensor | float:
        """A checksum of `state`, in a step in which checksums travel; else 0.

        First looks at those that have arrived, which all ranks do at the same place: here.
        """
        if self.wait:
            self.wait -= 1
            return 0.0
        self.wait = EVERY - 1
        if capturing():
            return 0.0
        self._check(state)
        words = [
            value.view(torch.int32) if value.is_floating_point() else value
            for value in state.guarded()
        ]
        total = torch.zeros_like(words[0], dtype=torch.int64)
        for place, value in enumerate(words):
            total = total * 31 + value.to(torch.int64) + place
        # A prime, because two binades are 2**24 in the bits of a float32.
        return (total % 16777213).to(torch.float32)

    def take(self, marks: Marks) -> None:
        """Has the `marks` of all ranks come to the host, by the time that others are sent."""
        if self.wait == EVERY - 1 and not capturing():
            self._sent = [(weakref.ref(group), Sent.away(each.clone())) for group, each in marks]

    def _check(self, state: Guarded) -> None:
        """Raises, or repairs `state`, if the marks that have come differ: on all ranks alike."""
        due, self._sent = self._sent, []
        for ref, sent in due:
            group = ref()
            if group is None:
                continue
            marks = sent.read().tolist()
            # One below 0 stands for ranks that differ among themselves.
            sound = next((rank for rank, mark in enumerate(marks) if mark >= 0), 0)
            odd = [rank for rank, mark in enumerate(marks) if mark != marks[sound] or mark < 0]
            if not odd:
                continue
            ranks = [dist.get_global_rank(group, rank) for rank in odd]
            first = dist.get_global_rank(group, sound)
            if not self._repairs:
                raise StateError(
                    f"The scale of the ranks {ranks} differs from that of rank {first}. Load the "
                    'same state and give the same settings everywhere, or pass on_drift="repair".'
                )
            warnings.warn(
                f"The scale of the ranks {ranks} differed from that of rank {first}, and is the "
                "same now.",
                stacklevel=caller_level(),
            )
            values = state.guarded()
            for value in values:
                nccl = value.is_cpu and dist.get_backend(group) == "nccl"
                here = value.cuda() if nccl else value
                dist.broadcast(here, first, group=group)
                value.copy_(here)
            state.restore(values)
