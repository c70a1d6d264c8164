"""Megatron-LM's arguments to a policy and back."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradscale as gs
from gradscale.compat.megatron import (
    arguments_from_policy,
    flags_from_policy,
    policy_from_arguments,
    policy_from_flags,
)
from gradscale.errors import SettingError

DEFAULT = gs.Dynamic(init_scale=2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0)


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ({}, gs.Off()),
        ({"bf16": True}, gs.Off()),
        ({"fp16": True}, DEFAULT),
        (Namespace(fp16=True, loss_scale=None, loss_scale_window=1000.0, num_layers=2), DEFAULT),
        ({"fp16": True, "loss_scale": 128}, gs.Static(128.0)),
        ({"bf16": True, "loss_scale": 3.0}, gs.Static(3.0, exact=False)),
        (
            Namespace(fp16=True, initial_loss_scale=64, min_loss_scale=0.5, hysteresis=1),
            gs.Dynamic(init_scale=64.0, growth_interval=1000, min_scale=0.5),
        ),
    ],
)
def test_arguments_become_settings(arguments: Any, policy: Any) -> None:
    assert policy_from_arguments(arguments) == policy


def test_flags_become_settings() -> None:
    line = "--num-layers 2 --fp16 --loss-scale-window 50 --min-loss-scale 2 --hysteresis 3 --bias"
    expected = gs.Dynamic(init_scale=2.0**32, growth_interval=50, hysteresis=3, min_scale=2.0)
    assert policy_from_flags(line.split()) == expected


@given(
    start=st.floats(2.0**-100, 2.0**100, width=32),
    floor=st.floats(2.0**-100, 2.0**100, width=32),
    window=st.integers(1, 2**31 - 1),
    hysteresis=st.integers(1, 100),
)
def test_policy_comes_back_as_it_was(
    start: float, floor: float, window: int, hysteresis: int
) -> None:
    policy = gs.Dynamic(
        init_scale=max(start, floor),
        min_scale=min(start, floor),
        growth_interval=window,
        hysteresis=hysteresis,
        exact=False,
    )
    for back in (
        policy_from_arguments(arguments_from_policy(policy)),
        policy_from_flags(flags_from_policy(policy)),
    ):
        assert isinstance(back, gs.Dynamic)
        assert arguments_from_policy(back) == arguments_from_policy(policy)
        assert (back.max_scale, back.growth_factor) == (policy.max_scale, policy.growth_factor)


@pytest.mark.parametrize(
    "policy", [gs.Off(), gs.Static(64.0), gs.Static(3.0, exact=False), DEFAULT]
)
def test_other_policies_come_back_as_they_were(policy: Any) -> None:
    assert policy_from_arguments(arguments_from_policy(policy)) == policy
    assert policy_from_flags(flags_from_policy(policy)) == policy


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fp16": "yes"}, "fp16 must be True or False"),
        ({"fp16": True, "hysteresis": 0}, "hysteresis"),
        ({"fp16": True, "loss_scale_window": 2.5}, "loss_scale_window"),
        ({"fp16": True, "min_loss_scale": 0.0}, "min_loss_scale"),
        ({"fp16": True, "initial_loss_scale": float("inf")}, "initial_loss_scale"),
        ({"fp16": True, "initial_loss_scale": 0.5}, "initial_loss_scale must be >= min_loss_scale"),
        ({"loss_scale": -1.0}, "loss_scale"),
    ],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError) as caught:
        policy_from_arguments(arguments)
    assert str(caught.value).startswith(named)


def test_flags_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(SettingError, match="--loss-scale"):
        policy_from_flags(["--fp16", "--loss-scale", "dynamic"])


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (gs.Dynamic(max_scale=2.0**20), "max_scale=1048576.0"),
        (gs.Dynamic(growth_factor=4.0), "growth_factor=4.0"),
        (gs.Headroom(), "no counterpart of Headroom()"),
    ],
)
def test_setting_that_megatron_does_not_have_is_named(policy: Any, named: str) -> None:
    with pytest.raises(SettingError) as caught:
        arguments_from_policy(policy)
    assert named in str(caught.value)
