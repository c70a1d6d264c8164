"""The policy and the state that a checkpoint describes, and the other way round."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from gradscale.checkpoints.saved import Saved
from gradscale.errors import SettingError, StateError, caller_level
from gradscale.policy import POLICIES, DefaultBound, Dynamic, DynamicState, Off, Policy, Static
from gradscale.policy.arrays import float32


def settings_of(policy: Policy) -> dict[str, Any]:
    """The settings of `policy` as a checkpoint has them: bounds that are defaults are marked."""
    settings = dataclasses.asdict(policy)
    for bound in ("min_scale", "max_scale"):
        if isinstance(settings.get(bound), DefaultBound):
            settings[f"default_{bound}"] = True
    return settings


def policy_of(
    saved: Saved, present: Policy, kinds: Mapping[str, type[Policy]] = POLICIES
) -> Policy:
    """The policy of a checkpoint, for a scaler that has the policy `present`.

    Args:
        saved: What was read of the checkpoint.
        present: The policy of the scaler.
        kinds: The classes of policies by their names in checkpoints.
    """
    try:
        if saved.policy is not None:
            given = dict(saved.settings)
            for bound in ("min_scale", "max_scale"):
                if given.pop(f"default_{bound}", False):
                    given[bound] = DefaultBound(given[bound])
            return kinds[saved.policy](**given)
        if isinstance(present, Dynamic):
            return dataclasses.replace(present, exact=False, **saved.settings)
    except KeyError:
        raise StateError(
            f"The state's policy must be one of {', '.join(POLICIES)}, got {saved.policy!r}. "
            "To load the state of a policy of your own, use that policy and pass settings=False."
        ) from None
    except (SettingError, TypeError) as error:
        raise StateError(f"The settings of the state are damaged: {error}") from None
    raise StateError(
        "The state was saved by a scaler whose scale changes, but this scaler's policy is "
        f"{present}. Pass settings=False to load only the scale."
    )


def state_of(fields: Mapping[str, Any], policy: Policy, strict: bool) -> Any:
    """The state of `policy` that a checkpoint's `fields` describe, its scale within the bounds."""
    first = policy.init()
    if isinstance(policy, Off):
        return first
    odd = set(first._fields) ^ set(fields)
    older = set(getattr(policy, "added", ())) - set(fields)
    if strict and odd - older:
        names = ", ".join(sorted(odd))
        raise StateError(
            f"The state does not have the fields of {type(policy).__name__}. Check {names}."
        )
    known = {name: value for name, value in fields.items() if name in first._fields}
    for name, value in known.items():
        if isinstance(getattr(first, name), int) and not isinstance(value, int):
            raise StateError(f"The state's {name} must be a whole number, got {value!r}.")
        known[name] = type(getattr(first, name))(value)
    state = first._replace(**known)
    scale = float(state.scale)
    if not isinstance(policy, Static):
        scale = min(max(scale, policy.min_scale), policy.max_scale)
    if scale != state.scale:
        warnings.warn(
            f"The loaded scale {state.scale} is outside the range from min_scale to max_scale and "
            f"was clamped to {scale}.",
            stacklevel=caller_level(),
        )
    return state._replace(scale=float32(scale))  # torch's scaler saves 3e-5 before its first loss


def patient(state: Any, saved: Saved, policy: Policy) -> Any:
    """`state` with the bad steps that follow from the `patience` of a checkpoint, if it has one."""
    if saved.patience is None or not isinstance(state, DynamicState):
        return state
    hysteresis = getattr(policy, "hysteresis", 1)
    return state._replace(bad_steps=max(hysteresis - saved.patience, 0))
