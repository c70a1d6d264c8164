"""The outcome of a step: whether it was applied, why not, and which parameters caused it."""

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
from gradscale.torch.grads.fields import DECISION, value_at
from gradscale.torch.grads.scale import readable
from gradscale.torch.telemetry.blame import Blame, Culprit
from gradscale.torch.telemetry.transport import event_on


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class StepOutcome:
    """The outcome of one step. The values are device tensors; `bool()` or `float()` of one waits.

    They belong to this step and do not change in later steps. A value that was not measured is
    None: `apply()` measures everything except `underflow`, which is off by default; torch's calls
    measure what they read anyway; a closure leaves `grad_norm` and `amax` at None; a disabled
    scaler measures nothing.
    """

    applied: Tensor
    """bool: the optimizer step was taken."""
    finite: Tensor
    """bool: every scaled gradient element was finite; if not, the scale was too high."""
    fits: Tensor
    """bool: every unscaled element was finite in the format it is stored in; if not, the scale was
    too low, or the gradients were changed after `unscale_()`."""
    loss_finite: Tensor
    """bool: every loss of the iteration was finite; always True with several ranks if it is unknown
    which of them decide together."""
    scale: Tensor
    """float32: the scale of the gradients."""
    grad_norm: Tensor | None = None
    """float32: 2-norm of the unscaled gradients before clipping; NaN if the step was skipped."""
    amax: Tensor | None = None
    """float32: the largest magnitude of the scaled gradients."""
    underflow: Tensor | None = None
    """float32: share of the nonzero scaled elements below the format's smallest normal number."""
    skipped_in_a_row: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))
    """int32: the number of consecutive skipped steps of this optimizer, including this one."""
    loss: Any = None
    """The value that the closure returned, usually the loss; None without a closure."""
    dropped: Tensor | None = None
    """int32: number of backward passes left out because their gradients were not finite; None if no
    pass is droppable."""
    bad_rank: Tensor | None = None
    """float32: the lowest rank with gradients that were not finite, infinity if there is none; None
    if ranks do not decide together."""
    earlier: tuple[StepOutcome, ...] = ()
    """The outcomes of the earlier attempts, at higher scales, if the step was retried."""

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
        if name not in _LAZY:
            raise AttributeError(f"{type(self).__name__} has no {name}.")
        values = self._values
        if isinstance(values, Tensor):
            value: Any = value_at(values, name)
        else:
            value = values[name]
            if isinstance(value, Tensor):
                value = value.to(_LAZY[name])
            elif value is not None:
                value = torch.tensor(value, dtype=_LAZY[name], device="cpu")
        object.__setattr__(self, name, value)
        return value

    def with_(self, **values: Any) -> StepOutcome:
        """Sets these values; returns this outcome."""
        for name, value in values.items():
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
        """Returns whether the values can be read without waiting for the device."""
        if self._original is not None:
            return self._original().ready()
        if readable(self.applied):
            return True
        if self._done is None and not capturing():
            # Reading waits for all that was queued before, so what is queued by now counts.
            done = event_on(self.applied.device)
            if done is not None:
                done.record()
            object.__setattr__(self, "_done", done)
        return self._done is not None and self._done.query()

    def verdict(self) -> str:
        """Returns the result of the step in a few words; **waits for the device**.

        The first that is true of: "applied", "no gradients", "loss not finite", "stuck at the
        floor", "NaN at any scale", "scale too low", "scale too high".

        `gradscale.monitor.verdict` describes how NaN is distinguished from an overflow.
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
            # Without a floor the policy moves no scale, so rows do not mean that a lower one fails.
            skipped_in_a_row=int(self.skipped_in_a_row) if self._floor else 0,
        )

    def culprits(self) -> list[Culprit]:
        """Returns the parameters whose gradients were not finite; **waits for the device**."""
        return self._original().culprits() if self._original is not None else self._blame().culprits

    def __reduce__(self) -> tuple[Any, ...]:
        """Its values and culprits on the CPU; **waits for the device**."""
        if self._original is not None:
            return self._original().__reduce__()
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


_LAZY = {
    field.name: field.dtype for field in DECISION if field.name in StepOutcome.__dataclass_fields__
}
"""The values that a kernel writes, or that become tensors when they are asked for."""
UNSET = {
    one.name: one.default
    for one in dataclasses.fields(StepOutcome)
    if one.name not in _LAZY and one.default is not dataclasses.MISSING
}


def _restored(state: dict[str, Any]) -> StepOutcome:
    """An outcome that was pickled."""
    return StepOutcome(**state)
