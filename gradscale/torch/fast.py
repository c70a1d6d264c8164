"""The step that the host only launches: read, decide, step, in as few calls as there can be.

For optimizers that skip by themselves, with gradients that kernels can take, in a window in which
nothing unusual has happened. Everything else goes the long way, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch import kernels
from gradscale.torch.contract import is_capable, step_on_device
from gradscale.torch.events import Move, Record
from gradscale.torch.keeper import LOSS_PERIOD, LOSSES, PATIENT_LOSSES, STEPS
from gradscale.torch.outcome import StepOutcome
from gradscale.torch.scaling import capturing
from gradscale.torch.stepping import Stepping, mark_in_stream
from gradscale.torch.window import Window


class Fast(Stepping):
    """Steps by kernels alone."""

    def _step_fast(
        self,
        optimizers: Sequence[Optimizer],
        window: Window,
        params: list[Tensor],
        max_norm: float,
        keep: bool,
    ) -> Record | None:
        """Steps all of `optimizers` or none and moves the scale; None, with nothing done, if not.

        `keep` if the gradients will be looked at again.
        """
        device = window.scale.device
        place = None
        if kernels.take(device) and not capturing() and window.is_plain():
            if not self._per_optimizer_states and all(map(is_capable, optimizers)):
                grads = [param.grad for param in params if param.grad is not None]
                place = kernels.locate(params, grads)
        if place is None or place.keys[0][0] != device:
            return None
        measured = self._measured[id(optimizers[0])]
        due = self._underflow_is_due(optimizers)
        smallest_normal = self._format.smallest_normal if due else None
        state, row = self._live("apply()"), self._row(optimizers[0], window.scale)
        question = kernels.reading().Question(
            window.scale,
            window.loss_finite,
            self._counters[LOSSES],
            self._counters[STEPS],
            row,
            self._policy,
            state,
            PATIENT_LOSSES,
            LOSS_PERIOD,
        )
        slots, counts = kernels.reading().read_and_decide(
            place.groups, window.inv_scale, max_norm, smallest_normal, question
        )
        window.finite = slots.flags[1]  # told once, also if an optimizer raises and is asked again
        divisor, skipped = slots.floats[3], slots.floats[5]
        with kernels.knowing(grads, place.facts):
            for optimizer in optimizers:
                step_on_device(optimizer, divisor, skipped, (), {})
        applied, finite, fits, loss_finite = slots.flags.unbind()
        norm, amax, underflow, _, measured.finite_amax, _ = slots.floats.unbind()
        for optimizer in optimizers[1:]:
            self._row(optimizer, row).copy_(row)
        rows = counts.split([table.tensors for _, table in place.groups])
        measured.counts = dict(zip(place.keys, rows, strict=True))
        for optimizer in optimizers:
            window.use(optimizer)
            if keep:
                self._mark_stepped(optimizer, window, ~applied)
                self._remember_skip(optimizer, window, ~applied)
        floor = getattr(self._policy, "min_scale", 0.0)
        outcome = StepOutcome(
            applied=applied,
            finite=finite,
            fits=fits,
            loss_finite=loss_finite,
            scale=window.scale,
            grad_norm=norm,
            amax=amax,
            underflow=underflow if due else None,
            skipped_in_a_row=slots.told[6],
            _format=self._format,
            _floor=floor,
            _blame=self._blame_later(optimizers, len(params)),
            _done=mark_in_stream(skipped),
        )
        self._tell(optimizers, outcome)
        return Record(slots.told, [Move(0, state.scale, state.scale, floor)], self._iteration)
