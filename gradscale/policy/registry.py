"""The policies by name, and the check that what a caller gave as `policy=` is one of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gradscale.errors import SettingError
from gradscale.policy.constant import Off, ScaleState, Static
from gradscale.policy.dynamic import Dynamic, DynamicState
from gradscale.policy.headroom import Headroom, HeadroomState
from gradscale.policy.histogram import Histogram, HistogramState
from gradscale.policy.logmax import LogMax, LogMaxState
from gradscale.policy.settings import given, listed

Policy = Off | Static | Dynamic | Headroom | LogMax | Histogram
State = ScaleState | DynamicState | HeadroomState | LogMaxState | HistogramState
POLICIES: dict[str, type[Policy]] = {
    policy.__name__: policy for policy in (Off, Static, Dynamic, Headroom, LogMax, Histogram)
}
"""Every policy by the name that it has in checkpoints."""


def as_policy(value: Any) -> Policy:
    """`value` if it is a policy, else a SettingError with the code to write instead.

    >>> as_policy(Headroom(margin=2))
    Headroom(margin=2)
    """
    if isinstance(value, Policy):
        return value
    shown, name = repr(value), ""
    if isinstance(value, type):
        shown = f"the class {value.__name__}"
        name = value.__name__ if value in POLICIES.values() else ""
    elif isinstance(value, str):
        name = next((each for each in POLICIES if each.lower() == value.lower()), "")
    call = f"gs.{name or 'Dynamic'}({'1024.0' if name == 'Static' else ''})"
    others = "" if name else f" Policies are {', '.join(POLICIES)}."
    raise SettingError(
        f"policy must be a policy such as gs.Dynamic(), got {shown}. Write policy={call}.{others}"
    )


def policy_or_settings(policy: Any, settings: Dynamic) -> Policy:
    """`policy`, or `settings`, which holds torch's settings as a policy, if that is None.

    A SettingError if `policy` is not a policy, or if settings were given as well.
    """
    if policy is None:
        return settings
    chosen = as_policy(policy)
    # Torch's settings may be any numbers, so `exact` is always False there.
    both = {name: value for name, value in given(settings).items() if name != "exact"}
    if not both:
        return chosen
    rule, known = type(chosen).__name__, [field.name for field in fields(chosen)]
    unknown = [name for name in both if name not in known]
    if unknown:
        remedy = f"{rule} has no {', '.join(unknown)}: leave out either that or policy."
    else:
        remedy = f"Write policy=gs.{rule}({listed({**given(chosen), **both})})."
    raise SettingError(
        f"Give either policy or torch's settings, got policy={chosen!r} and {listed(both)}. "
        f"{remedy}"
    )
