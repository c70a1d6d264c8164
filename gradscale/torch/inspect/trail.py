"""The order in which values passed through a model, and the first that was not finite.

Every tensor that enters or leaves a module leaves its smallest and largest element here, in the
order of the passes: two numbers on the device, which are read with the rest of the sample. A NaN
anywhere makes both NaN.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.telemetry.transport import Sent

MOST_EVENTS = 16384
"""Events of one sample; later ones are left out, so that memory is bounded in long windows."""

INPUT, OUTPUT, GRAD, INPUT_GRAD = range(4)


class Made:
    """A tensor that a module returned: which modules take it."""

    __slots__ = ("consumers", "event", "name", "ref")

    def __init__(self, tensor: Tensor, name: str, event: int | None) -> None:
        self.ref = weakref.ref(tensor)
        self.name, self.event = name, event
        self.consumers: list[str] = []


class Event(NamedTuple):
    """One tensor that passed a module."""

    kind: int
    """INPUT: it entered, OUTPUT: it left; GRAD: its gradient came back, INPUT_GRAD: the gradient of
    an input that no module returned."""
    name: str
    """The module; of GRAD, the one that returned the tensor."""
    place: tuple[tuple[torch.device, torch.dtype], int]
    """Where its range is."""
    inputs: tuple[int, ...] = ()
    """Of OUTPUT, the events of what had entered."""
    made: Made | None = None
    """Of GRAD, the tensor."""


class Range(NamedTuple):
    """The smallest and the largest element of a tensor."""

    low: float
    high: float

    def finite(self) -> bool:
        """Whether all elements are."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def is_mask(self) -> bool:
        """Whether it looks like a mask that is added: zeros and minus infinity."""
        return self.low == -math.inf and self.high == 0.0


class Trail:
    """The events of one sample."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.inputs: dict[str, tuple[int, ...]] = {}
        """The events of what last entered every module."""
        self.outputs: list[int] = []
        """The events of what the model returned."""
        self._ranges: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._sent: list[tuple[tuple[torch.device, torch.dtype], Sent]] = []

    def note(
        self,
        kind: int,
        name: str,
        value: Tensor,
        inputs: tuple[int, ...] = (),
        made: Made | None = None,
    ) -> int | None:
        """The number of a new event, whose tensor is the flat `value`; None if there is no room."""
        if len(self.events) >= MOST_EVENTS:
            return None
        key = (value.device, value.dtype)
        ranges = self._ranges.setdefault(key, [])
        self.events.append(Event(kind, name, (key, len(ranges) // 2), inputs, made))
        ranges += torch.aminmax(value)
        return len(self.events) - 1

    def send(self) -> None:
        """Sends the ranges to the host."""
        sent = [(key, Sent.away(torch.stack(found))) for key, found in self._ranges.items()]
        self._sent, self._ranges = sent, {}

    def arrived(self) -> bool:
        """Whether reading it would wait for nothing."""
        return all(sent.arrived() for _, sent in self._sent)

    def read(self) -> list[Range]:
        """The range of every event."""
        found = {key: sent.read().tolist() for key, sent in self._sent}
        return [
            Range(*found[key][2 * place : 2 * place + 2])
            for key, place in (event.place for event in self.events)
        ]

    def first_nonfinite(
        self,
        ranges: Sequence[Range],
        bad_weights: Sequence[str],
        loss_finite: bool = False,
        root: str = "",
    ) -> tuple[str, str, float, float] | None:
        """Where the first value that is not finite appeared, and the range of what was put in.

        None unless it did harm, to a gradient of a weight or an output of the model: an infinity
        that stays inside, as in a mask, or that a ReLU takes out again, does none. Nor does minus
        infinity, as in scores that are masked, if nothing after it but gradients is not finite.

        Args:
            ranges: Those of all events.
            bad_weights: The modules of the weights whose gradients were not finite.
            loss_finite: Whether the loss is known to have been finite.
            root: The name of the model.
        """
        pairs = list(zip(self.events, ranges, strict=True))
        backward = [
            i for i, (event, each) in enumerate(pairs) if event.kind >= GRAD and not each.finite()
        ]
        outputs = [ranges[place] for place in self.outputs]
        if not (bad_weights or any(map(_harms, outputs))):
            return None
        masks = self._only_masks(ranges, loss_finite)
        for event, each in pairs:
            if masks:
                break
            if event.kind == OUTPUT and not each.finite():
                if math.isfinite(each.high) and any(ranges[i].is_mask() for i in event.inputs):
                    continue  # it has added a mask
                return (event.name, "forward", *self._span(ranges, event.inputs))
            if event.kind == INPUT and not each.finite() and not each.is_mask():
                where = event.name if event.name == root else parent(event.name)
                return (where, "forward", *self._span(ranges, self.inputs.get(where, ())))
        if backward:
            event = self.events[backward[0]]
            if event.kind == INPUT_GRAD:
                where = event.name
            elif event.made is not None and event.made.consumers:
                where = event.made.consumers[-1]
            elif event.name == root:
                return (root, "backward", *ranges[backward[0]])  # the loss, or the scale, did it
            else:
                where = parent(event.name)
        elif bad_weights:
            where = bad_weights[-1]
        else:
            return None
        given = [i for i, event in enumerate(self.events) if event.kind == GRAD]
        came = [i for i in given if self.events[i].name == where and ranges[i].finite()]
        return (where, "backward", *self._span(ranges, came))

    def data_is_finite(
        self, ranges: Sequence[Range], loss_finite: bool = False, root: str = ""
    ) -> bool:
        """Whether everything that the model was given is finite, masks aside."""
        return self._only_masks(ranges, loss_finite) or not any(
            event.kind == INPUT and event.name == root and not each.finite() and not each.is_mask()
            for event, each in zip(self.events, ranges, strict=True)
        )

    def _only_masks(self, ranges: Sequence[Range], loss_finite: bool) -> bool:
        """Whether minus infinity is all that was not finite in the forward pass."""
        forward = [
            each for event, each in zip(self.events, ranges, strict=True) if event.kind < GRAD
        ]
        return loss_finite and all(each.low < math.inf and each.high < math.inf for each in forward)

    def _span(self, ranges: Sequence[Range], places: Sequence[int]) -> tuple[float, float]:
        """The range of several events together; NaN without any."""
        some = [ranges[place] for place in places if not ranges[place].is_mask()]
        if not some or any(math.isnan(each.low) for each in some):
            return math.nan, math.nan
        return min(each.low for each in some), max(each.high for each in some)


def _harms(each: Range) -> bool:
    """Whether an output of the model is more than masked by minus infinity."""
    return math.isnan(each.low) or each.high == math.inf


def parent(name: str) -> str:
    """The module that contains the module `name`."""
    return name.rpartition(".")[0]
