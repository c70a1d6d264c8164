"""Carrying small tensors and step records from the device to the host, without waiting.

Every `update()` makes one small record: its number, the scale before and after, what became of each
step. The record travels to the host behind the work that made it, and is looked at when it has
arrived. On the CPU it is there at once.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.monitor import Move, Step, StepRecord
from gradscale.torch.features import accelerator
from gradscale.torch.grads.fields import RECORD
from gradscale.torch.grads.scale import move, readable

_PER_STEP = 3
"""Integers in a record for each step."""


def event_on(device: torch.device) -> torch.Event | None:
    """An event for the work on `device`; None where there are no events."""
    return torch.Event(device) if device.type == accelerator() else None


class Mark:
    """A place in the work of a device: everything that was queued before `put()` was called.

    One event for several records: making and recording one takes 10 us (H200's host).
    """

    __slots__ = ("_device", "_event", "is_put")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.Event | None = None
        self.is_put = False
        """Whether `put()` was called: work that is queued later needs another mark."""

    def put(self) -> None:
        """Marks the present place, if that was not done."""
        if not self.is_put:
            self.is_put = True
            self._event = event_on(self._device)
            if self._event is not None:
                self._event.record()

    def query(self) -> bool:
        """Whether the device has reached the mark."""
        if self._event is None:
            return event_on(self._device) is None
        return self._event.query()

    def synchronize(self) -> None:
        """Waits until the device has reached the mark."""
        self.put()
        if self._event is not None:
            self._event.synchronize()


class Sent:
    """A tensor on its way to the host, behind the work that made it."""

    __slots__ = ("_arrived", "_value")

    def __init__(self, value: Tensor, arrived: torch.Event | Mark | None) -> None:
        self._value = value
        """In the memory of the host, written to by the time that `arrived` is done."""
        self._arrived = arrived

    @classmethod
    def away(cls, value: Tensor) -> Sent:
        """Sends `value`."""
        arrived = event_on(value.device)
        if arrived is not None:
            pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            value = pinned.copy_(value, non_blocking=True)
            arrived.record()
        return cls(value, arrived)

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return readable(self._value) and (self._arrived is None or self._arrived.query())

    def read(self) -> Tensor:
        """The tensor; waits for the work that made it, and for nothing that was queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._value


class Layout(NamedTuple):
    """What the numbers of a record are about; the same for every replay of a CUDA graph."""

    moves: tuple[tuple[int | str, float], ...]
    """Loss and floor of every scale that may have moved."""
    keys: tuple[Hashable, ...]
    """The ids of the optimizers of every step."""


class Record:
    """What one `update()` did, on its way to the host."""

    __slots__ = ("_read", "_sent", "_words", "extra", "layout", "numbers", "outcomes")

    def __init__(
        self,
        layout: Layout,
        outcomes: Sequence[Any],
        numbers: Tensor | None = None,
        sent: Sent | None = None,
        read: StepRecord | None = None,
    ) -> None:
        self.layout = layout
        self.outcomes = outcomes
        self.numbers = numbers
        """int32, on the device; see `numbers_of`."""
        self._sent = sent
        self._read = read
        self._words: list[int] | None = None
        self.extra: Any = None
        """What a log has sent beside it."""

    def steps(self) -> Sequence[Any]:
        """The engine's own results of its steps; waits for nothing."""
        return self.outcomes if self._read is None else [s.outcome for s in self._read.steps]

    def is_sent(self) -> bool:
        """Whether a kernel writes it to the host, so that it need not be sent."""
        return self._sent is not None

    def send(self) -> None:
        """Sends it on its way, if it is not on the host already; never in a capture."""
        if self._read is None:
            self._sent = Sent.away(self.numbers)  # type: ignore[arg-type]

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return self._read is not None or self._sent.arrived()  # type: ignore[union-attr]

    def _numbers(self) -> list[int]:
        """Its numbers, as they arrived."""
        if self._words is None:
            self._words = self._sent.read().tolist()  # type: ignore[union-attr]
        return self._words

    def number(self) -> int:
        """The number of the `update()`; waits as `read()` does."""
        return self._numbers()[0] if self._read is None else self._read.step

    def is_quiet(self) -> bool:
        """Whether it is of one step that was applied and one scale that did not move."""
        if self._read is not None or len(self.layout.moves) != 1 or len(self.layout.keys) != 1:
            return False
        _, _, before, after, applied, _, _ = self._numbers()
        return bool(applied) and before == after

    def read(self) -> StepRecord:
        """Its contents; waits for the work that made it, and for nothing that was queued later."""
        if self._read is None:
            self._read = record_of(self.layout, self._numbers(), self.outcomes)
        return self._read


def numbers_of(
    step: Tensor, scale: Tensor, moves: Sequence[tuple[Any, Any]], steps: Sequence[tuple[Any, ...]]
) -> Tensor:
    """int32: the numbers of a record.

    The number of the `update()`, the scale of loss 0, every move's scale before and after, and of
    every step whether it was applied, whether its loss was finite, and how many were skipped in a
    row.
    """
    device = step.device
    numbers = [step]
    for value in [scale, *(at for pair in moves for at in pair)]:
        # Bits travel unharmed; a float64 that holds both is not there on every device.
        numbers.append(move(value, device).view(torch.int32))
    for values in steps:
        numbers += [
            value if isinstance(value, Tensor) else torch.full_like(step, int(value))
            for value in values
        ]
    return torch.stack([move(number, device).to(torch.int32) for number in numbers])


def record_of(layout: Layout, numbers: list[int], outcomes: Sequence[Any]) -> StepRecord:
    """The record that `numbers` of this layout are."""
    step, *rest = numbers
    cut = 1 + 2 * len(layout.moves)
    scale, *scales = struct.unpack(f"{cut}f", struct.pack(f"{cut}i", *rest[:cut]))
    moves = tuple(
        Move(loss_id, scales[2 * place], scales[2 * place + 1], floor)
        for place, (loss_id, floor) in enumerate(layout.moves)
    )
    steps = []
    for place, key in enumerate(layout.keys):
        applied, finite, row = rest[cut + _PER_STEP * place :][:_PER_STEP]
        outcome = outcomes[place] if outcomes else None
        steps.append(Step(key, bool(applied), bool(finite), row, outcome))
    return StepRecord(step, scale, tuple(steps), moves)


_SLOTS = 1024
"""Records of a scaler that can be on their way: more than `Monitor` keeps."""


class Slots:
    """Memory of the host that kernels write records to."""

    def __init__(self) -> None:
        self._device = ""
        self._next: Iterator[Tensor] = iter(())

    def take(self, device: torch.device, captured: bool) -> Tensor:
        """Where the next record goes. In a CUDA graph that is on the device: replays log it."""
        if captured:
            return torch.empty(len(RECORD), dtype=torch.int32, device=device)
        if self._device != device.type:
            words = _new_slots(device)
            # Taken apart once: to take one row of it takes as long as a launch (H200's host).
            self._device, self._next = device.type, itertools.cycle(words.unbind())
            weakref.finalize(self, _unused.append, words)
        return next(self._next)


_unused: list[Tensor] = []
"""Slots of scalers that are gone. They are used again but never given back, because a kernel that
is still on its way may write to them."""


def _new_slots(device: torch.device) -> Tensor:
    """Memory of the host that kernels on `device` can write records to."""
    pinned = device.type == "cuda"
    for place, words in enumerate(_unused):
        if words.is_pinned() == pinned:
            return _unused.pop(place)
    shape = (_SLOTS, len(RECORD))
    return torch.zeros(shape, dtype=torch.int32, device="cpu", pin_memory=pinned)
