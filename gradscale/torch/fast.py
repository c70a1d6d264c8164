"""The step that the host only launches: read and decide, then step.

For optimizers that skip by themselves, with gradients that kernels can take, in a window in which
nothing unusual has happened. Everything else goes the long way, with the same result.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradscale.policy import Dynamic, Headroom, Off, Static
from gradscale.torch import kernels
from gradscale.torch.agree import Group, part_of_norm
from gradscale.torch.contract import is_capable, step_on_device, writes_back
from gradscale.torch.events import Move, Record
from gradscale.torch.keeper import LOSSES, STEPS
from gradscale.torch.moving import LOSS_PERIOD, PATIENT_LOSSES
from gradscale.torch.optim.onepass import OnePass
from gradscale.torch.outcome import (
    DIVISOR,
    FINITE_AMAX,
    SKIP,
    Measured,
    Sent,
    StepOutcome,
    value_at,
)
from gradscale.torch.stepping import Stepping, mark_in_stream
from gradscale.torch.telling import Report, settle
from gradscale.torch.unscale import grads_of, multiply, params_with_grad
from gradscale.torch.window import Window

NORM = 3
"""Where the norm is in a summary of `reading`."""
BAD_LOSS, BAD_PENALTY = Report._fields.index("bad_loss"), Report._fields.index("bad_penalty")
RANK = Report._fields.index("rank")
_FEW = 4
"""Tables that are read one by one rather than looked for once more, as one."""
_SLOTS = 1024
"""Records of a scaler that can be on their way: more than `Events` keeps."""
_WORDS = 7
"""The numbers of a record of one step and one move."""


class Fast(Stepping):
    """Steps by kernels alone."""

    _slots: tuple[str, Iterator[Tensor]] | None

    def _begin(self) -> None:
        super()._begin()
        self._slots = None

    def _step_fast(
        self,
        optimizers: Sequence[Optimizer],
        window: Window,
        params: list[Tensor] | None,
        max_norm: float,
        keep: bool,
    ) -> Record | None:
        """Steps all of `optimizers` or none and moves the scale; None, with nothing done, if not.

        `params` are those with gradients; None if one of our own optimizers should know them.
        `keep` if the gradients will be looked at again.
        """
        device = window.scale.device
        if not kernels.take(device) or not window.is_plain() or not self._is_known():
            return None
        if self._per_optimizer_states or not all(map(is_capable, optimizers)):
            return None
        if self._losses and self._who(optimizers):  # each of which has a word to say
            return None
        try:
            if params is None:
                place, params = _planned(optimizers[0])
            else:
                place = kernels.locate(params, grads_of(params))
            if place is None or place.keys[0][0] != device:
                return None
            return self._step_at(place, optimizers, window, params, max_norm, keep)
        finally:
            if isinstance(optimizers[0], OnePass):
                optimizers[0].look_away()

    def _step_at(
        self,
        place: kernels.Place,
        optimizers: Sequence[Optimizer],
        window: Window,
        params: list[Tensor],
        max_norm: float,
        keep: bool,
    ) -> Record:
        """Steps with the gradients of `params`, which are at `place`."""
        due = self._underflow_is_due(optimizers)
        smallest_normal = self._format.smallest_normal if due else None
        # torch's kernels take longer with a scale than a pass that unscales takes longer than one
        # that only reads: 16.07 ms against 15.77 ms for 1.56 B parameters on an H200.
        # Not in float16, where small ones would vanish.
        wide = all(dtype is torch.float32 for _, dtype in place.keys)
        at_once = wide and math.isinf(max_norm) and all(map(writes_back, optimizers))
        row, told = self._row(optimizers[0], window.scale), self._slot(window.scale.device)
        groups = self._who(optimizers)
        how = (max_norm, smallest_normal, at_once)
        if groups:
            values, numbers, bad_rank = self._decide_with(
                groups, place, window, params, how, row, told
            )
        else:
            bad_rank = None
            values, numbers = kernels.reading().read_and_decide(
                place.groups, window.scale, *how, row, self._question(window), told
            )
        divisor, skipped = None if at_once else values[DIVISOR], values[SKIP]
        try:
            for optimizer in optimizers:
                ours = isinstance(optimizer, OnePass) and divisor is not None
                if ours and optimizer.step_unheard(divisor, skipped):  # type: ignore[attr-defined]
                    continue
                step_on_device(optimizer, divisor, skipped, (), {})
        except BaseException:
            # For the next try: nothing is counted, and gradients are scaled, as they were before.
            self._counters[STEPS].sub_(1)
            row.sub_(skipped.to(row.dtype))
            if at_once:
                multiply(place, window.scale)
            raise
        finally:
            # Told once, also if an optimizer raises and is asked again.
            window.finite = value_at(values, "finite")
        if isinstance(self._policy, Headroom):
            self._advance_headroom(values, window, told)
        for optimizer in optimizers[1:]:
            self._row(optimizer, row).copy_(row)
        for optimizer in optimizers:
            window.use(optimizer)
            if keep:
                if at_once:
                    self._mark_unscaled(optimizer, window, params_with_grad(optimizer))
                else:
                    self._mark_stepped(optimizer, window, skipped != 0)
                self._remember_skip(optimizer, window, skipped != 0)
        done = mark_in_stream(skipped)
        measured = partial(_measured, values, numbers, place)
        known = {} if due else {"underflow": None}
        outcome = StepOutcome.left_by_kernel(
            values,
            scale=window.scale,
            _format=self._format,
            _floor=getattr(self._policy, "min_scale", 0.0),
            bad_rank=bad_rank,
            _blame=self._blame_later(optimizers, params, measured),
            _done=done,
            **known,
        )
        self._tell(optimizers, outcome)
        return self._told_by_kernel(told, done)

    def _decide_with(
        self,
        groups: Sequence[Group],
        place: kernels.Place,
        window: Window,
        params: list[Tensor],
        how: tuple[float, float | None, bool],
        row: Tensor,
        told: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `read_and_decide` says, with what other ranks found; and the lowest bad rank."""
        max_norm, smallest_normal, at_once = how
        summary, numbers = kernels.reading().summarized(
            place.groups, window.inv_scale, max_norm, smallest_normal, at_once
        )
        # Of gradients that are unscaled by now there is nothing more to unscale.
        left = torch.ones_like(window.scale) if at_once else window.inv_scale
        part = part_of_norm(params, groups, summary[NORM], left)
        agreeing, mark = kernels.agreeing(), self._drift.mark(self._guarded())
        words = agreeing.report(summary, part, window.loss_finite, mark, dist.get_rank())
        words, marks = settle(words, groups)
        self._drift.take(marks)
        # A loss that is not finite because of a penalty, which the scale has spoilt, counts as one.
        window.loss_finite = words[0, BAD_LOSS] <= words[0, BAD_PENALTY]
        window.penalty_finite = words[0, BAD_PENALTY] == 0
        question = self._question(window)
        values = agreeing.decide_together(
            words, summary, window.scale, max_norm, row, question, told
        )
        return values, numbers, words[0, RANK]

    def _advance_headroom(self, values: Tensor, window: Window, told: Tensor) -> None:
        """Moves the scale by `Headroom`, once a kernel has decided about the step."""
        finite = value_at(values, "finite")
        if window.penalty_finite is not None:  # another rank's
            finite = finite & window.penalty_finite
        flags = (finite, value_at(values, "fits"), value_at(values, "amax"))
        kernels.headroom().advance(
            self._policy,
            self._live("update()"),
            flags,
            window.loss_finite,
            self._counters[LOSSES],
            (PATIENT_LOSSES, LOSS_PERIOD),
            window.scale,
            told,
        )

    def _is_known(self) -> bool:
        """Whether the kernels have the rule of the policy."""
        return type(self._policy) in (Dynamic, Headroom, Static, Off)

    def _slot(self, device: torch.device) -> Tensor:
        """Where a record may be written, by work on `device`, for the host to read.

        In a CUDA graph it stays on the device: every replay logs it there.
        """
        if kernels.capturing():
            return torch.empty(_WORDS, dtype=torch.int32, device=device)
        if self._slots is None or self._slots[0] != device.type:
            words = _new_slots(device)
            # Taken apart once: to take one row of it takes as long as a launch (H200's host).
            self._slots = device.type, itertools.cycle(words.unbind())
            weakref.finalize(self, _unused.append, words)
        return next(self._slots[1])

    def _question(self, window: Window) -> Any:
        """What a kernel moves the scale by."""
        return kernels.reading().Question(
            window.loss_finite,
            self._counters[LOSSES],
            self._counters[STEPS],
            self._policy,
            self._live("update()"),
            PATIENT_LOSSES,
            LOSS_PERIOD,
        )

    def _told_by_kernel(self, told: Tensor, done: torch.Event | None) -> Record:
        """The record of one step that a kernel writes by the time that `done` is."""
        scale = self._live("update()").scale
        moves = [Move(0, scale, scale, getattr(self._policy, "min_scale", 0.0))]
        return Record(
            told, moves, self._iteration, None if kernels.capturing() else Sent(told, done)
        )

    def _advance_fast(self, found_inf: Sequence[Mapping[Any, Tensor]]) -> Record | None:
        """Moves the scale after one step in torch's loop; None, with nothing done, if not.

        `found_inf` is what was found for every optimizer that was checked.
        """
        window, scale = self._pending(), self._live("update()").scale
        if not kernels.take(scale.device) or window is None or not window.is_unjudged():
            return None
        if len(found_inf) != 1 or len(self._iteration) != 1 or list(found_inf[0]) != [scale.device]:
            return None
        if not self._is_known() or isinstance(self._policy, Headroom):
            return None
        found, told = found_inf[0][scale.device], self._slot(scale.device)
        outcome = self._iteration[0][1]
        step = (outcome.applied, outcome.skipped_in_a_row)
        kernels.writing().advance(found, *step, self._question(window), told)
        window.finite = found == 0
        return self._told_by_kernel(told, mark_in_stream(found))


def _measured(values: Tensor, numbers: Tensor, place: kernels.Place) -> Measured:
    """What a kernel has found out about the gradients at `place`."""
    return Measured(counts=place.rows(numbers[:, 1:3]), finite_amax=values[FINITE_AMAX])


def _planned(optimizer: Any) -> tuple[kernels.Place | None, list[Tensor]]:
    """Where the gradients of one of our own optimizers lie, and whose they are.

    None and nobody's if that is better asked again.
    """
    plan = optimizer.see()
    if plan is None or len(plan.members) > _FEW:
        return None, []
    formats = {members.dtype for members in plan.members}
    if len(formats) > 1:  # then they are in another order here than in an outcome
        return None, []
    groups = [(members.dtype, members.table) for members in plan.members]
    return kernels.Place(None, groups, [(plan.params[0].device, formats.pop())]), plan.params


_unused: list[Tensor] = []
"""Slots of scalers that are gone. They are used again but never given back, because a kernel that
is still on its way may write to them."""


def _new_slots(device: torch.device) -> Tensor:
    """Memory of the host that kernels on `device` can write records to."""
    pinned = device.type == "cuda"
    for place, words in enumerate(_unused):
        if words.is_pinned() == pinned:
            return _unused.pop(place)
    return torch.zeros((_SLOTS, _WORDS), dtype=torch.int32, pin_memory=pinned)
