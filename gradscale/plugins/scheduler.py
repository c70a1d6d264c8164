"""A scheduler that follows applied steps, in a trainer that steps it after every step."""

from __future__ import annotations

import weakref
from typing import Any

from gradscale.torch.scaler import GradScaler


class FollowingScheduler:
    """A scheduler whose `step()` is left out if its optimizer has skipped every step since.

    Since the last call of it, that is. Where the result of a step is still on the device, the call
    is put off until the next step of the optimizer is about to begin, as `GradScaler.follow()` has
    it, or until something of the scheduler is read.

    Args:
        scheduler: What is stepped, and has everything else.
        scaler: What steps its optimizer; call `count_step()` after every step.
    """

    def __init__(self, scheduler: Any, scaler: GradScaler) -> None:
        self._scheduler, self._scaler = scheduler, scaler
        self.followed = scheduler.optimizer
        self._stepped = self._applied = False
        """Whether there was a step since the last call, and whether one is known to be applied."""
        self._open = False
        """Whether the result of the last step may still be on the device."""
        self._counted = False
        """Whether that step is from before the last call."""
        self._due: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The arguments of a call that was put off."""
        # Weakly: the scaler may outlive the run, and must not keep its optimizer alive.
        count_applied = weakref.WeakMethod(self._count_applied)
        scaler.follow(lambda: (found := count_applied()) and found(), optimizer=self.followed)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the scheduler, for `isinstance`."""
        return type(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the scheduler; **waits for the device** if a call was put off."""
        if "_scheduler" not in vars(self):  # a copy that has no attributes yet
            raise AttributeError(name)
        if self._due is not None:
            self._wait()
        return getattr(self._scheduler, name)

    def count_step(self) -> None:
        """Counts a step of the optimizer, applied or skipped."""
        self._end_step()
        self._stepped = self._open = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the scheduler, unless every step since the last call was skipped."""
        if self._due is not None:
            self._wait()
        self._due = args, kwargs
        if self._stepped and not self._applied and self._open:
            if self._scaler.outcome(self.followed).ready():
                self._wait()
            return
        self._counted = self._open
        self._call(self._applied or not self._stepped)

    def _wait(self) -> None:
        """Reads the result of the last step; **waits for the device**."""
        self._scaler.flush()
        self._end_step()

    def _count_applied(self) -> None:
        """Called by the scaler if the last step was applied, before the next one begins."""
        if not self._counted:
            self._applied = True
            if self._due is not None:
                self._call(True)

    def _end_step(self) -> None:
        """Counts the last step as skipped unless `_count_applied()` was called for it."""
        self._open = self._counted = False
        if self._due is not None:
            self._call(self._applied)

    def _call(self, applied: bool) -> None:
        """Makes the call that is due, or leaves it out."""
        due, self._due = self._due, None
        self._stepped = self._applied = False
        if applied and due is not None:
            self._scheduler.step(*due[0], **due[1])
