"""Whether ranks that should agree have the same scale, looked at every now and then."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.errors import SettingError, StateError, caller_level
from gradscale.torch.kernels import capturing
from gradscale.torch.outcome import Sent
from gradscale.torch.telling import Marks, device_for

EVERY = 64
"""Steps from one mark to the next."""


class Drift:
    """A guard against scales that differ from rank to rank, by a checksum of each.

    A mark travels with the words of every 64th step, and is looked at with the next one, so that
    nobody waits for the device.
    """

    def __init__(self, on_drift: str = "raise") -> None:
        if on_drift not in ("raise", "repair"):
            raise SettingError(f'on_drift must be "raise" or "repair", got {on_drift!r}.')
        self._repairs = on_drift == "repair"
        self._count = 0
        self._sent: list[tuple[weakref.ref[Any], Sent]] = []
        self._due: list[tuple[weakref.ref[Any], Sent]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ("repair" if self._repairs else "raise",)

    def mark(self, state: Sequence[Tensor]) -> Tensor | float:
        """A checksum of `state`, in a step in which marks travel; else 0.

        First looks at those that have come, which all ranks do at the same place: here.
        """
        self._check(state)
        self._count += 1
        first: Tensor = state[0]
        if self._count % EVERY != 1 or capturing():
            return 0.0
        whole = [value.view(torch.int32) if value.is_floating_point() else value for value in state]
        total = torch.zeros_like(first, dtype=torch.int64)
        for place, value in enumerate(whole):
            total = total * 31 + value.to(torch.int64) + place
        # A prime, because two binades are 2**24 in the bits of a float32.
        return (total % 16777213).to(torch.float32)

    def take(self, marks: Marks) -> None:
        """Has the `marks` of all ranks come to the host, by the time that others are sent."""
        if self._count % EVERY != 1 or capturing():
            return
        sent = [(weakref.ref(process), Sent.away(each.clone())) for process, each in marks]
        self._due, self._sent = self._sent, sent

    def _check(self, state: Sequence[Tensor]) -> None:
        """Raises, or repairs `state`, if the marks that have come differ: on all ranks alike."""
        due, self._due = self._due, []
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
            for value in state:
                here = value.to(device_for(group, value.device))
                dist.broadcast(here, first, group=group)
                value.copy_(here)
