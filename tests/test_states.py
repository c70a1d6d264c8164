"""Checkpoints: nothing is lost on the way, torch reads ours and we torch's, damage has a name."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from gradscale.errors import StateError
from gradscale.policy import (
    POLICIES,
    Dynamic,
    DynamicState,
    GradStats,
    Headroom,
    HeadroomState,
    Histogram,
    HistogramState,
    Lengthening,
    LogMax,
    LogMaxState,
    Off,
    Policy,
    ScaleState,
    State,
    Static,
)
from gradscale.states import BLOCK, TORCH_KEYS, VERSION, Saved, read, write
from gradscale.torch import GradScaler

DYNAMIC = Dynamic(
    init_scale=1000.1,
    growth_factor=4.5,
    backoff_factor=0.25,
    growth_interval=7,
    hysteresis=3,
    min_scale=0.7,
    max_scale=2.0**70,
    exact=False,
)
BOUNDS = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 64.0, "format": "bfloat16"}
HEADROOM = Headroom(**BOUNDS, margin=3, memory=5, forget=6, pause=7)
LOGMAX = LogMax(**BOUNDS, decay=0.5, slow_decay=0.75, deviations=2.0)
HISTOGRAM = Histogram(**BOUNDS, threshold=0.25, interval=3)
# A policy without a default value, and a state that is not its first: one line for each.
EXAMPLES: dict[str, tuple[Policy, State]] = {
    "Off": (Off(), ScaleState(1.0)),
    "Static": (Static(init_scale=1000.1, exact=False), ScaleState(2.5)),
    "Dynamic": (DYNAMIC, DynamicState(scale=16.5, good_steps=5, bad_steps=2)),
    "Lengthening": (
        Lengthening(**dataclasses.asdict(DYNAMIC), above=3.0),
        DynamicState(scale=16.5, good_steps=5, bad_steps=2),
    ),
    "Headroom": (HEADROOM, HeadroomState(8.0, -3, 4, -70, 5, 6, 7, 1, 2, 9, 11, 12)),
    "LogMax": (LOGMAX, LogMaxState(8.0, -2.5, -3.25, 0.5, 0.75, 0.125)),
    "Histogram": (HISTOGRAM, HistogramState(8.0, 3)),
}


def saved_of(name: str) -> Saved:
    """The example of a policy, as an engine would save it."""
    policy, state = EXAMPLES[name]
    others = ((1, {**state._asdict(), "scale": 3.5}), ("penalty", state._asdict()))
    counters = {"bad_losses": 9, "more": 1}
    return Saved(name, dataclasses.asdict(policy), state._asdict(), counters, others)


def not_plain(value: Any, where: str = "") -> list[str]:
    """Where something is neither a number, a string, None nor a list or dict of such by strings."""
    if type(value) is list:
        return [found for i, v in enumerate(value) for found in not_plain(v, f"{where}.{i}")]
    if type(value) is dict:
        odd = [f"{where}: the key {key!r}" for key in value if type(key) is not str]
        return odd + [found for k, v in value.items() for found in not_plain(v, f"{where}.{k}")]
    return [] if type(value) in {str, int, float, bool, type(None)} else [f"{where}: {value!r}"]


def lost(name: str, there_and_back: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """What of a policy and its state is different after a trip through a checkpoint."""
    saved = saved_of(name)
    back = read(there_and_back(write(saved)))
    policy, state = EXAMPLES[name]
    found = [f for f, a, b in zip(Saved._fields, saved, back, strict=True) if a != b]
    found += not_plain({**back._asdict(), "losses": [list(pair) for pair in back.losses]})
    if not found and POLICIES[back.policy](**back.settings) != policy:
        found.append("the policy as rebuilt")
    if not found and type(state)(**back.state) != state:
        found.append("the state as rebuilt")
    return found


def through_json(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(checkpoint, allow_nan=False))


# There and back.


def test_there_is_an_example_of_every_policy_without_a_default_value() -> None:
    assert set(EXAMPLES) == set(POLICIES)
    for name, (policy, state) in EXAMPLES.items():
        assert type(policy) is POLICIES[name]
        for field in dataclasses.fields(policy):
            assert getattr(policy, field.name) != field.default
        assert name == "Off" or all(a != b for a, b in zip(state, policy.init(), strict=True))


@pytest.mark.parametrize("trip", [through_json, copy.deepcopy], ids=["json", "in memory"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_lost_in_a_checkpoint(
    name: str, trip: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    assert lost(name, trip) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: {**c, "scale": c["scale"] * 2},
        lambda c: {**c, "growth_interval": 8},
        lambda c: {**c, "_growth_tracker": 4},
        lambda c: {**c, BLOCK: {**c[BLOCK], "state": {}}},
        lambda c: {**c, BLOCK: {**c[BLOCK], "counters": {"bad_losses": 9}}},
        lambda c: {**c, BLOCK: {**c[BLOCK], "settings": {"exact": False}}},
        lambda c: {**c, BLOCK: {**c[BLOCK], "losses": c[BLOCK]["losses"][:1]}},
    ],
)
def test_loss_on_the_way_is_found(spoil: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert lost("Dynamic", spoil)


@pytest.mark.parametrize("name", EXAMPLES)
def test_checkpoint_is_plain_and_says_nothing_twice(name: str) -> None:
    checkpoint = write(saved_of(name))
    block = checkpoint[BLOCK]
    assert not_plain(checkpoint) == []
    assert tuple(checkpoint) == (*TORCH_KEYS, BLOCK)
    assert (block["version"], block["policy"]) == (VERSION, name)
    assert not {*block["settings"], *block["state"]} & {*TORCH_KEYS, "good_steps"}


@pytest.mark.parametrize("value", [np.float64(1.0), torch.tensor(1.0), (1,), {1: 1}, b"1", 1j])
def test_what_is_not_plain_is_found(value: Any) -> None:
    assert not_plain({"a": {"b": value}})


@pytest.mark.parametrize("name", EXAMPLES)
def test_write_and_read_leave_their_argument_alone(name: str) -> None:
    saved = saved_of(name)
    checkpoint = write(saved)
    before = copy.deepcopy(checkpoint)
    back = read(checkpoint)
    back.settings["more"], back.state["more"], back.counters["more"] = 1, 2, 3
    assert checkpoint == before
    assert saved == saved_of(name)
    back.losses[0][1]["more"] = 4
    assert (checkpoint, saved) == (before, saved_of(name))


def test_checkpoint_without_further_losses_does_not_mention_them() -> None:
    alone = saved_of("Dynamic")._replace(losses=())
    assert "losses" not in write(alone)[BLOCK]
    assert read(write(alone)) == alone


@pytest.mark.parametrize(
    "more",
    [
        {"settings": {}},
        {"settings": {**dict.fromkeys(TORCH_KEYS[1:4], 2), "hysteresis": 2}},
        {"state": {"scale": 8.0, "bad_steps": 1}},
        {"losses": [(1, {"scale": 8.0})]},
        {"patience": 1},
    ],
    ids=repr,
)
def test_what_torchs_keys_cannot_hold_is_not_written_in_them(more: dict[str, Any]) -> None:
    torchs = Saved(None, dict.fromkeys(TORCH_KEYS[1:4], 2), {"scale": 8.0, "good_steps": 1}, {})
    assert read(write(torchs)) == torchs
    with pytest.raises(StateError, match="load it into a scaler"):
        write(torchs._replace(**more))


def test_checkpoint_taken_over_mid_run_goes_on_as_if_nothing_had_happened() -> None:
    policy, state = EXAMPLES["Dynamic"]
    back = read(through_json(write(saved_of("Dynamic"))))
    twin, copied = POLICIES[back.policy](**back.settings), DynamicState(**back.state)
    for i in range(60):
        stats = GradStats(finite=i % 17 < 9, loss_finite=i % 5 > 0)
        state, copied = policy.update(state, stats), twin.update(copied, stats)
        assert copied == state


# torch's own.


def trained(scaler: torch.amp.GradScaler, losses: list[float]) -> torch.amp.GradScaler:
    """`scaler` after steps whose gradients are finite where the loss is."""
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for loss in losses:
        optimizer.zero_grad()
        scaler.scale(weight * loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_state_of_torchs_scaler_is_read() -> None:
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=96.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=4
    )
    state_dict = trained(scaler, [1.0, math.inf, 1.0, 1.0, 1.0]).state_dict()
    settings = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 4}
    assert read(state_dict) == Saved(None, settings, {"scale": 24.0, "good_steps": 3}, {})


def test_state_of_torchs_scaler_survives_being_written_again() -> None:
    saved = read(trained(torch.amp.GradScaler("cpu"), [1.0, 1.0]).state_dict())
    assert read(write(saved)) == saved


def test_torchs_scaler_takes_over_what_dynamic_wrote() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(write(saved_of("Dynamic")))
    keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    assert scaler.state_dict() == dict(zip(keys, (16.5, 4.5, 0.25, 7, 5), strict=True))
    # It grows on the second further step, by our factor: five steps of seven were done.
    assert trained(scaler, [1.0]).get_scale() == 16.5
    assert trained(scaler, [1.0]).get_scale() == 16.5 * 4.5


@pytest.mark.parametrize("name", ["Off", "Static"])
def test_torchs_scaler_holds_still_what_holds_still_here(name: str) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**write(saved_of(name)), "growth_interval": 2})
    state = EXAMPLES[name][1]
    assert scaler.get_scale() == state.scale
    assert trained(scaler, [1.0, math.inf, 1.0, 1.0, 1.0]).get_scale() == state.scale


# Damage.

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
    (BLOCK, "losses"): [None, 8, True, "", "ab", b"ab", {}, {"a": 8.0}, [8], [[]], [[1]], ["ab"]],
}
DROPPED = object()


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
    + [path for path in DAMAGE if len(path) == 2 and path[1] != "losses"],
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
        *(([["a", {**GOOD, "scale": bad}]], "id 'a': The state's scale") for bad in NO_SCALE),
        *(([["a", {**GOOD, "good_steps": bad}]], "'a': The state's good_") for bad in NO_COUNT),
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
    policy, settings, state, counters, losses, patience = saved
    assert patience is None
    assert not_plain([list(pair) for pair in losses]) == []
    assert all(0 < fields["scale"] < math.inf for _, fields in losses)
    assert policy is None or type(policy) is str
    assert not_plain(settings) + not_plain(state) + not_plain(counters) == []
    numbers = [value for name, value in settings.items() if name != "format"]
    assert not [v for v in (*numbers, *state.values()) if type(v) in {dict, str}]
    assert 0 < state["scale"] < math.inf
    assert all(type(v) is int and 0 <= v < 2**31 for v in counters.values())


@given(wrecks() | anything)
def test_wreck_is_loaded_or_refused_with_a_state_error(checkpoint: Any) -> None:
    assert objection(load, checkpoint, "") in {"", "accepted"}
