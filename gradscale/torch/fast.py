"""The step that the host only launches: read and decide, then step.

For optimizers that skip by themselves, with gradients that kernels can take, in a window in which
nothing unusual has happened. Everything else goes the long way, with the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch import kernels
from gradscale.torch.contract import is_capable, step_on_device
from gradscale.torch.events import Move, Record
from gradscale.torch.keeper import LOSS_PERIOD, LOSSES, PATIENT_LOSSES, STEPS
from gradscale.torch.optim.onepass import OnePass
from gradscale.torch.outcome import Sent, StepOutcome
from gradscale.torch.stepping import Stepping, mark_in_stream
from gradscale.torch.window import Window

_FEW = 4
"""Tables that are read one by one rather than looked for once more, as one."""
_SLOTS, _WORDS = 4096, 7
"""Records that can be on their way, of all scalers, and the numbers of each."""


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
        if not kernels.take(device) or not window.is_plain():
            return None
        if self._per_optimizer_states or not all(map(is_capable, optimizers)):
            return None
        try:
            place = _locate(optimizers, params)
            if place is None or place.keys[0][0] != device:
                return None
            return self._step_at(place, optimizers, window, len(params), max_norm, keep)
        finally:
            for optimizer in optimizers:
                if isinstance(optimizer, OnePass):
                    optimizer.look_away()

    def _step_at(
        self,
        place: kernels.Place,
        optimizers: Sequence[Optimizer],
        window: Window,
        count: int,
        max_norm: float,
        keep: bool,
    ) -> Record:
        """Steps with the gradients at `place`, those of `count` parameters."""
        measured = self._measured[id(optimizers[0])]
        due = self._underflow_is_due(optimizers)
        smallest_normal = self._format.smallest_normal if due else None
        state, row = self._live("apply()"), self._row(optimizers[0], window.scale)
        reading = kernels.reading()
        question = reading.Question(
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
        told = _slot(window.scale.device)
        slots, counts = reading.read_and_decide(
            place.groups, window.inv_scale, max_norm, smallest_normal, question, told
        )
        window.finite = slots.flags[1]  # told once, also if an optimizer raises and is asked again
        divisor, skipped = slots.floats[3], slots.floats[5]
        for optimizer in optimizers:
            step_on_device(optimizer, divisor, skipped, (), {})
        applied, finite, fits, loss_finite = slots.flags.unbind()
        norm, amax, underflow, _, measured.finite_amax, _ = slots.floats.unbind()
        for optimizer in optimizers[1:]:
            self._row(optimizer, row).copy_(row)
        measured.counts = {place.keys[0]: counts}
        if len(place.keys) > 1:
            rows = counts.split([table.tensors for _, table in place.groups])
            measured.counts = dict(zip(place.keys, rows, strict=True))
        for optimizer in optimizers:
            window.use(optimizer)
            if keep:
                self._mark_stepped(optimizer, window, ~applied)
                self._remember_skip(optimizer, window, ~applied)
        floor = getattr(self._policy, "min_scale", 0.0)
        done = mark_in_stream(skipped)
        outcome = StepOutcome(
            applied=applied,
            finite=finite,
            fits=fits,
            loss_finite=loss_finite,
            scale=window.scale,
            grad_norm=norm,
            amax=amax,
            underflow=underflow if due else None,
            skipped_in_a_row=slots.row,
            _format=self._format,
            _floor=floor,
            _blame=self._blame_later(optimizers, count),
            _done=done,
        )
        self._tell(optimizers, outcome)
        moves = [Move(0, state.scale, state.scale, floor)]
        sent = None if kernels.capturing() else Sent(slots.told, done)
        return Record(slots.told, moves, self._iteration, sent)


def _locate(optimizers: Sequence[Optimizer], params: list[Tensor]) -> kernels.Place | None:
    """Where the gradients of `params`, those of `optimizers`, lie; None if kernels cannot tell."""
    if len(optimizers) == 1 and isinstance(optimizers[0], OnePass):
        plan = optimizers[0].look()
        if plan is not None and len(plan.members) <= _FEW:
            formats = {members.dtype for members in plan.members}
            if len(formats) == 1:  # else they are in another order here than in an outcome
                groups = [(members.dtype, members.table) for members in plan.members]
                return kernels.Place(None, groups, [(params[0].device, formats.pop())])
    grads: list[Any] = [param.grad for param in params]
    return kernels.locate(params, grads)


_slots: dict[torch.device, tuple[Tensor, itertools.count[int]]] = {}
"""Memory of the host that kernels write records to, which stays for good."""


def _slot(device: torch.device) -> Tensor:
    """Where a record may be written, by work on `device`, for the host to read.

    In a CUDA graph it stays on the device: every replay logs it there.
    """
    if kernels.capturing():
        return torch.empty(_WORDS, dtype=torch.int32, device=device)
    if device not in _slots:
        words = torch.zeros((_SLOTS, _WORDS), dtype=torch.int32, pin_memory=device.type == "cuda")
        _slots[device] = words, itertools.count()
    words, numbers = _slots[device]
    return words[next(numbers) % _SLOTS]
