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


NAMES = ("headroom", "dynamic", "static", "logmax", "histogram", "off")
"""The names that a caller may write for a policy with its defaults."""
STATIC = 2.0**16
"""The scale of "static" where none is given: torch's first."""


def as_policy(value: Any, **settings: Any) -> Policy:
    """`value` if it is a policy, the one that it is the name of, with `settings`, or an error.

    The SettingError says what to write instead.

    >>> as_policy(Headroom(margin=3))
    Headroom(margin=3)
    >>> as_policy("headroom", init_scale=8.0)
    Headroom(init_scale=8.0)
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, str) and value.lower() in NAMES:
        kind: Any = next(each for name, each in POLICIES.items() if name.lower() == value.lower())
        return kind(**{"init_scale": STATIC, **settings}) if kind is Static else kind(**settings)
    shown, call = repr(value), ""
    if isinstance(value, type):
        shown = f"the class {value.__name__}"
        if value in POLICIES.values():
            call = f" Use policy={value.__name__.lower()!r}."
    raise SettingError(
        f"policy must be a policy such as gs.Headroom(), or one of the names {', '.join(NAMES)}, "
        f"got {shown}.{call}"
    )


def policy_or_settings(policy: Any, settings: Dynamic, format: str = "float16") -> Policy:
    """`policy`, or `settings`, which holds torch's settings as a policy, if that is None.

    If it is a name, settings that were given are settings of that policy, and `format` is its
    format. A SettingError if it is no policy and no name, or if settings were given as well that
    it does not have.
    """
    if policy is None:
        return settings
    chosen = as_policy(policy)
    if isinstance(policy, str):
        if isinstance(chosen, Dynamic):
            return settings
        own = {field.name for field in fields(chosen)}
        more = {name: value for name, value in given(settings).items() if name != "exact"}
        if more.keys() <= own:
            more |= {"format": format} if "format" in own else {}
            return as_policy(policy, **more)
    # Torch's settings may be any numbers, so `exact` is always False there.
    both = {name: value for name, value in given(settings).items() if name != "exact"}
    if not both:
        return chosen
    rule, known = type(chosen).__name__, [field.name for field in fields(chosen)]
    unknown = [name for name in both if name not in known]
    if unknown:
        remedy = f"{rule} has no {', '.join(unknown)}: remove either that or policy."
    else:
        remedy = f"Use policy=gs.{rule}({listed({**given(chosen), **both})})."
    raise SettingError(
        f"Pass either policy or torch's settings, got policy={chosen!r} and {listed(both)}. "
        f"{remedy}"
    )
