"""Checkpoints of a scale as plain numbers: the JSON that every engine reads and writes.

Where a whole optimizer state is saved (orbax, pickles, any pytree), the scale is in it and nothing
of this is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from gradscale.checkpoints.numbers import Counts, load_policy, restored, written
from gradscale.errors import SettingError
from gradscale.jax.gradients import check_state
from gradscale.jax.optimizer import replaced, scaled_state
from gradscale.jax.state import pack
from gradscale.policy import Policy, State, as_policy

__all__ = ["load_policy", "load_state_dict", "state_dict"]


def state_dict(policy: Policy | str, state: Any) -> dict[str, Any]:
    """Returns the checkpoint of `state`: numbers, strings and dicts. **Waits for the device**.

    Args:
        policy: The policy of the state.
        state: A state of the policy, or the state of an optimizer that contains one.
    """
    policy, counts = as_policy(policy), Counts()
    if isinstance(state, State):
        check_state(policy, state)
        _check_single(state)
    else:
        whole = scaled_state(state)
        _check_single(whole)
        counts, state = Counts(*map(int, whole.counts)), whole.policy_state(policy)
    fields = {name: value.item() for name, value in state._asdict().items()}
    return written(policy, fields, counts)


def load_state_dict(policy: Policy | str, state: Any, saved: Mapping[str, Any]) -> Any:
    """Returns `state` with the numbers of a checkpoint of any engine or of another known system.

    The settings are those of `policy`; `load_policy` reads those of the checkpoint. If that has
    another policy, only the scale is loaded.

    Args:
        policy: The policy of the state.
        state: A state of the policy, or the state of an optimizer that contains one.
        saved: The checkpoint.

    Raises:
        StateError: The checkpoint cannot be read.
    """
    policy = as_policy(policy)
    moved, counts = restored(policy, saved)
    if isinstance(state, State):
        check_state(policy, state)
        _check_single(state)
        return _as_arrays(state, moved)
    whole = scaled_state(state)
    _check_single(whole)
    whole = pack(
        whole.inner_state,
        _as_arrays(whole.policy_state(policy), moved),
        whole.outcome._replace(skipped_in_a_row=counts.skipped_in_a_row),
        counts.steps,
        counts.bad_losses,
    )
    return replaced(state, whole)


def _check_single(state: Any) -> None:
    """Raises a SettingError if `state` is that of several members or devices."""
    if jnp.ndim(state.scale):
        raise SettingError(
            f"The state must have one scale, got scales of shape {jnp.shape(state.scale)}. Use the "
            "state of each member or device: jax.tree.map(lambda leaf: leaf[0], state)."
        )


def _as_arrays(state: Any, numbers: Any) -> Any:
    """`numbers` as arrays like those of `state`, where they are."""
    pairs = zip(state, numbers, strict=True)
    return type(state)(*(jnp.full_like(array, number) for array, number in pairs))
