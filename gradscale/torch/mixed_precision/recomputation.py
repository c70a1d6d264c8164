"""Batches that are computed again at a lower scale, and what the policy sees of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradscale.errors import SettingError
from gradscale.policy import LONE
from gradscale.torch.scaler import GradScaler
from gradscale.torch.step.spike import DROP, Spike
from gradscale.torch.telemetry.outcome import StepOutcome

RETRIES = 2
"""How often `run()` tries again where neither it nor the object says so."""
CREDIT = 4 * LONE
"""The most that is saved for batches to be computed again."""
_NUMBERS = ("batches", "recomputed", "tries", "credit", "drop", "calm")


class Recomputation:
    """Computes batches again that have overflowed.

    With `retries`, an overflow after an ordinary batch is taken for a lone spike: the batch is
    computed again at a scale that is low enough for it, and if that helps, the policy sees nothing
    of it, so that the next batch has the scale of the one before. If it does not help, or if the
    batch before was computed again as well, the policy sees every overflow.

    A batch earns one unit of credit if it needs no second try, and computing one again takes
    `LONE`. So in the long run one in `LONE + 1` is computed again, and four more at most; beyond
    that an overflow costs a step.

    Args:
        scaler: Whose scale is lowered.
        retries: How often a batch is computed again, at most. None leaves that to each call of
            `run()`, lowers the scale by the policy, and keeps no account.
    """

    def __init__(self, scaler: GradScaler, retries: int | None) -> None:
        if retries is not None:
            as_retries(retries)
        self.retries = retries
        self.batches = 0
        """Calls of `run()`."""
        self.recomputed = 0
        """How many of them were computed again."""
        self.tries = 0
        """How many times, all together."""
        self.credit, self.drop = CREDIT, DROP
        self.calm = 0
        """1 if the last batch was applied at once, else 0."""
        self._scaler = scaler

    def run(
        self, attempt: Callable[[], StepOutcome], restore: Callable[[], None], retries: int | None
    ) -> StepOutcome:
        """What became of the last try of a batch, with the earlier ones.

        Args:
            attempt: Computes the batch and steps.
            restore: Puts back what a try has changed, before the next one.
            retries: How often to try again, at most. None: as the object says, within its credit.
        """
        most = self.retries if retries is None else as_retries(retries)
        most = RETRIES if most is None else most
        paid = self.retries is None or retries is not None or self.credit >= LONE
        spike = None
        if most and self.retries is not None and self.calm and self.credit >= LONE:
            spike = Spike(self._scaler._state, self.drop)
        earlier: list[StepOutcome] = []
        while True:
            try:
                outcome, applied = self._tried(attempt)
            except BaseException:
                if spike is not None:
                    spike.give_up()
                raise
            outcome.with_(earlier=tuple(earlier))
            if applied or len(earlier) == most or not paid or not self._is_lower(outcome):
                break
            earlier.append(outcome)
            self.tries += 1
            if spike is not None:
                spike.lower(len(earlier))
            restore()
        if spike is not None and earlier:
            self.drop = spike.end(outcome, len(earlier))
        self.batches += 1
        self.recomputed += bool(earlier)
        self.calm = int(applied and not earlier)
        self.credit = (
            max(self.credit - LONE, 0) if earlier else min(self.credit + self.calm, CREDIT)
        )
        return outcome

    def _tried(self, attempt: Callable[[], StepOutcome]) -> tuple[StepOutcome, bool]:
        """What became of a try, and whether it was applied; the step itself may not be done yet.

        So the device has something to do while the next batch begins.
        """
        monitor = self._scaler._pipeline.monitor
        monitor.prompt = True
        try:
            outcome = attempt()
            return outcome, monitor.was_applied(outcome)
        finally:
            monitor.prompt = False

    def _is_lower(self, outcome: StepOutcome) -> bool:
        """Whether the scale is lower than in `outcome`, which was skipped; lowers it if it can."""
        overflowed = not outcome.finite or bool(outcome.dropped)
        if not outcome.loss_finite or not overflowed:
            return False
        if any(not finite for finite, _ in outcome._own):
            return True
        return self._scaler._state.lower(float(outcome.scale))

    def numbers(self) -> dict[str, int]:
        """What a checkpoint has of it."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def restore(self, numbers: Mapping[str, int]) -> None:
        """Goes on with what `numbers()` gave; what older checkpoints do not have is as at first."""
        fresh = Recomputation(self._scaler, self.retries)
        for name in _NUMBERS:
            setattr(self, name, numbers.get(name, getattr(fresh, name)))


def as_retries(value: Any) -> int:
    """`value`, or a SettingError if it is no whole number >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SettingError(f"retries must be a whole number >= 0, got {value!r}.")
    return value
