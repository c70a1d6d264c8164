"""Checkpoints of a scale as plain numbers: the JSON that every engine reads and writes.

Where a whole optimizer state is saved (orbax, pickles, any pytree), the scale is in it and nothing
of this is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from gradscale.checkpoints import format as checkpoints
from gradscale.checkpoints.policies import patient, policy_of, settings_of, state_of
from gradscale.jax.optimizer import replaced, scaled_state
from gradscale.jax.state import pack
from gradscale.policy import Dynamic, Policy, State, as_policy


def state_dict(policy: Policy | str, state: Any) -> dict[str, Any]:
    """The checkpoint of `state`: numbers, strings and dicts. **Waits for the device**.

    Args:
        policy: The policy that the state is of.
        state: A state of the policy, or of an optimizer that has one in it.
    """
    policy = as_policy(policy)
    counters, skipped = {"bad_losses": 0, "steps": 0}, 0
    if not isinstance(state, State):
        whole = scaled_state(state)
        counts, state = whole.counts, whole.policy_state(policy)
        counters = {"bad_losses": int(counts.bad_losses), "steps": int(counts.steps)}
        skipped = int(counts.skipped_in_a_row)
    fields = {name: value.item() for name, value in state._asdict().items()}
    saved = checkpoints.Saved(
        type(policy).__name__,
        settings_of(policy),
        fields,
        counters,
        skipped_in_a_row=(skipped,) if skipped else (),
    )
    return checkpoints.write(saved)


def load_policy(saved: Mapping[str, Any], present: Policy | None = None) -> Policy:
    """The policy of a checkpoint of any engine, or of a peer that gradscale reads.

    Args:
        saved: The checkpoint.
        present: Whose settings are used where the checkpoint has none, as that of a peer.
    """
    return policy_of(checkpoints.read(saved), present or Dynamic())


def load_state_dict(policy: Policy | str, state: Any, saved: Mapping[str, Any]) -> Any:
    """`state` with the numbers of a checkpoint, which any engine or a known peer has written.

    Settings are those of `policy`; `load_policy` reads those of the checkpoint. If that is of
    another policy, the scale is all that is taken over.

    Args:
        policy: The policy that the state is of.
        state: A state of the policy, or of an optimizer that has one in it.
        saved: The checkpoint.

    Raises:
        StateError: The checkpoint cannot be read.
    """
    policy, read = as_policy(policy), checkpoints.read(saved)
    moved: Any = state_of(read.state, policy, read.policy == type(policy).__name__)
    moved = patient(moved, read, policy)
    if isinstance(state, State):
        return _as_arrays(state, moved)
    whole = scaled_state(state)
    outcome = whole.outcome._replace(skipped_in_a_row=max(read.skipped_in_a_row, default=0))
    whole = pack(
        whole.inner_state,
        _as_arrays(whole.policy_state(policy), moved),
        outcome,
        read.counters.get("steps", 0),
        read.counters.get("bad_losses", 0),
    )
    return replaced(state, whole)


def _as_arrays(state: Any, numbers: Any) -> Any:
    """`numbers` as arrays like those of `state`, where they are."""
    pairs = zip(state, numbers, strict=True)
    return type(state)(*(jnp.full_like(array, number) for array, number in pairs))
