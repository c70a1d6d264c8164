"""Checkpoints: nothing is lost on the way, torch reads ours and we torch's."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint_cases import EXAMPLES, not_plain, saved_of
from gradscale.checkpoints.format import BLOCK, TORCH_KEYS, VERSION, Saved, read, write
from gradscale.errors import StateError
from gradscale.policy import (
    POLICIES,
    Dynamic,
    DynamicState,
    GradStats,
    Headroom,
)
from gradscale.torch import GradScaler


def lost(name: str, there_and_back: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """What of a policy and its state is different after a trip through a checkpoint."""
    saved = saved_of(name)
    back = read(there_and_back(write(saved)))
    policy, state = EXAMPLES[name]
    found = [f for f, a, b in zip(Saved._fields, saved, back, strict=True) if a != b]
    lists = {
        "losses": [list(pair) for pair in back.losses],
        "skipped_in_a_row": list(back.skipped_in_a_row),
    }
    found += not_plain({**back._asdict(), **lists})
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
        lambda c: {**c, BLOCK: {**c[BLOCK], "skipped_in_a_row": [3, 0]}},
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


def test_checkpoint_without_further_losses_or_counts_does_not_mention_them() -> None:
    alone = saved_of("Dynamic")._replace(losses=(), skipped_in_a_row=())
    # So it is one of an earlier version, which did not save the counts.
    assert not {"losses", "skipped_in_a_row"} & set(write(alone)[BLOCK])
    assert read(write(alone)) == alone


def test_what_later_versions_add_to_the_block_is_passed_over() -> None:
    # As earlier versions do with skipped_in_a_row.
    checkpoint = write(saved_of("Dynamic"))
    checkpoint[BLOCK]["more"] = [1, 2]
    assert read(checkpoint) == saved_of("Dynamic")


def test_setting_that_is_none_is_left_out_for_versions_that_do_not_have_it() -> None:
    policy = Dynamic(hysteresis=2)
    saved = Saved("Dynamic", dataclasses.asdict(policy), policy.init()._asdict(), {})
    checkpoint = write(saved)
    assert "slow_growth_above" not in checkpoint[BLOCK]["settings"]
    assert Dynamic(**read(checkpoint).settings) == policy


@pytest.mark.parametrize(("given", "above"), [({"above": 4.0}, 4.0), ({}, 1.0)], ids=str)
def test_checkpoint_of_lengthening_is_one_of_dynamic(given: dict[str, float], above: float) -> None:
    # Written when that was a policy of its own.
    block = {
        "version": 1,
        "policy": "Lengthening",
        "settings": {
            "init_scale": 4.0, "hysteresis": 1, "min_scale": 0.03125, "max_scale": 2.0**64,
            "exact": True, "default_max_scale": True, **given,
        },
        "state": {"bad_steps": 2},
        "counters": {"bad_losses": 0, "steps": 9},
    }  # fmt: skip
    old = {
        "scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 256,
        "_growth_tracker": 3, BLOCK: block,
    }  # fmt: skip
    saved = read(old)
    assert (saved.policy, saved.state) == (
        "Dynamic", {"scale": 8.0, "good_steps": 3, "bad_steps": 2}
    )  # fmt: skip
    scaler = GradScaler("cpu")
    scaler.load_state_dict(old)
    wanted = Dynamic(
        init_scale=4.0, growth_interval=256, min_scale=0.03125, slow_growth_above=above
    )
    assert scaler.policy == wanted
    assert read(scaler.state_dict()).settings == saved.settings


def test_checkpoint_of_headroom_without_later_fields_is_read() -> None:
    # Written before lone spikes could be skipped.
    scaler = GradScaler("cpu", policy=Headroom(margin=1, forget=500))
    old = scaler.state_dict()
    block = old[BLOCK]
    del block["settings"]["spikes"], block["state"]["credit"]
    block["state"] |= {"spread": 3, "calm": 40, "patience": 1000}
    other = GradScaler("cpu")
    other.load_state_dict(old)
    assert other.policy == scaler.policy
    assert other.state_dict()[BLOCK]["state"] == block["state"] | {"credit": 64}
    del block["state"]["calm"]
    with pytest.raises(StateError, match=r"fields of Headroom\. Check calm, credit"):
        other.load_state_dict(old)


@pytest.mark.parametrize(
    "more",
    [
        {"settings": {}},
        {"settings": {**dict.fromkeys(TORCH_KEYS[1:4], 2), "hysteresis": 2}},
        {"state": {"scale": 8.0, "bad_steps": 1}},
        {"losses": [(1, {"scale": 8.0})]},
        {"patience": 1},
        {"skipped_in_a_row": [2]},
    ],
    ids=repr,
)
def test_what_torchs_keys_cannot_hold_is_not_written_in_them(more: dict[str, Any]) -> None:
    torchs = Saved(None, dict.fromkeys(TORCH_KEYS[1:4], 2), {"scale": 8.0, "good_steps": 1}, {})
    assert read(write(torchs)) == torchs
    with pytest.raises(StateError, match="Load it into a scaler"):
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


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "Dynamic"])
def test_torchs_scaler_can_go_on_from_a_policy_without_its_settings(name: str) -> None:
    scaler = torch.amp.GradScaler("cpu", growth_factor=4.0, backoff_factor=0.25, growth_interval=9)
    scaler.load_state_dict(write(saved_of(name)))
    scale = EXAMPLES[name][1].scale
    assert (scaler.get_scale(), scaler._growth_tracker or scaler._init_growth_tracker) == (scale, 0)
    assert trained(scaler, [math.inf]).get_scale() == scale / 2
    assert trained(scaler, [1.0] * 1999).get_scale() == scale / 2
    assert trained(scaler, [1.0]).get_scale() == scale


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "Dynamic"])
def test_settings_that_are_there_for_torch_alone_are_not_read_back(name: str) -> None:
    checkpoint = write(saved_of(name))
    for factors in ((1.0, 1.0), (3.0, 0.25)):  # earlier versions wrote 1.0 for both
        other = {**checkpoint, **dict(zip(TORCH_KEYS[1:3], factors, strict=True))}
        assert read({**other, "_growth_tracker": 7}) == read(checkpoint) == saved_of(name)


def test_torchs_state_with_factors_of_one_is_a_static_scale() -> None:
    # What a torch scaler saves that once loaded our checkpoint of a fixed scale.
    frozen = dict(zip(TORCH_KEYS, (8.5, 1.0, 1.0, 2000, 3), strict=True))
    assert read(frozen) == Saved("Static", {"init_scale": 8.5, "exact": False}, {"scale": 8.5}, {})
