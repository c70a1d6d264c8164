"""DeepSpeed's configuration to a policy and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradscale as gs
from gradscale.compat.deepspeed import config_from_policy, policy_from_config
from gradscale.errors import SettingError


def section(**entries: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **entries}}


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, gs.Off()),
        ({"fp16": {"enabled": False, "loss_scale": 128}}, gs.Off()),
        (section(loss_scale=128), gs.Static(128.0)),
        (section(loss_scale=100), gs.Static(100.0, exact=False)),
        (section(hysteresis=1), gs.Dynamic(growth_interval=1000, min_scale=1.0)),
        (
            section(
                initial_scale_power=10,
                loss_scale_window=50,
                hysteresis=3,
                consecutive_hysteresis=True,
                min_loss_scale=4,
            ),
            gs.Dynamic(init_scale=1024.0, growth_interval=50, hysteresis=3, min_scale=4.0),
        ),
        (
            section(hysteresis=1, min_loss_scale=3),
            gs.Dynamic(growth_interval=1000, min_scale=3.0, exact=False),
        ),
    ],
)
def test_entries_become_settings(config: dict[str, Any], policy: gs.Dynamic) -> None:
    assert policy_from_config(config) == policy


@given(
    power=st.integers(0, 100),
    window=st.integers(1, 2**31 - 1),
    hysteresis=st.integers(1, 100),
    floor=st.integers(0, 100),
)
def test_configuration_comes_back_as_it_was(
    power: int, window: int, hysteresis: int, floor: int
) -> None:
    config = {
        "train_batch_size": 8,
        **section(
            auto_cast=True,
            loss_scale=0,
            initial_scale_power=power,
            loss_scale_window=window,
            hysteresis=hysteresis,
            consecutive_hysteresis=True,
            min_loss_scale=2 ** min(floor, power),
        ),
    }
    policy = policy_from_config(config)
    assert config_from_policy(policy, config) == config
    assert policy_from_config(json.loads(json.dumps(config_from_policy(policy)))) == policy


@pytest.mark.parametrize("policy", [gs.Off(), gs.Static(64.0), gs.Static(3.0, exact=False)])
def test_constant_policies_come_back_as_they_were(policy: gs.Static) -> None:
    assert policy_from_config(config_from_policy(policy)) == policy


def test_given_configuration_is_not_changed() -> None:
    config = section(auto_cast=True, loss_scale=2.0)
    made = config_from_policy(gs.Static(8.0), config)
    assert made["fp16"] == {"enabled": True, "auto_cast": True, "loss_scale": 8.0}
    assert config["fp16"]["loss_scale"] == 2.0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (section(), "consecutive_hysteresis=False has no counterpart"),
        (section(hysteresis=4, consecutive_hysteresis=False), "hysteresis=4"),
        (section(hysteresis=0, consecutive_hysteresis=True), "fp16.hysteresis"),
        (section(hysteresis=1, loss_scale_window=0), "fp16.loss_scale_window"),
        (section(hysteresis=1, loss_scale_window=2.5), "fp16.loss_scale_window"),
        (section(hysteresis=1, min_loss_scale=0), "fp16.min_loss_scale"),
        (section(hysteresis=1, min_loss_scale=0.5), "fp16.min_loss_scale must be a whole"),
        (
            section(hysteresis=1, initial_scale_power=2, min_loss_scale=8),
            "2**fp16.initial_scale_power must be >= fp16.min_loss_scale, which is 8.0, got 4.0",
        ),
        (section(hysteresis=1, initial_scale_power=1.5), "fp16.initial_scale_power"),
        (section(hysteresis=1, initial_scale_power=500), "fp16.initial_scale_power"),
        (section(loss_scale=-1), "fp16.loss_scale"),
        (section(loss_scale=float("nan")), "fp16.loss_scale"),
        (section(loss_scale="auto"), "fp16.loss_scale must be a number, got 'auto'"),
        (section(loss_scale_windw=5), "loss_scale_windw"),
        ({"fp16": {"enabled": "auto"}}, "fp16.enabled must be True or False, got 'auto'"),
        ({"fp16": True}, "fp16 must be a section"),
    ],
)
def test_entry_that_cannot_be_translated_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError) as caught:
        policy_from_config(config)
    assert named in str(caught.value)


@pytest.mark.parametrize("config", ["ds_config.json", [section()]])
def test_what_is_not_a_configuration_is_named(config: Any) -> None:
    for call in (policy_from_config, lambda given: config_from_policy(gs.Static(8.0), given)):
        with pytest.raises(SettingError, match=r"config must be a dict, got .*json\.load\(\)"):
            call(config)


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (gs.Dynamic(), "min_scale must be a whole number"),
        (gs.Dynamic(min_scale=1.0, max_scale=2.0**20), "max_scale=1048576.0"),
        (gs.Dynamic(min_scale=1.0, growth_factor=4.0), "growth_factor=4.0"),
        (gs.Dynamic(min_scale=1.0, backoff_factor=0.25), "backoff_factor=0.25"),
        (gs.Dynamic(min_scale=1.0, slow_growth_above=8.0), "slow_growth_above=8.0"),
        (gs.Dynamic(min_scale=1.0, init_scale=3.0, exact=False), "init_scale must be a power"),
        (gs.Headroom(), "no counterpart of Headroom()"),
    ],
)
def test_setting_that_deepspeed_does_not_have_is_named(policy: Any, named: str) -> None:
    with pytest.raises(SettingError) as caught:
        config_from_policy(policy)
    assert named in str(caught.value)


@pytest.mark.parametrize("policy", [gs.Static(128.0), gs.Dynamic(min_scale=2.0, init_scale=64.0)])
def test_deepspeed_reads_the_configuration_alike(policy: gs.Dynamic) -> None:
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    config = precision.get_float16_config(config_from_policy(policy))
    assert config.enabled
    if isinstance(policy, gs.Static):
        assert config.loss_scale == 128.0
    else:
        assert config.dynamic_loss_scale_args() == {
            "init_scale": 64,
            "scale_window": policy.growth_interval,
            "delayed_shift": 1,
            "consecutive_hysteresis": True,
            "min_scale": 2,
        }
