"""What the settings of the rules may be. Whatever is wrong is refused by name and value."""

from __future__ import annotations

import math
import operator
from typing import Any

from gradscale.errors import SettingError
from gradscale.formats import FLOAT32
from gradscale.policy.arrays import float32


class DefaultBound(float):
    """A bound that nobody gave: it moves out of the way of an `init_scale` beyond it."""


MIN_SCALE = DefaultBound(2.0**-14)
"""The default floor: below it the seed of a float16 backward pass is itself subnormal."""
MAX_SCALE = DefaultBound(2.0**64)
"""The default ceiling."""


def settle_scales(policy: Any, exact: bool) -> None:
    """Checks `init_scale` and its bounds; default bounds give way to it, given ones do not."""
    for name in ("init_scale", "min_scale", "max_scale"):
        settle(policy, name, as_scale(name, getattr(policy, name), exact))
    low, high, start = policy.min_scale, policy.max_scale, policy.init_scale
    kept = float32(start)  # what a state will hold
    if isinstance(low, DefaultBound):
        settle(policy, "min_scale", DefaultBound(min(low, start, kept)))
    if isinstance(high, DefaultBound):
        settle(policy, "max_scale", DefaultBound(max(high, start, kept)))
    if not policy.min_scale <= start <= policy.max_scale:
        raise SettingError(
            f"init_scale must lie within min_scale {policy.min_scale} and max_scale "
            f"{policy.max_scale}, got {start}."
        )


def settle(policy: Any, name: str, value: Any) -> None:
    """Settles a field while the frozen dataclass is being made."""
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
    """`value` as a scale that float32 can hold, and its reciprocal too."""
    number = as_number(name, value)
    lowest, highest = FLOAT32.smallest_normal, FLOAT32.max
    if not lowest <= number <= highest:
        raise SettingError(
            f"{name} must be finite, > 0 and within float32's normal numbers "
            f"({lowest} to {highest}), got {number}."
        )
    return _power_of_two(name, number, exact)


def as_factor(name: str, value: Any, above: float, below: float, exact: bool) -> float:
    """`value` as a factor that lies strictly between two numbers, also once it is a float32."""
    number = as_number(name, value)
    if not (above < number < below and above < float32(number) < below) or (
        number < FLOAT32.smallest_normal  # JAX would take it for zero
    ):
        raise SettingError(
            f"{name} must be > {above:g} and < {below:g} in float32's normal numbers, got {number}."
        )
    return _power_of_two(name, number, exact)


def _power_of_two(name: str, number: float, exact: bool) -> float:
    """`number`, or a SettingError if `exact` and it is no power of two."""
    if exact and math.frexp(number)[0] != 0.5:
        raise SettingError(
            f"{name} must be a power of two so that unscaling is exact, got {number}. "
            "Pass exact=False to use it all the same."
        )
    return number


def as_flag(name: str, value: Any) -> bool:
    """`value`, or a SettingError if it is no bool."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, got {value!r}.")
    return value


def as_count(name: str, value: Any) -> int:
    """`value` as an int that an int32 counter can reach, or a SettingError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise SettingError(f"{name} must be a whole number, got {value!r}.") from None
    if isinstance(value, bool) or not 1 <= number < 2**31:
        raise SettingError(f"{name} must be a whole number from 1 to 2**31 - 1, got {value!r}.")
    return number
