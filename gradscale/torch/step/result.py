"""A step as it passes through the stages, and its outcome, which is made when first read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradscale.policy import GradStats
from gradscale.torch.grads.collect import Gradients
from gradscale.torch.grads.reference import Measurement
from gradscale.torch.grads.scale import Scale
from gradscale.torch.telemetry.blame import Blame, BlameLater, blame_now, joined
from gradscale.torch.telemetry.names import Names
from gradscale.torch.telemetry.outcome import UNSET, StepOutcome

if TYPE_CHECKING:
    from gradscale.torch.state import ScaleState
    from gradscale.torch.step.entries import OptimizerEntry
    from gradscale.torch.step.passes import Passes


class Step:
    """What is known of a step so far: numbers where the state is on the CPU, tensors elsewhere."""

    shared = False
    """Whether another optimizer has one of the parameters."""
    measured: Measurement | None = None
    stats = GradStats(finite=True)
    decision: Tensor | None = None
    """What a kernel has decided, see `fields.DECISION`."""
    underflow: Any = None
    dropped: Any = None
    """How many droppable passes were left out; None without any."""
    clip: Any = 1.0
    limit: float | None = None
    """What the elements of gradients are held within, before `clip`, where masters are."""
    masters = False
    """Whether an optimizer of it steps masters, see `step/masters.py`."""
    skip: Any = False
    """Whether the step must not take place."""
    nothing = False
    """Whether there are no gradients at all."""
    loss: Any = None
    """What a step with a closure returned."""
    losses_finite: Any = None
    own: tuple[tuple[Any, Tensor], ...] = ()
    """Whether each loss with a scale of its own was finite, and that scale."""
    row: Any = 0
    bad_rank: Any = None
    state: ScaleState | None = None
    _outcome: StepOutcome | None = None

    def __init__(self, entries: list[OptimizerEntry], grads: Gradients, scale: Scale) -> None:
        self.entries = entries
        self.refs: list[Any] = []
        """Of the optimizers, weakly: the last step is kept, and would keep them alive."""
        self.grads = grads
        self.scale = scale
        """The scale of the gradients when they were made."""
        self.in_place = entries[0].unscaled_in is not None
        """Whether the gradients are unscaled, by now and before this call."""
        self.blame: Callable[[], Blame] = Blame.nobody

    def divisor(self) -> Tensor:
        """float32: what the gradients must be divided by, to be unscaled and clipped."""
        scale, clip = self.scale, self.clip
        if isinstance(clip, float) and clip == 1.0:
            return scale.tensor
        if scale.number is not None:
            return torch.full((), scale.number / clip, dtype=torch.float32, device="cpu")
        # Without clipping the quotient is exact; with it, rounded like any other.
        return (scale.inverse * clip).reciprocal()

    def factor(self, wide: bool = False) -> Tensor:
        """What gradients are multiplied by, to be unscaled and clipped, as far as they are not yet.

        A float32; with `wide`, float64 where it would be 0 in float32, for float64 gradients.
        """
        clip = 1.0 if self.limit is not None else self.clip
        scale = self.scale.unit() if self.in_place else self.scale
        if scale.number is None:
            factor = scale.inverse * clip
            return factor if wide else factor.float()
        number = clip / scale.number
        dtype = torch.float64 if wide and number < 2.0**-126 else torch.float32
        return torch.full((), number, dtype=dtype, device="cpu")

    def drop_gradients(self) -> None:
        """Drops the references to the gradients, which would keep them alive."""
        self.refs = [entry.ref for entry in self.entries]
        self.grads, self.measured, self.entries = _NO_GRADIENTS, None, []

    def optimizers(self) -> list[Any]:
        """The optimizers that it stepped, once it is over, and that are still there."""
        return [optimizer for ref in self.refs if (optimizer := ref()) is not None]

    def outcome(self) -> StepOutcome:
        """What became of the step, made when first asked for."""
        if self._outcome is None:
            self._outcome = _outcome_of(self)
        return self._outcome


_NO_GRADIENTS = Gradients([])


def _outcome_of(step: Step) -> StepOutcome:
    """The outcome of a step that is over."""
    device, state = step.scale.tensor.device, step.state
    known = {
        "scale": step.scale.tensor,
        "loss": step.loss,
        "dropped": _as(step.dropped, torch.int32, device),
        "bad_rank": _as(step.bad_rank, torch.float32, device),
        "_format": None if state is None else state.format,
        "_floor": 0.0 if state is None else state.floor,
        "_own": step.own,
        "_blame": step.blame,
        "_nothing": step.nothing,
    }
    if step.decision is not None:
        if step.underflow is None:
            known["underflow"] = None
        return _make(step.decision, known)
    norm, skip = step.stats.norm, step.skip
    if norm is not None and skip is not False:
        norm = torch.nan if skip is True else torch.where(skip != 0, torch.nan, norm)
    values = {
        "applied": skip == 0,
        "finite": step.stats.finite,
        "fits": step.stats.fits,
        "loss_finite": True if step.losses_finite is None else step.losses_finite,
        "grad_norm": norm,
        "amax": step.stats.amax,
        "underflow": step.underflow,
        "skipped_in_a_row": step.row,
    }
    return _make(values, known)


def _make(values: Any, known: dict[str, Any]) -> StepOutcome:
    """An outcome whose `values` become tensors when they are asked for.

    Most outcomes are never read, and making a tensor takes time.
    """
    outcome: StepOutcome = object.__new__(StepOutcome)
    put = object.__setattr__
    for name, value in UNSET.items():
        put(outcome, name, value)
    for name, value in known.items():
        put(outcome, name, value)
    put(outcome, "_values", values)
    return outcome


def _as(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """A number or tensor as a tensor."""
    return None if value is None else torch.as_tensor(value, dtype=dtype, device=device)


def blame_before_clipping(step: Step, passes: Passes, names: Names) -> None:
    """Finds the parameters to blame before clipping, which can make every gradient NaN."""
    blame = None
    for entry in step.entries:
        if entry.blame is None:
            blame = blame or _look(step, passes, names)
            entry.blame = blame


def blame_of(step: Step, passes: Passes, names: Names) -> Any:
    """What finds the parameters to blame: now where the host can look, else when asked."""
    if step.nothing:
        return Blame.nobody
    if step.skip is True:
        # Of optimizers that were clipped together, all have the same.
        found = {id(entry.blame): entry.blame for entry in step.entries if entry.blame is not None}
        if found:
            return partial(joined, list(found.values()))
        return _look(step, passes, names)
    measured = step.entries[0].measured
    if step.measured is not None and all(found is not step.measured for found in measured):
        measured = [*measured, step.measured]
    optimizers = [entry.held for entry in step.entries]
    return BlameLater(names, optimizers, step.grads.params, measured)


def _look(step: Step, passes: Passes, names: Names) -> Callable[[], Blame]:
    """The parameters to blame, from the gradients as they are."""
    scale, inverse = step.scale, None
    if not step.in_place and scale.number is not None and scale.number < 1.0:
        inverse = scale.inverse
    own = [loss.bad for loss in passes.origin().losses.values()]
    factor = float(scale.number or 1.0) if step.in_place else 1.0
    optimizers = [entry.held for entry in step.entries]
    return blame_now(names, optimizers, step.grads.params, inverse, own, factor)
