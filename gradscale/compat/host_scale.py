"""A policy and its state in plain numbers, for systems that decide about a step on the host.

DeepSpeed and Megatron-LM read the overflow flag before they move the scale, so nothing here is on a
device. They report that flag and nothing else: policies that need measurements are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from gradscale.checkpoints import format as checkpoints
from gradscale.checkpoints.numbers import Counts, written
from gradscale.checkpoints.policies import patient, policy_of, state_of
from gradscale.errors import SettingError, StateError, StuckError, caller_level
from gradscale.monitor import Tracker, as_on_stuck, stuck_message, verdict
from gradscale.policy import Dynamic, GradStats, Off, Policy, Static, as_policy
from gradscale.policy.arrays import float32
from gradscale.policy.settings import as_scale


class HostScale:
    """The scale of a run: `update()` moves it by the policy's rule.

    >>> scale = HostScale(Dynamic(init_scale=8.0, growth_interval=2))
    >>> scale.update(finite=True), scale.update(finite=True), scale.update(finite=False)
    (8.0, 16.0, 8.0)
    """

    def __init__(self, policy: Policy, on_stuck: str = "warn", stuck_after: int = 50) -> None:
        self.policy = checked(policy)
        self.state: Any = self.policy.init()
        self.steps = 0
        """Calls of `update()`."""
        self.skipped_in_a_row = 0
        self.on_stuck = as_on_stuck(on_stuck)
        self.stuck_after = Tracker(stuck_after).stuck_after

    @property
    def value(self) -> float:
        """The scale that the policy has chosen for the next backward pass."""
        return float(self.state.scale)

    def set(self, value: Any) -> None:
        """Replaces the scale; counters stay. A SettingError if `value` cannot be a scale."""
        self.state = self.state._replace(scale=float32(as_scale("loss_scale", value, exact=False)))

    def update(self, finite: bool) -> float:
        """Moves the scale after a step and returns it; a step that is not finite was skipped.

        Raises:
            StuckError: `stuck_after` steps in a row were skipped, and `on_stuck` is "raise".
        """
        used = self.value
        self.state = self.policy.update(self.state, GradStats(finite=finite))
        self.steps += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == self.stuck_after and self.on_stuck != "ignore":
            self._report(used)
        return self.value

    def _report(self, used: float) -> None:
        """Warns or raises, with a diagnosis."""
        floor = getattr(self.policy, "min_scale", 0.0)
        why = verdict(applied=False, finite=False, scale=used, floor=floor)
        message = stuck_message(self.skipped_in_a_row, used, why)
        if self.on_stuck == "raise":
            raise StuckError(message)
        warnings.warn(message, stacklevel=caller_level())

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint: torch's five keys and a block "gradscale", fit for JSON."""
        counts = Counts(self.skipped_in_a_row, self.steps)
        return written(self.policy, self.state._asdict(), counts)

    def load_state_dict(self, state: Mapping[str, Any], settings: bool = True) -> None:
        """Takes over a checkpoint of any engine, or of a peer that gradscale reads.

        Args:
            state: The checkpoint.
            settings: Whether its settings replace those of the policy.

        Raises:
            StateError: It cannot be read, or has a policy of another kind. Nothing was loaded.
        """
        saved = checkpoints.read(state)
        policy = policy_of(saved, self.policy) if settings else self.policy
        if type(policy) is not type(self.policy):
            raise StateError(
                f"The state was saved with the policy {policy}, but this scaler's policy is "
                f"{self.policy}. Pass settings=False to load only the scale."
            )
        strict = settings and saved.policy is not None
        self.state = patient(state_of(saved.state, policy, strict), saved, policy)
        self.policy, self.steps = policy, saved.counters.get("steps", 0)
        self.skipped_in_a_row = max(saved.skipped_in_a_row, default=0)


def checked(policy: Any) -> Policy:
    """`policy`, a policy or the name of one, or a SettingError if the flag is not enough for it."""
    chosen = as_policy(policy)
    if not isinstance(chosen, Dynamic | Static | Off):
        raise SettingError(
            "policy must be gs.Dynamic, gs.Static or gs.Off, because this system reports only "
            f"whether gradients were finite, got {chosen!r}."
        )
    return chosen
