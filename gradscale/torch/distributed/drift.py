"""A check, every 64 steps, that ranks that decide together have the same scale."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

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


class Drift:
    """Compares checksums of the scale between ranks.

    A checksum is part of the report of every 64th step, and is read with the next one, so that
    nothing waits for the device. A state has `guarded()`, the values that must be the same on all
    ranks, and `restore()`, which takes such values.
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

    def mark(self, state: Any) -> Tensor | float:
        """A checksum of `state`, in every 64th step; else 0.

        First compares those that have arrived, which all ranks do at the same place: here.
        """
        if self.wait:
            self.wait -= 1
            return 0.0
        self.wait = EVERY - 1
        if capturing():
            return 0.0
        self._check(state)
        total: Any = 0
        for place, value in enumerate(state.guarded()):
            word = value.view(torch.int32) if value.is_floating_point() else value
            total = total * 31 + word.to(torch.int64) + place
        # A prime, because two binades are 2**24 in the bits of a float32.
        return (total % 16777213).to(torch.float32)

    def take(self, marks: Marks) -> None:
        """Sends the `marks` of all ranks to the host, where they are read with the next ones."""
        if self.wait == EVERY - 1 and not capturing():
            self._sent = [(weakref.ref(group), Sent.away(each.clone())) for group, each in marks]

    def _check(self, state: Any) -> None:
        """Raises, or repairs `state`, if the marks that have come differ: on all ranks alike."""
        due, self._sent = self._sent, []
        for ref, sent in due:
            group = ref()
            if group is None:
                continue
            marks = sent.read().tolist()
            # One below 0 means ranks that differ among themselves.
            sound = next((rank for rank, mark in enumerate(marks) if mark >= 0), 0)
            odd = [rank for rank, mark in enumerate(marks) if mark != marks[sound] or mark < 0]
            if not odd:
                continue
            ranks = [dist.get_global_rank(group, rank) for rank in odd]
            first = dist.get_global_rank(group, sound)
            if not self._repairs:
                raise StateError(
                    f"The scale of the ranks {ranks} differs from that of rank {first}. Load the "
                    'same state and use the same settings on all ranks, or pass on_drift="repair".'
                )
            warnings.warn(
                f"The scale of the ranks {ranks} differed from that of rank {first}. It was "
                "repaired and is now the same on all ranks.",
                stacklevel=caller_level(),
            )
            values = state.guarded()
            for value in values:
                nccl = value.is_cpu and dist.get_backend(group) == "nccl"
                here = value.cuda() if nccl else value
                dist.broadcast(here, first, group=group)
                value.copy_(here)
            state.restore(values)
