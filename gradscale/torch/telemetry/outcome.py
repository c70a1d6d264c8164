"""The result of a step: was it applied, and if not, why, and which parameters are to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscale.formats import Format
from gradscale.monitor import verdict
from gradscale.torch.grads.dispatch import capturing
from gradscale.torch.grads.scale import readable
from gradscale.torch.telemetry.blame import Blame, Culprit
from gradscale.torch.telemetry.transport import event_on

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


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class StepOutcome:
    """What became of one step. Values stay on the device: reading one (`bool()`, `float()`) waits.

    They are the step's own and do not change when later steps are taken. A value that this way of
    stepping does not measure is None: `apply()` measures all but `underflow`, which must be
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
    """bool: every loss of the iteration was finite; True where several ranks run and the groups
    that decide together are not known."""
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
    where ranks do not decide together."""
    earlier: tuple[StepOutcome, ...] = ()
    """What became of the same step at higher scales, where it was tried again."""

    _format: Format | None = None
    _floor: float = 0.0
    _own: tuple[tuple[Any, Tensor], ...] = ()
    """Whether each loss with a scale of its own was finite, and that scale."""
    _blame: Callable[[], Blame] = Blame.nobody
    _nothing: bool = False
    """Whether there was no gradient at all."""
    _done: torch.Event | None = None
    _values: Any = None
    """Values that were not asked for yet: numbers by name, or the vector that a kernel wrote."""
    _original: Callable[[], StepOutcome] | None = None
    """In a compiled function: what finds the outcome that the step had outside of the graph."""

    def __getattr__(self, name: str) -> Any:
        """A value that was not asked for yet; called once for each."""
        if name not in PLACES:
            raise AttributeError(f"{type(self).__name__} has no {name}.")
        values = self._values
        if isinstance(values, Tensor):
            value: Any = value_at(values, name)
        else:
            value = values[name]
            if value is not None and not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=PLACES[name][1], device="cpu")
            elif value is not None and value.dtype is not PLACES[name][1]:
                value = value.to(PLACES[name][1])
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
        if self._original is not None:
            return self._original().ready()
        if readable(self.applied):
            return True
        if self._done is None:
            # Reading waits for all that was queued before, so what is queued by now counts.
            object.__setattr__(self, "_done", mark_in_stream(self.applied))
        return self._done is not None and self._done.query()

    def verdict(self) -> str:
        """What became of the step, in a few words; **waits for the device**.

        The first that is true of: "applied", "no gradients", "loss not finite", "stuck at the
        floor", "NaN at any scale", "scale too low", "scale too high".

        An overflow can leave nothing but NaN behind (infinity minus infinity), so NaN is blamed on
        something else only if no gradient is infinite and the finite ones are far from it, or if
        lower and lower scales have not helped.
        """
        if self._original is not None:
            return self._original().verdict()
        if self.applied:
            return "applied"
        culprits, amax = self._blame()
        return verdict(
            applied=False,
            finite=bool(self.finite),
            scale=float(self.scale),
            loss_finite=bool(self.loss_finite),
            has_gradients=not self._nothing,
            floor=self._floor,
            own_losses=[(bool(finite), float(scale)) for finite, scale in self._own],
            bad_counts=[(bad.infs, bad.nans) for bad in culprits],
            finite_amax=amax,
            format=self._format,
            skipped_in_a_row=int(self.skipped_in_a_row),
        )

    def culprits(self) -> list[Culprit]:
        """The parameters whose gradients were not finite; **waits for the device**."""
        return self._original().culprits() if self._original is not None else self._blame().culprits

    def __reduce__(self) -> tuple[Any, ...]:
        """Its values on the CPU, with the blame settled; **waits for the device**."""
        if self._original is not None:
            return _itself, (self._original(),)
        state = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        state |= {name: v.cpu() for name, v in state.items() if isinstance(v, Tensor)}
        state["_own"] = tuple((bool(finite), scale.cpu()) for finite, scale in self._own)
        state |= {"_blame": partial(Blame, *self._blame()), "_done": None, "_values": None}
        return _restored, (state,)

    def __repr__(self) -> str:
        if not self.ready():
            return "StepOutcome(still on the device)"
        scale, row = float(self.scale), int(self.skipped_in_a_row)
        return f"StepOutcome({self.verdict()!r}, scale={scale:g}, skipped_in_a_row={row})"


UNSET = {
    one.name: one.default
    for one in dataclasses.fields(StepOutcome)
    if one.name not in PLACES and one.default is not dataclasses.MISSING
}


def _itself(outcome: StepOutcome) -> StepOutcome:
    """`outcome`."""
    return outcome


def _restored(state: dict[str, Any]) -> StepOutcome:
    """An outcome that was pickled."""
    return StepOutcome(**state)


def value_at(values: Tensor, name: str) -> Tensor:
    """What a kernel has left under this `name`, as a tensor that shares its memory."""
    place, dtype = PLACES[name]
    return values[place] if dtype is torch.float32 else values[place : place + 1].view(dtype)[0]


def mark_in_stream(value: Any) -> torch.Event | None:
    """An event that is done when the tensor `value` is; None where there can be none."""
    if not isinstance(value, Tensor) or value.is_cpu or capturing():
        return None
    event = event_on(value.device)
    if event is not None:
        event.record()
    return event
