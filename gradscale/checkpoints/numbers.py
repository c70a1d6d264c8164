"""Checkpoints of a scale between engines whose state is a value (JAX, Keras): plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gradscale.checkpoints import format as checkpoints
from gradscale.checkpoints.policies import patient, policy_of, settings_of, state_of
from gradscale.policy import Dynamic, Policy


class Counts(NamedTuple):
    """What an engine counts besides the policy: numbers, or int32 arrays."""

    skipped_in_a_row: Any = 0
    """Consecutive skipped steps."""
    steps: Any = 0
    """Steps, applied or skipped."""
    bad_losses: Any = 0
    """Losses in a row that were not finite."""


def written(policy: Policy, fields: Mapping[str, Any], counts: Counts) -> dict[str, Any]:
    """The checkpoint of a state with these `fields`: numbers, strings and dicts."""
    saved = checkpoints.Saved(
        type(policy).__name__,
        settings_of(policy),
        dict(fields),
        {"bad_losses": counts.bad_losses, "steps": counts.steps},
        skipped_in_a_row=(counts.skipped_in_a_row,) if counts.skipped_in_a_row else (),
    )
    return checkpoints.write(saved)


def load_policy(saved: Mapping[str, Any], present: Policy | None = None) -> Policy:
    """Returns the policy of a checkpoint of any engine, or of another system that gradscale reads.

    Args:
        saved: The checkpoint.
        present: The policy whose settings are used where the checkpoint has none.
    """
    return policy_of(checkpoints.read(saved), present or Dynamic())


def restored(policy: Policy, saved: Mapping[str, Any]) -> tuple[Any, Counts]:
    """The state of `policy` as plain numbers, and the counts, that a checkpoint describes.

    Settings are those of `policy`. If the checkpoint is of another one, the scale is all that is
    taken over.

    Raises:
        StateError: The checkpoint cannot be read.
    """
    read = checkpoints.read(saved)
    state: Any = state_of(read.state, policy, read.policy == type(policy).__name__)
    state = patient(state, read, policy)
    counts = Counts(
        max(read.skipped_in_a_row, default=0),
        read.counters.get("steps", 0),
        read.counters.get("bad_losses", 0),
    )
    return state, counts
