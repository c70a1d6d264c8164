"""Validation of settings: a wrong one is a SettingError with its name, the rule and the value."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from gradscale.errors import SettingError
from gradscale.formats import FLOAT32, format_named
from gradscale.policy.arrays import float32


class DefaultBound(float):
    """A bound that was not given: an `init_scale` outside it moves it."""


MIN_SCALE = DefaultBound(2.0**-14)
"""The default floor: below it the seed gradient is subnormal in float16."""
MAX_SCALE = DefaultBound(2.0**64)
"""The default ceiling."""


def check(
    policy: Any,
    counts: Iterable[str] = (),
    factors: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Checks and converts the settings of a policy, in its `__post_init__`.

    These are `init_scale`, `min_scale`, `max_scale`, `exact` and `format` where there are such, and
    those named here. Default bounds that exclude `init_scale` are moved.

    Args:
        policy: A policy with a scale that moves.
        counts: The settings that are whole numbers >= 1.
        factors: The settings that lie strictly between two numbers, and these.
    """
    exact = as_flag("exact", getattr(policy, "exact", True))
    for name in ("init_scale", "min_scale", "max_scale"):
        store(policy, name, as_scale(name, getattr(policy, name), exact))
    low, high, start = policy.min_scale, policy.max_scale, policy.init_scale
    kept = float32(start)  # as it is in a state
    if isinstance(low, DefaultBound):
        store(policy, "min_scale", DefaultBound(min(low, start, kept)))
    if isinstance(high, DefaultBound):
        store(policy, "max_scale", DefaultBound(max(high, start, kept)))
    default = isinstance(low, DefaultBound) or isinstance(high, DefaultBound)
    if not default and not low <= high:
        raise SettingError(
            f"min_scale must be <= max_scale, got min_scale {low} and max_scale {high}."
        )
    if not policy.min_scale <= start <= policy.max_scale:
        raise SettingError(
            f"init_scale must lie within min_scale {policy.min_scale} and max_scale "
            f"{policy.max_scale}, got {start}."
        )
    for name, (above, below) in (factors or {}).items():
        powers = exact and hasattr(policy, "exact")  # only there the factors multiply the scale
        store(policy, name, as_factor(name, getattr(policy, name), above, below, powers))
    for name in counts:
        store(policy, name, as_count(name, getattr(policy, name)))
    if hasattr(policy, "format"):
        format_named(policy.format)


def given(policy: Any) -> dict[str, Any]:
    """The settings of `policy` that were given: a bound always, others if not their default."""
    found = {}
    for field in dataclasses.fields(policy):
        value, bound = getattr(policy, field.name), isinstance(field.default, DefaultBound)
        if not isinstance(value, DefaultBound) and (bound or value != field.default):
            found[field.name] = value
    return found


def listed(settings: dict[str, Any]) -> str:
    """`settings` as the arguments of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def call_of(policy: Any) -> str:
    """The shortest call that builds `policy`: the repr of every policy."""
    return f"{type(policy).__name__}({listed(given(policy))})"


def store(policy: Any, name: str, value: Any) -> None:
    """Sets a field of a frozen dataclass, in its `__post_init__`."""
    object.__setattr__(policy, name, value)


def as_number(name: str, value: Any) -> float:
    """`value` as a float, or a SettingError."""
    if isinstance(value, DefaultBound):
        return value
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise SettingError(f"{name} must be a number, got {value!r}.") from None


def as_scale(name: str, value: Any, exact: bool) -> float:
    """`value` as a normal float32 number, so that its reciprocal is finite, or a SettingError."""
    number = as_number(name, value)
    lowest, highest = FLOAT32.smallest_normal, FLOAT32.max
    if not lowest <= number <= highest:
        raise SettingError(
            f"{name} must be finite, > 0 and a normal float32 number ({lowest} to {highest}), "
            f"got {number}."
        )
    return _power_of_two(name, number, exact)


def as_factor(name: str, value: Any, above: float, below: float, exact: bool) -> float:
    """`value` as a factor strictly between two numbers, also after rounding, or a SettingError."""
    number = as_number(name, value)
    if not (above < number < below and above < float32(number) < below) or (
        number < FLOAT32.smallest_normal  # which JAX flushes to zero
    ):
        raise SettingError(
            f"{name} must be > {above:g} and < {below:g}, and a normal float32 number, "
            f"got {number}."
        )
    return _power_of_two(name, number, exact)


def _power_of_two(name: str, number: float, exact: bool) -> float:
    """`number`, or a SettingError if `exact` and it is not a power of two."""
    if exact and math.frexp(number)[0] != 0.5:
        raise SettingError(
            f"{name} must be a power of two so that unscaling is exact, got {number}. Dynamic and "
            "Static accept other numbers with exact=False."
        )
    return number


def as_flag(name: str, value: Any) -> bool:
    """`value`, or a SettingError if it is not a bool."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, got {value!r}.")
    return value


def as_count(name: str, value: Any) -> int:
    """`value` as an int from 1 to the end of int32, or a SettingError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise SettingError(f"{name} must be a whole number, got {value!r}.") from None
    if isinstance(value, bool) or not 1 <= number < 2**31:
        raise SettingError(f"{name} must be a whole number from 1 to 2**31 - 1, got {value!r}.")
    return number
