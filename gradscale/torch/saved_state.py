"""The policy and the state that a checkpoint describes."""

from __future__ import annotations

from gradscale.checkpoints.policies import patient as patient
from gradscale.checkpoints.policies import policy_of as policy_of
from gradscale.checkpoints.policies import settings_of as settings_of
from gradscale.checkpoints.policies import state_of as state_of
from gradscale.errors import SettingError
from gradscale.formats import Format, format_named
from gradscale.policy import Policy


def format_of(policy: Policy | None, format: str) -> Format:
    """The format of the backward pass, which a policy may have as well."""
    known = getattr(policy, "format", format)
    if format not in (known, "float16"):
        raise SettingError(
            f"format is {known!r} in the policy, but the argument format is {format!r}. Set it in "
            "the policy only."
        )
    return format_named(known)
