"""The settings of the rules: what is refused, which bounds give way, what copies keep."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gradscale import policy as rules
from gradscale.errors import SettingError
from gradscale.formats import FLOAT32
from gradscale.policy import (
    MAX_SCALE,
    MIN_SCALE,
    Dynamic,
    Policy,
    Static,
    as_policy,
    policy_or_settings,
)
from policy_cases import BOTTOM, HISTORIES, POLICIES, TOP, plain

NAN, INF = math.nan, math.inf
NO_NUMBER = ["2", b"2", None, [2.0], {}, 2j, object(), np.ones(2), torch.ones(2)]
NO_SCALE = [NAN, INF, -INF, 0, 0.0, -0.0, -1, -8.0, True, False, 10**400, -(10**400), *NO_NUMBER]
NO_COUNT = [*NO_SCALE, 1.0, 2.5, 2**31]
TOO_FAR = [2.0**128, FLOAT32.max * (1 + 2**-24), BOTTOM / 2, 5e-324]
WRONG: dict[str, list[Any]] = {
    "init_scale": [*NO_SCALE, *TOO_FAR],
    "min_scale": [*NO_SCALE, *TOO_FAR],
    "max_scale": [*NO_SCALE, *TOO_FAR],
    "growth_factor": [*NO_SCALE, 1, 1.0, 0.5, 1 + 2**-25, 2.0**128],
    # Below float32's normal numbers engines disagree: JAX takes 2**-149 for zero, numpy does not.
    "backoff_factor": [*NO_SCALE, 1, 1.0, 2.0, 1 - 2**-26, 2.0**-150, 2.0**-149, BOTTOM / 2],
    "growth_interval": NO_COUNT,
    "hysteresis": NO_COUNT,
    # None is the default: the interval is the same at every scale.
    "slow_growth_above": [value for value in (*NO_SCALE, *TOO_FAR) if value is not None],
    "exact": [NAN, INF, -INF, 0, 1, -1, *NO_NUMBER],
}
SETTINGS: dict[type[Policy], dict[str, Any]] = {
    Static: {"init_scale": 8.0},
    Dynamic: {},
}


def test_scale_of_static_may_go_without_its_name() -> None:
    assert Static(1024.0) == Static(init_scale=1024.0)
    with pytest.raises(SettingError, match=r"init_scale must be a power of two.*got 1000.0"):
        Static(1000.0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_repr_is_the_call_that_builds_the_policy(policy: Policy) -> None:
    assert eval(repr(policy), vars(rules)) == policy


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        (rules.Off(), "Off()"),
        (Dynamic(), "Dynamic()"),
        (Static(8.0), "Static(init_scale=8.0)"),
        (Dynamic(hysteresis=2), "Dynamic(hysteresis=2)"),
        (Dynamic(init_scale=2.0**100), f"Dynamic(init_scale={2.0**100})"),  # a bound gave way
        (Dynamic(min_scale=2.0**-14), "Dynamic(min_scale=6.103515625e-05)"),  # given: it does not
        (rules.Headroom(), "Headroom()"),
        (rules.LogMax(format="bfloat16"), "LogMax(format='bfloat16')"),
        (rules.Histogram(interval=50), "Histogram()"),
    ],
)
def test_repr_shows_only_what_was_given(policy: Policy, shown: str) -> None:
    assert repr(policy) == shown


# What a caller gives as a policy.


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policy_is_taken_as_it_is(policy: Policy) -> None:
    assert as_policy(policy) is policy


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("headroom", rules.Headroom()),
        ("Headroom", rules.Headroom()),
        ("dynamic", Dynamic()),
        ("static", Static(2.0**16)),
        ("logmax", rules.LogMax()),
        ("histogram", rules.Histogram()),
        ("off", rules.Off()),
    ],
)
def test_name_is_the_policy_with_its_defaults(name: str, policy: Policy) -> None:
    assert as_policy(name) == policy


def test_every_policy_has_a_name() -> None:
    assert set(rules.NAMES) == {name.lower() for name in rules.POLICIES}


@pytest.mark.parametrize(
    ("value", "got", "remedy"),
    [
        ("none", "'none'", ""),
        ("", "''", ""),
        ("Headroom()", "'Headroom()'", ""),
        (rules.Headroom, "the class Headroom", " Use policy='headroom'."),
        (Static, "the class Static", " Use policy='static'."),
        (int, "the class int", ""),
        (1024.0, "1024.0", ""),
        (None, "None", ""),
    ],
)
def test_what_is_no_policy_is_refused_with_what_to_write(value: Any, got: str, remedy: str) -> None:
    with pytest.raises(SettingError) as error:
        as_policy(value)
    wanted = (
        "policy must be a policy such as gs.Headroom(), or one of the names headroom, dynamic, "
        f"static, logmax, histogram, off, got {got}.{remedy}"
    )
    assert str(error.value) == wanted


def test_policy_comes_before_settings_that_nobody_gave() -> None:
    unset, policy = Dynamic(exact=False), rules.Headroom()
    assert policy_or_settings(policy, unset) is policy
    assert policy_or_settings(None, unset) is unset
    with pytest.raises(SettingError, match="got 'none'"):
        policy_or_settings("none", unset)


def test_settings_beside_a_name_are_those_of_its_policy() -> None:
    unset, low = Dynamic(exact=False), Dynamic(init_scale=8.0, min_scale=2.0, exact=False)
    assert policy_or_settings("headroom", unset) == rules.Headroom()
    assert policy_or_settings("headroom", low) == rules.Headroom(init_scale=8.0, min_scale=2.0)
    assert policy_or_settings("static", Dynamic(init_scale=8.0, exact=False)) == Static(8.0)
    assert policy_or_settings("dynamic", low) is low
    assert policy_or_settings("logmax", unset, "bfloat16") == rules.LogMax(format="bfloat16")
    with pytest.raises(SettingError, match="Headroom has no growth_interval"):
        policy_or_settings("headroom", Dynamic(growth_interval=9, exact=False))


@pytest.mark.parametrize(
    ("policy", "settings", "said"),
    [
        (
            rules.Headroom(margin=3),
            {"init_scale": 3.0},
            "policy=Headroom(margin=3) and init_scale=3.0. "
            "Use policy=gs.Headroom(margin=3, init_scale=3.0).",
        ),
        (
            rules.Headroom(),
            {"growth_interval": 9, "min_scale": 2.0**-14},
            "policy=Headroom() and growth_interval=9, min_scale=6.103515625e-05. "
            "Headroom has no growth_interval: remove either that or policy.",
        ),
        (
            rules.Off(),
            {"init_scale": 8.0},
            "policy=Off() and init_scale=8.0. Off has no init_scale: remove either that or policy.",
        ),
    ],
)
def test_policy_and_settings_together_are_refused_with_the_way_out(
    policy: Policy, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingError) as error:
        policy_or_settings(policy, Dynamic(**settings, exact=False))
    assert str(error.value) == f"Pass either policy or torch's settings, got {said}"


def complaint(rule: type[Policy], **given: Any) -> str:
    """What the SettingError says that these settings raise; "" if they raise none."""
    try:
        rule(**given)
    except SettingError as error:
        return str(error)
    return ""


def objection(rule: type[Policy], name: str, value: Any, exact: bool = True) -> str:
    """What is wrong with the way in which `value` is refused; "" if nothing is."""
    shown = [repr(value)]
    if isinstance(value, (int, float)) and abs(value) < 2**1000:
        shown.append(str(float(value)))
    try:
        said = complaint(rule, **{**SETTINGS[rule], "exact": exact, name: value})
    except Exception as error:
        return f"{shown[0]:.40} raises {error!r}"
    named = said.startswith(f"{name} must ") and any(f"got {form}." in said for form in shown)
    return "" if named else f"{shown[0]:.40} is not refused by name and value: {said!r}"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize(
    ("rule", "name"),
    [(rule, field.name) for rule in SETTINGS for field in dataclasses.fields(rule)],
)
def test_wrong_setting_is_refused_by_name_and_value(
    rule: type[Policy], name: str, exact: bool
) -> None:
    found = [objection(rule, name, value, exact) for value in WRONG[name]]
    assert [each for each in found if each] == []


def test_wrong_values_are_known_for_every_setting() -> None:
    assert {field.name for rule in SETTINGS for field in dataclasses.fields(rule)} == set(WRONG)


def test_refusal_that_names_nothing_is_found() -> None:
    assert objection(Dynamic, "growth_factor", 4.0)  # accepted
    assert objection(Dynamic, "max_scale", 2.0)  # refused in the name of init_scale
    assert objection(Dynamic, "init_scale", 0) == ""


def test_right_settings_are_not_complained_about() -> None:
    for rule, given_settings in SETTINGS.items():
        assert complaint(rule, **given_settings) == ""


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("init_scale", 3.0),
        ("init_scale", 4 + 2**-20),
        ("growth_factor", 3.0),
        ("backoff_factor", 0.3),
        ("min_scale", 3.0),
        ("max_scale", 5.0),
        ("slow_growth_above", 5.0),
    ],
)
def test_exact_refuses_what_is_no_power_of_two_and_says_the_way_out(
    name: str, number: float
) -> None:
    room = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 8.0, name: number}
    for exact in ({}, {"exact": True}):
        said = complaint(Dynamic, **room, **exact)
        assert said.startswith(f"{name} must be a power of two")
        assert f"got {number}." in said
        assert "exact=False" in said
    assert getattr(Dynamic(**room, exact=False), name) == number


def test_exact_holds_for_a_static_scale_too() -> None:
    assert "exact=False" in complaint(Static, init_scale=1000.0)
    assert Static(init_scale=1000.0, exact=False).init_scale == 1000.0


@pytest.mark.parametrize(
    ("start", "low", "high"),
    [
        (2.0**16, MIN_SCALE, MAX_SCALE),
        (2.0**100, MIN_SCALE, 2.0**100),
        (TOP, MIN_SCALE, TOP),
        (2.0**-20, 2.0**-20, MAX_SCALE),
        (BOTTOM, BOTTOM, MAX_SCALE),
    ],
)
def test_default_bound_gives_way_to_the_init_scale(start: float, low: float, high: float) -> None:
    policy = Dynamic(init_scale=start)
    assert (policy.min_scale, policy.init_scale, policy.max_scale) == (low, start, high)


def test_default_bounds_are_those_of_the_design() -> None:
    assert (Dynamic().min_scale, Dynamic().max_scale) == (2.0**-14, 2.0**64)


@pytest.mark.parametrize(
    "given_settings",
    [
        {"init_scale": 2.0**5, "min_scale": 2.0**6},
        {"init_scale": 2.0**7, "max_scale": 2.0**6},
        {"init_scale": 2.0**-20, "min_scale": 2.0**-14},  # the default's value, but given
        {"init_scale": 2.0**70, "max_scale": 2.0**64},
        {"min_scale": 2.0**17},
        {"max_scale": 2.0**15},
    ],
    ids=str,
)
def test_given_bound_that_excludes_the_init_scale_is_an_error(
    given_settings: dict[str, float],
) -> None:
    said = complaint(Dynamic, **given_settings)
    assert said.startswith("init_scale must lie within")
    assert all(
        f"{name} {value}" in said for name, value in given_settings.items() if "m" == name[0]
    )
    assert f"got {given_settings.get('init_scale', 2.0**16)}." in said


def test_floor_above_the_ceiling_is_an_error_that_names_both() -> None:
    said = complaint(Dynamic, init_scale=2.0**4, min_scale=2.0**5, max_scale=2.0**3)
    assert said == "min_scale must be <= max_scale, got min_scale 32.0 and max_scale 8.0."


def test_given_bounds_may_lie_beyond_the_default_ones() -> None:
    low = Dynamic(init_scale=2.0**-30, max_scale=2.0**-20)
    assert (low.min_scale, low.max_scale) == (2.0**-30, 2.0**-20)
    high = Dynamic(init_scale=2.0**80, min_scale=2.0**70)
    assert (high.min_scale, high.max_scale) == (2.0**70, 2.0**80)


COPIES: dict[str, Callable[[Any], Any]] = {
    "replace": replace,
    "pickle": lambda policy: pickle.loads(pickle.dumps(policy)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "asdict": lambda policy: type(policy)(**dataclasses.asdict(policy)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_settings_survive_a_copy(policy: Policy, copied: Callable[[Any], Any]) -> None:
    twin = copied(policy)
    assert type(twin) is type(policy)
    for field in dataclasses.fields(policy):
        assert getattr(twin, field.name) == getattr(policy, field.name)
    assert plain(twin, HISTORIES[0]) == plain(policy, HISTORIES[0])


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_remembers_which_bounds_were_given(copied: Callable[[Any], Any]) -> None:
    chosen = copied(Dynamic())
    for start in (2.0**70, 2.0**80, 2.0**-20, 2.0**-30):  # what gave way once does so again
        chosen = copied(replace(chosen, init_scale=start))
        assert chosen.min_scale <= start <= chosen.max_scale
    assert (chosen.min_scale, chosen.max_scale) == (2.0**-30, 2.0**80)
    for told, beyond in ({"max_scale": 2.0**64}, 2.0**70), ({"min_scale": 2.0**-14}, 2.0**-20):
        with pytest.raises(SettingError, match="init_scale must lie within"):
            replace(copied(Dynamic(**told)), init_scale=beyond)


def test_replace_changes_one_setting_and_checks_it() -> None:
    policy = POLICIES["Dynamic"]
    changed = replace(policy, hysteresis=7)
    assert replace(changed, hysteresis=policy.hysteresis) == policy != changed
    with pytest.raises(SettingError, match="hysteresis must"):
        replace(policy, hysteresis=0)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_policy_is_frozen_hashable_and_keyword_only(policy: Policy) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.exact = False  # type: ignore[misc,union-attr]
    assert {policy: 1}[copy.deepcopy(policy)] == 1
    first = (2.0,) if isinstance(policy, Static) else ()  # the scale of Static may go without name
    with pytest.raises(TypeError, match="positional"):
        type(policy)(*first, 2.0)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.asarray, torch.tensor, int])
def test_settings_are_plain_numbers_whatever_they_were_given_as(
    kind: Callable[[float], Any],
) -> None:
    numbers = {"init_scale": 32.0, "growth_factor": 4.0, "max_scale": 64.0}
    policy = Dynamic(**{name: kind(value) for name, value in numbers.items()})
    for name, value in numbers.items():
        assert type(getattr(policy, name)) is float
        assert getattr(policy, name) == value


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.asarray, torch.tensor])
def test_counts_are_plain_numbers_whatever_they_were_given_as(kind: Callable[[int], Any]) -> None:
    policy = Dynamic(growth_interval=kind(7), hysteresis=kind(3))
    assert (type(policy.growth_interval), policy.growth_interval) == (int, 7)
    assert (type(policy.hysteresis), policy.hysteresis) == (int, 3)
