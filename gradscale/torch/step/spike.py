"""A batch whose gradients are far above those of others: its scales, and those of the others.

Its tries are made at scales of their own. The policy sees all of its overflows, or none.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from gradscale.torch.grads.packed import views
from gradscale.torch.state import LossId, ScaleState
from gradscale.torch.telemetry.outcome import StepOutcome

SPARE = 2
"""Binades that the largest gradient of a spike should be below the ceiling."""
DROP = 8
"""Binades by which scales are lowered for the first spike; later ones get what the last took."""
MOST = 64
"""The most binades by which a scale is lowered for a spike."""

Kept = dict[LossId, Any]
"""The states of all losses, by loss."""


class Spike:
    """A batch that may be a spike, made before its first try.

    Args:
        state: The scales.
        drop: Binades by which they are lowered after the first try; twice as many after each
            further one, and by 16 at least.
    """

    def __init__(self, state: ScaleState, drop: int) -> None:
        self._state, self._drop = state, drop
        self._cloned = _clone(state)
        self._seen: Kept | None = None
        """The states after the overflows so far, as if each had been at the policy's own scale."""

    @cached_property
    def _before(self) -> Kept:
        """The states before the first try; most batches need none."""
        return _kept(self._state, *self._cloned)

    def lower(self, tries: int) -> None:
        """Lowers the scales after so many `tries`, all of which have overflowed."""
        if self._seen is not None:
            self.give_up()
            self._state.overflow()
        self._seen = _kept(self._state, *_clone(self._state))
        factor, floor = 2.0 ** -self._total(tries), self._state.floor
        for loss_id, before in self._before.items():
            now = self._seen[loss_id]
            if self._state.on_host:
                scale: Any = float(max(min(now.scale, before.scale * factor), floor))
            else:
                scale = torch.minimum(now.scale, before.scale * factor).clamp_(min=floor)
            _write(self._state, loss_id, now._replace(scale=scale))

    def end(self, outcome: StepOutcome, tries: int) -> int:
        """Gives the policy its scales back after the last of `tries`; the drop for the next spike.

        If the step was applied they are what they were before the spike, else what the policy makes
        of its overflows.
        """
        if not outcome.applied:
            self.give_up()
            if not outcome.finite:
                self._state.overflow()
            return self._drop
        _restore(self._state, self._before)
        total, left = self._total(tries), outcome.headroom
        return total if left is None else min(max(total + SPARE - int(left), SPARE), MOST)

    def give_up(self) -> None:
        """Gives the policy the scales that it has after all overflows but the last."""
        if self._seen is not None:
            _restore(self._state, self._seen)

    def _total(self, tries: int) -> int:
        """Binades by which the scales are lowered after so many tries."""
        # The last spike may have been a small one: a second try is at least that of a first spike.
        drop = self._drop if tries == 1 else max(self._drop, DROP)
        return min(drop * 2 ** (tries - 1), MOST)


def _clone(state: ScaleState) -> tuple[Any, Kept]:
    """The state of loss 0, packed where it is on a device, and those of the other losses."""
    if state.live is None:  # of a copy or a checkpoint, before its first loss
        return state.initial, dict(state.losses)
    if state.on_host:
        return state.live, dict(state.losses)
    own = {key: type(one)(*map(torch.clone, one)) for key, one in state.losses.items()}
    packed: Any = state.packed
    return packed.clone(), own


def _kept(state: ScaleState, first: Any, own: Kept) -> Kept:
    """The states of all losses, without the counters, from what `_clone` gave."""
    if isinstance(first, torch.Tensor):
        return {0: views(first, type(state.live)), **own}
    kept = {0: first, **own}
    if state.on_host:
        return kept
    return {key: state.on_device(one) for key, one in kept.items()}  # they were on none before


def _restore(state: ScaleState, kept: Kept) -> None:
    """Goes on with what `_kept` gave."""
    for loss_id, old in kept.items():
        _write(state, loss_id, old)


def _write(state: ScaleState, loss_id: LossId, new: Any) -> None:
    """Writes the state of a loss, in place on a device."""
    state.copy = None
    if not state.on_host:
        live = state.live if loss_id == 0 else state.losses[loss_id]
        for value, one in zip(live, new, strict=True):
            value.copy_(one)
    elif loss_id == 0:
        state.live = new
    else:
        state.losses[loss_id] = new
