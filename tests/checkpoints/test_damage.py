"""Damaged checkpoints: refused with a StateError that names the damage, and nothing is loaded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from checkpoint_cases import EXAMPLES, not_plain, saved_of
from gradscale.checkpoints.format import BLOCK, TORCH_KEYS, VERSION, read, write
from gradscale.errors import StateError
from gradscale.torch import GradScaler

Path = tuple[str, ...]
TWO = torch.ones(2)
NO_NUMBER = [None, "8", b"8", [], [8.0], {}, {"a": 8.0}, 8j, object(), TWO, np.ones(2)]
NO_SCALE = [*NO_NUMBER, True, math.nan, math.inf, -math.inf, 0, 0.0, -1, -8.0, 10**400]
NO_COUNT = [*NO_NUMBER, True, math.nan, math.inf, -1, 8.0, 8.5, 2**31, 10**400]
NO_DICT = [None, 8, True, "", "abc", b"", [], ["a"], [["a", 8]], [8], (), object(), TWO]
DAMAGE: dict[Path, list[Any]] = {
    ("scale",): NO_SCALE,
    ("growth_factor",): NO_NUMBER,
    ("backoff_factor",): NO_NUMBER,
    ("growth_interval",): NO_NUMBER,
    ("_growth_tracker",): NO_COUNT,
    (BLOCK,): [*NO_DICT, {}],
    (BLOCK, "version"): [*NO_NUMBER, 0, VERSION + 1, -1, math.nan, "1"],
    (BLOCK, "policy"): [None, 8, True, b"Dynamic", ["Dynamic"], {"Dynamic": 1}, TWO],
    (BLOCK, "settings"): NO_DICT,
    (BLOCK, "state"): NO_DICT,
    (BLOCK, "counters"): NO_DICT,
    (BLOCK, "settings", "hysteresis"): NO_NUMBER,
    (BLOCK, "state", "bad_steps"): NO_COUNT,
    (BLOCK, "counters", "bad_losses"): NO_COUNT,
    (BLOCK, "skipped_in_a_row"): [None, 8, True, "", "12", {}, *([1, bad] for bad in NO_COUNT)],
    (BLOCK, "losses"): [None, 8, True, "", "ab", b"ab", {}, {"a": 8.0}, [8], [[]], [[1]], ["ab"]],
}
DROPPED = object()
OPTIONAL = ("losses", "skipped_in_a_row")


def damaged(path: Path, value: Any, name: str = "Dynamic") -> dict[str, Any]:
    """A good checkpoint but for one place, where it says `value` or nothing."""
    checkpoint = write(saved_of(name))
    inner = checkpoint
    for key in path[:-1]:
        inner = inner[key]
    if value is DROPPED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return checkpoint


def objection(load: Callable[[Any], Any], checkpoint: Any, name: str) -> str:
    """What is wrong with the way in which damage at `name` is refused; "" if nothing is."""
    try:
        load(checkpoint)
    except StateError as error:
        return "" if name in str(error) else f"{name} is not named: {error}"
    except Exception as error:
        return f"{type(error).__name__} instead of StateError: {error}"
    return "accepted"


def load(checkpoint: Any) -> None:
    """Loads into our scaler, which must stay as it was if that fails."""
    scaler = GradScaler("cpu", init_scale=2.0**5, growth_interval=9)
    before = scaler.state_dict()
    try:
        with warnings.catch_warnings():
            # A scale outside the bounds is no damage: it is clamped, and that is said.
            warnings.simplefilter("ignore", UserWarning)
            scaler.load_state_dict(checkpoint)
    except StateError:
        assert scaler.state_dict() == before
        raise


@pytest.mark.parametrize("path", DAMAGE, ids=".".join)
def test_what_has_the_wrong_form_is_refused_by_name(path: Path) -> None:
    found = {}
    for value in DAMAGE[path]:
        said = objection(read, damaged(path, value), path[-1])
        if said:
            found[f"{value!r:.40}"] = said
    assert found == {}


@pytest.mark.parametrize(
    "path",
    [(key,) for key in TORCH_KEYS]
    + [path for path in DAMAGE if len(path) == 2 and path[1] not in OPTIONAL],
    ids=".".join,
)
def test_key_that_is_missing_is_named(path: Path) -> None:
    assert objection(read, damaged(path, DROPPED), path[-1]) == ""


GOOD = {"scale": 8.0, "good_steps": 1}


@pytest.mark.parametrize(
    ("losses", "name"),
    [
        ([[0, GOOD]], "got 0"),
        ([[1, GOOD], [1, GOOD]], "got 1"),
        ([[True, GOOD]], "got True"),
        ([[1.0, GOOD]], "got 1.0"),
        ([[None, GOOD]], "got None"),
        ([[[1], GOOD]], r"got [1]"),
        *(([[1, GOOD], ["a", bad]], "id 'a'") for bad in [*NO_DICT, {}, {"good_steps": 1}]),
        *(([["a", {**GOOD, "scale": bad}]], "id 'a': scale") for bad in NO_SCALE),
        *(([["a", {**GOOD, "good_steps": bad}]], "'a': good_") for bad in NO_COUNT),
    ],
)
def test_damaged_state_of_a_further_loss_is_refused_by_its_id(losses: Any, name: str) -> None:
    assert objection(read, damaged((BLOCK, "losses"), losses), name) == ""


@pytest.mark.parametrize("checkpoint", [None, 5, "abc", [], [("scale", 8.0)], TWO], ids=repr)
def test_what_is_no_dict_is_refused_by_its_type(checkpoint: Any) -> None:
    assert objection(read, checkpoint, type(checkpoint).__name__) == ""


def test_empty_state_is_refused_and_the_reason_guessed() -> None:
    assert objection(read, {}, "enabled=False") == ""


def test_keys_that_were_found_are_named() -> None:
    unknown = {"model": 8.0, "epoch": 3, 7: None}
    assert objection(read, unknown, "scale, growth_factor") == ""
    assert objection(read, unknown, "['7', 'epoch', 'model']") == ""


def test_state_of_a_later_version_names_both_versions() -> None:
    later = damaged((BLOCK, "version"), 41)
    assert objection(read, later, "version 41") == ""
    assert objection(read, later, f"version {VERSION}") == ""


def test_block_cannot_overrule_the_scale() -> None:
    twice = damaged((BLOCK, "state", "scale"), 3)
    assert objection(read, twice, "scale") == ""


UNUSABLE: list[tuple[Path, Any, str]] = [
    (("growth_factor",), math.nan, "growth_factor"),
    (("growth_factor",), 1.0, "growth_factor"),
    (("growth_factor",), 10**400, "growth_factor"),
    (("backoff_factor",), -0.5, "backoff_factor"),
    (("growth_interval",), 0, "growth_interval"),
    (("growth_interval",), 2.5, "growth_interval"),
    ((BLOCK, "settings", "hysteresis"), math.nan, "hysteresis"),
    ((BLOCK, "settings", "min_scale"), -1.0, "min_scale"),
    ((BLOCK, "settings", "max_scale"), math.inf, "max_scale"),
    ((BLOCK, "settings", "exact"), True, "power of two"),
    ((BLOCK, "settings", "patience"), 3, "patience"),
    ((BLOCK, "policy"), "Hopeful", "Hopeful"),
    ((BLOCK, "policy"), "Static", "settings"),
    ((BLOCK, "state", "moods"), 3, "moods"),
    ((BLOCK, "state", "bad_steps"), DROPPED, "bad_steps"),
]


@pytest.mark.parametrize(
    ("path", "value", "name"),
    UNUSABLE,
    ids=[f"{p[-1]}-{i}" for i, (p, _, _) in enumerate(UNUSABLE)],
)
def test_what_the_policy_refuses_is_a_state_error_that_names_it(
    path: Path, value: Any, name: str
) -> None:
    assert objection(load, damaged(path, value), name) == ""


@pytest.mark.parametrize("name", EXAMPLES)
def test_undamaged_checkpoint_is_refused_by_nobody(name: str) -> None:
    for loader in (read, load):
        assert objection(loader, write(saved_of(name)), "") == "accepted"


def test_wrong_refusal_is_found() -> None:
    def raising(error: Exception) -> Callable[[Any], Any]:
        def loader(_: Any) -> None:
            raise error

        return loader

    assert objection(raising(StateError("The scale is odd.")), {}, "scale") == ""
    assert objection(raising(StateError("Something is odd.")), {}, "scale")
    assert objection(raising(ValueError("The scale is odd.")), {}, "scale")


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from(
        [10**400, TWO, torch.tensor(3), torch.tensor(3.5), np.ones(2), np.float64(3)]
    ),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@st.composite
def wrecks(draw: st.DrawFn) -> dict[str, Any]:
    """A good checkpoint in which up to three things are dropped, replaced or added."""
    checkpoint = write(saved_of(draw(st.sampled_from(list(EXAMPLES)))))
    for _ in range(draw(st.integers(1, 3))):
        inner: Any = checkpoint
        while type(inner) is dict and inner:
            key = draw(st.sampled_from([*inner, draw(st.text(max_size=3))]))
            deeper = inner.get(key)
            if type(deeper) is not dict or draw(st.booleans()):
                break
            inner = deeper
        if type(inner) is dict and draw(st.booleans()):
            inner.pop(key, None)
        elif type(inner) is dict:
            inner[key] = draw(anything)
    return checkpoint


@given(wrecks())
def test_wreck_is_read_as_plain_numbers_or_refused(checkpoint: dict[str, Any]) -> None:
    try:
        saved = read(checkpoint)
    except StateError:
        return
    policy, settings, state, counters, losses, patience, skipped = saved
    assert all(type(count) is int and 0 <= count < 2**31 for count in skipped)
    assert patience is None
    assert not_plain([list(pair) for pair in losses]) == []
    assert all(0 < fields["scale"] < math.inf for _, fields in losses)
    assert policy is None or type(policy) is str
    assert not_plain(settings) + not_plain(state) + not_plain(counters) == []
    names = ("format", "spikes")  # these settings are words
    numbers = [value for name, value in settings.items() if name not in names]
    assert not [v for v in (*numbers, *state.values()) if type(v) in {dict, str}]
    assert 0 < state["scale"] < math.inf
    assert all(type(v) is int and 0 <= v < 2**31 for v in counters.values())


@given(wrecks() | anything)
def test_wreck_is_loaded_or_refused_with_a_state_error(checkpoint: Any) -> None:
    assert objection(load, checkpoint, "") in {"", "accepted"}
