"""The result of a step: was it applied, and if not, why, and which parameters are to blame."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.formats import Format
from gradscale.torch.unscale import Peaks, readable


class Culprit(NamedTuple):
    """A parameter whose gradient was not finite."""

    name: str
    rank: int
    infs: int | None
    """How many elements are infinite; None: nobody counted."""
    nans: int | None
    """How many elements are NaN; None: some, which nobody counted."""


class Blame(NamedTuple):
    """What the gradients of a step say about it."""

    culprits: list[Culprit]
    finite_amax: float | None
    """The largest magnitude among the scaled gradients that are finite; None if nobody knows."""


def innocent() -> Blame:
    """Nobody is to blame."""
    return Blame([], None)


PLACES = {
    "grad_norm": (0, torch.float32),
    "amax": (1, torch.float32),
    "underflow": (2, torch.float32),
    "skipped_in_a_row": (6, torch.int32),
    "applied": (7, torch.bool),
    "finite": (8, torch.bool),
    "fits": (9, torch.bool),
    "loss_finite": (10, torch.bool),
}
"""Where a kernel leaves what becomes of a step, and in what format."""
DIVISOR, SKIP, FINITE_AMAX = 3, 4, 5
"""Where it leaves what is not in an outcome."""

_HOPELESS = 20
"""So many skips in a row, with the scale falling all the while, clear it of the blame."""
_ROOMY = 10
"""With so many binades of headroom an overflow further up is unlikely."""


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class StepOutcome:
    """What became of one step. Values stay on the device: reading one (`bool()`, `float()`) waits.

    They are the step's own and do not change when later steps are taken. `None` stands for what
    this way of stepping does not measure: `apply()` measures all but `underflow`, which must be
    asked for, torch's loop what it reads anyway, a closure and a disabled scaler nothing.
    """

    applied: Tensor
    """bool: the optimizer step took place."""
    finite: Tensor
    """bool: every scaled gradient element was finite; if not, the scale was too high."""
    fits: Tensor
    """bool: every unscaled element was finite where it is stored; if not, the scale was too low, or
    the gradients were spoilt after `unscale_()`."""
    loss_finite: Tensor
    """bool: every loss of the window was finite; True where several ranks run and nobody asked."""
    scale: Tensor
    """float32: the scale that the gradients were made with."""
    grad_norm: Tensor | None = None
    """float32: the 2-norm of the unscaled gradients, before clipping; NaN if it was skipped."""
    amax: Tensor | None = None
    """float32: the largest magnitude among the scaled gradients."""
    underflow: Tensor | None = None
    """float32: share of the nonzero scaled elements below the format's smallest normal number."""
    skipped_in_a_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))
    """int32: how many steps of this optimizer in a row have been skipped, this one included."""
    loss: Any = None
    """What a step with a closure returned, as a rule the loss; None without a closure."""
    dropped: Tensor | None = None
    """int32: how many backward passes were left out because their gradients were not finite; None
    where such a pass costs the whole step."""
    bad_rank: Tensor | None = None
    """float32: the lowest rank with gradients that were not finite, infinity if there is none; None
    where ranks do not agree."""
    earlier: tuple[StepOutcome, ...] = ()
    """What became of the same step at higher scales, where it was tried again."""

    _format: Format | None = None
    _floor: float = 0.0
    _own: tuple[tuple[Tensor, Tensor], ...] = ()
    """Whether each loss with a scale of its own was finite, and that scale."""
    _blame: Callable[[], Blame] = innocent
    _nothing: bool = False
    """Whether there was no gradient at all."""
    _done: torch.Event | None = None
    _values: Tensor | None = None
    """What a kernel has left, see `PLACES`, where that has not been looked at yet."""

    @classmethod
    def left_by_kernel(cls, values: Tensor, **known: Any) -> StepOutcome:
        """The outcome that `values` hold, with what is `known` besides.

        Nobody looks at most outcomes, and every value that is made a tensor takes some time.
        """
        outcome: StepOutcome = object.__new__(cls)
        for name, value in {**_BESIDES, **known, "_values": values}.items():
            object.__setattr__(outcome, name, value)
        return outcome

    def __getattr__(self, name: str) -> Tensor:
        """A value that a kernel has left; called once for each."""
        if name not in PLACES:
            raise AttributeError(f"{type(self).__name__} has no {name}.")
        value = value_at(self._values, name)  # type: ignore[arg-type]
        object.__setattr__(self, name, value)
        return value

    def with_(self, **known: Any) -> StepOutcome:
        """Itself, with these values put in."""
        for name, value in known.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def headroom(self) -> Tensor | None:
        """float32: binades between amax and the largest finite number of the format."""
        if self.amax is None or self._format is None:
            return None
        return torch.log2(self._format.max / self.amax)

    def __bool__(self) -> bool:
        """Whether the step was applied; **waits for the device**."""
        return bool(self.applied)

    def ready(self) -> bool:
        """Whether reading it would wait for nothing."""
        return readable(self.applied) or (self._done is not None and self._done.query())

    def verdict(self) -> str:
        """What became of the step, in a few words; **waits for the device**.

        The first that is true of: "applied", "no gradients", "loss not finite", "stuck at the
        floor", "NaN at any scale", "scale too low", "scale too high".

        An overflow can leave nothing but NaN behind (infinity minus infinity), so NaN is blamed on
        something else only if no gradient is infinite and the finite ones are far from it, or if
        lower and lower scales have not helped.
        """
        if self.applied:
            return "applied"
        if self._nothing:
            return "no gradients"
        if not self.loss_finite:
            return "loss not finite"
        if self._is_at_the_floor():
            return "stuck at the floor"
        if self._is_nan_for_ever():
            return "NaN at any scale"
        return "scale too low" if self.finite else "scale too high"

    def culprits(self) -> list[Culprit]:
        """The parameters whose gradients were not finite; **waits for the device**."""
        return self._blame().culprits

    def _is_at_the_floor(self) -> bool:
        """Whether a loss overflows at the smallest scale there is."""
        others_finite = all(finite for finite, _ in self._own)
        mine = not self.finite and others_finite and float(self.scale) <= self._floor
        return mine or any(not f and float(scale) <= self._floor for f, scale in self._own)

    def _is_nan_for_ever(self) -> bool:
        """Whether there is NaN that no scale seems to cure."""
        culprits, amax = self._blame()
        if not any(bad.nans != 0 for bad in culprits):
            return False
        if int(self.skipped_in_a_row) >= _HOPELESS:
            return not any(bad.infs for bad in culprits)
        if amax is None or self._format is None or any(bad.infs != 0 for bad in culprits):
            return False
        return 0 < amax <= math.ldexp(self._format.max, -_ROOMY)

    def __getstate__(self) -> list[Any]:
        """Its values on the CPU, with the blame settled; **waits for the device**."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        state |= {name: v.cpu() for name, v in state.items() if isinstance(v, Tensor)}
        state["_own"] = tuple((finite.cpu(), scale.cpu()) for finite, scale in self._own)
        return list((state | {"_blame": partial(Blame, *self._blame()), "_done": None}).values())

    def __repr__(self) -> str:
        if not self.ready():
            return "StepOutcome(still on the device)"
        scale, row = float(self.scale), int(self.skipped_in_a_row)
        return f"StepOutcome({self.verdict()!r}, scale={scale:g}, skipped_in_a_row={row})"


_BESIDES = {
    one.name: one.default
    for one in dataclasses.fields(StepOutcome)
    if one.name not in PLACES and one.default is not dataclasses.MISSING
}


def value_at(values: Tensor, name: str) -> Tensor:
    """What a kernel has left under this `name`, as a tensor that shares its memory."""
    place, dtype = PLACES[name]
    return values[place] if dtype is torch.float32 else values[place : place + 1].view(dtype)[0]


@functools.cache
def _accelerator() -> str | None:
    """The kind of accelerator that there is; a process has the same one as long as it runs."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def event_on(device: torch.device) -> torch.Event | None:
    """An event for the work on `device`; None where nobody need wait, or nobody can tell."""
    return torch.Event(device) if device.type == _accelerator() else None


class Sent:
    """A tensor on its way to the host, behind the work that made it."""

    __slots__ = ("_arrived", "_value")

    def __init__(self, value: Tensor, arrived: torch.Event | None) -> None:
        self._value = value
        """In the memory of the host, written to by the time that `arrived` is done."""
        self._arrived = arrived

    @classmethod
    def away(cls, value: Tensor) -> Sent:
        """Sends `value`."""
        arrived = event_on(value.device)
        if arrived is not None:
            pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
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
        return self._value


@dataclass(slots=True)
class Measured:
    """What is known of an optimizer's gradients before its step."""

    amax: Tensor | None = None
    grad_norm: Tensor | None = None
    underflow: Tensor | None = None
    bad_rank: Tensor | None = None
    """float32: the lowest rank that found something not finite, where ranks agree."""
    upper: Tensor | None = None
    """float32: the share of the elements near the ceiling."""
    peaks: Peaks = field(default_factory=dict)
    """The largest magnitudes of the scaled gradients, where they were not looked at one by one."""
    counts: Peaks = field(default_factory=dict)
    """The infinities and NaNs of the scaled gradients, where a kernel has counted them."""
    edited: Peaks = field(default_factory=dict)
    edited_counts: Peaks = field(default_factory=dict)
    """The same of gradients that may have been changed after `unscale_()`."""
    finite_amax: Tensor | None = None
    """float32: the largest finite magnitude of the scaled gradients, where a kernel has said it."""
    blame: Blame | None = None
    """What the scaled gradients said, where the host could look at once."""


class Names:
    """The names of parameters, as models and optimizers give them."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._stands: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._last_stand: dict[int, tuple[int, weakref.ref[Tensor]]] = {}

    def take(self, model: torch.nn.Module) -> None:
        """Takes over the names that `model` has for its parameters."""
        for name, param in model.named_parameters():
            self._given[id(param)] = (weakref.ref(param), name)

    def params(self) -> list[Tensor]:
        """The parameters that models have given names for."""
        return [param for ref, _ in self._given.values() if (param := ref()) is not None]

    def stand_in(self, param: Tensor, stand: Tensor) -> None:
        """Has `stand`, which an optimizer sees in the place of `param`, go by the same name."""
        last, gone = self._last_stand.get(id(param), (0, None))
        known, _ = self._given.get(last, (None, ""))
        # Unless a new one, of another parameter, lies where the last one lay.
        if gone is not None and known is not None and known() is gone() is not stand:
            del self._given[last]
        self._last_stand[id(param)] = id(stand), weakref.ref(stand)
        self._stands[id(param)] = weakref.ref(param), weakref.ref(stand)
        known, name = self._given.get(id(param), (None, ""))
        if known is not None and known() is param:
            self._given[id(stand)] = weakref.ref(stand), name

    def seen(self, param: Tensor) -> Tensor:
        """What optimizers see of `param`: itself, or what stands in for it."""
        ref, stand = self._stands.get(id(param), (None, None))
        seen = stand() if ref is not None and stand is not None and ref() is param else None
        return param if seen is None else seen

    def of(self, optimizers: Iterable[Optimizer]) -> dict[int, str]:
        """A name for every parameter of `optimizers`, by its id, in their order."""
        names: dict[int, str] = {}
        for number, group in enumerate(g for o in optimizers for g in o.param_groups):
            own = group.get("param_names", ())
            for place, param in enumerate(map(self.seen, group["params"])):
                ref, name = self._given.get(id(param), (None, ""))
                if ref is None or ref() is not param:
                    plain = f"group {number}, parameter {place}, shape {tuple(param.shape)}"
                    name = own[place] if place < len(own) else plain
                names.setdefault(id(param), name)
        return names


def told_by(
    peaks: Peaks, counts: Peaks, names: Mapping[int, str], params: Iterable[Tensor]
) -> Blame:
    """What the largest magnitudes, or the counts, of the gradients of `params` show."""
    owners: dict[Any, list[int]] = defaultdict(list)
    for param in params:
        owners[param.device, param.dtype.to_real()].append(id(param))
    bad = []
    for key, group in (counts or peaks).items():
        for place, (infs, nans) in enumerate(_bad_elements(group)):
            if infs == 0 and nans == 0:
                continue
            whose = owners.get(key, [])
            plain = f"gradient {place} of {len(group)} in {key[1]} on {key[0]}"
            name = names[whose[place]] if len(whose) == len(group) else plain
            bad.append(Culprit(name, _rank(), infs, nans))
    return Blame(bad, None)  # whoever calls this may know the largest finite magnitude


def _bad_elements(group: Tensor) -> list[tuple[int | None, int | None]]:
    """Infinities and NaNs of every tensor, from counts or from largest magnitudes."""
    if group.dim() == 2:
        return [(infs, nans) for infs, nans in group.tolist()]
    # A NaN hides the infinities beside it; both are uncounted.
    peaks = [(math.isfinite(peak), math.isnan(peak)) for peak in group.tolist()]
    return [(0, 0) if sound else (None, None if nan else 0) for sound, nan in peaks]


def culprits(names: Mapping[int, str], bad: Mapping[int, tuple[int, int]]) -> list[Culprit]:
    """The parameters in `bad` by their names."""
    known = [(names[key], *counts) for key, counts in bad.items() if key in names]
    return [Culprit(name, _rank(), infs, nans) for name, infs, nans in known]


def _rank() -> int:
    """The rank of this process among all; 0 if it is alone."""
    distributed = torch.distributed
    alive = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if alive else 0
