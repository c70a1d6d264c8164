from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_graph import keep_in_tensors
from gradscale import CallOrderError, Dynamic, Off, Policy, SettingError, StateError, Static
from gradscale.torch import GradScaler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POLICIES = [
    Off(),
    Static(init_scale=2.0**7),
    Dynamic(
        init_scale=2.0**9,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=3,
        hysteresis=2,
        min_scale=2.0**-3,
        max_scale=2.0**20,
    ),
]


MADE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The parameter and the optimizer of every scaler."""


def iterate(scaler: torch.amp.GradScaler, finite: bool = True, device: str = "cpu") -> None:
    if scaler not in MADE:
        w = torch.ones(1, device=device, requires_grad=True)
        MADE[scaler] = w, torch.optim.SGD([w], lr=1.0)
    w, optimizer = MADE[scaler]
    scaler.scale(w.sum()).backward()
    if not finite:
        w.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def facts(scaler: GradScaler) -> dict[str, Any]:
    return {**scaler.state_dict(), "settings": scaler.policy}


def test_torchs_getters_say_torchs_settings() -> None:
    scaler = GradScaler("cpu", 8.0, 4.0, 0.25, 7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (4.0, 0.25)
    assert (scaler.get_growth_interval(), scaler.get_scale()) == (7, 8.0)
    assert scaler.is_enabled()
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(3)
    assert (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval) == (8, 0.125, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, "4", None])
@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_a_bad_setting_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    scaler = GradScaler("cpu")
    before = facts(scaler)
    with pytest.raises(SettingError, match=name):
        getattr(scaler, f"set_{name}")(value)
    assert facts(scaler) == before


def test_settings_of_a_rule_that_does_not_move_cannot_be_set() -> None:
    scaler = GradScaler("cpu", policy=Static(init_scale=8.0))
    with pytest.raises(SettingError, match="Static"):
        scaler.set_growth_interval(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (1.0, 1.0)


def test_the_private_names_that_others_read_and_write_are_alive() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    assert (scaler._scale, scaler._growth_tracker) == (None, None)
    assert (scaler._init_scale, scaler._init_growth_tracker, scaler._device) == (8.0, 0, "cpu")
    scaler._init_growth_tracker = 5
    scaler._growth_interval = 400
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale.dtype is torch.float32
    assert scaler._growth_tracker.dtype is torch.int32
    assert scaler._get_growth_tracker() == 5
    assert scaler._get_scale_async() == scaler._scale
    assert scaler._check_scale_growth_tracker("test") == (scaler._scale, scaler._growth_tracker)
    scaler._scale = torch.tensor(2.0)
    assert scaler.get_scale() == 2.0
    assert scaler.policy.growth_interval == 400


@pytest.mark.parametrize("call", ["update", "step", "unscale_", "clip_grad_norm_"])
def test_a_call_before_the_first_loss_names_scale(call: str) -> None:
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    arguments = {"update": (), "clip_grad_norm_": (optimizer, 1.0)}.get(call, (optimizer,))
    with pytest.raises(CallOrderError, match=rf"{call}\(\).*scale\("):
        getattr(scaler, call)(*arguments)


# Setting the scale.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [float, int, torch.tensor, lambda x: torch.tensor([x])])
def test_update_takes_any_positive_number(device: str, kind: Any) -> None:
    scaler = GradScaler(device)
    if device == "cpu":
        keep_in_tensors(scaler)
    scaler.scale(torch.ones((), device=device))
    pointer = scaler._scale.data_ptr()
    scaler.update(kind(1024.0))
    assert scaler.get_scale() == 1024.0
    assert scaler._scale.data_ptr() == pointer


def test_numbers_that_are_no_powers_of_two_may_be_set_with_any_policy() -> None:
    scaler = GradScaler("cpu", policy=Dynamic(growth_interval=1))
    scaler.scale(torch.ones(()))
    scaler.update(3.0)
    scaler.set_growth_factor(1.5)
    iterate(scaler)  # the open window closes with the scale it has
    assert scaler.get_scale() == 4.5


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, "2", True, torch.ones(2)])
def test_update_refuses_what_cannot_be_a_scale(wrong: Any) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(SettingError):
        scaler.update(wrong)
    with pytest.raises(SettingError, match="requires_grad=True"):
        scaler.update(torch.ones((), requires_grad=True))
    assert scaler.get_scale() == 8.0


def test_update_moves_a_default_bound_and_respects_a_given_one() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(2.0**-20)
    assert scaler.get_scale() == 2.0**-20
    bounded = GradScaler("cpu", min_scale=1.0)
    bounded.scale(torch.ones(()))
    with pytest.raises(SettingError, match="min_scale"):
        bounded.update(0.5)
    assert bounded.get_scale() == 2.0**16


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("given", "becomes"), [(64.0, 64.0), (2.0**80, 2.0**64), (math.nan, 8.0), (-1.0, 8.0)]
)
def test_a_scale_on_the_device_is_never_read_by_the_host(
    given: float, becomes: float, no_sync: Any
) -> None:
    scaler = GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    new = torch.tensor(given, device="cuda")
    with no_sync():
        scaler.update(new)
    assert scaler.get_scale() == becomes


# Checkpoints.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("into_used", [False, True])
def test_a_checkpoint_restores_everything(
    device: str, policy: Policy, used: bool, into_used: bool
) -> None:
    source = GradScaler(device, policy=policy)
    if used:
        for finite in (True, False, False, True):
            iterate(source, finite, device)
    target = GradScaler(device)
    if into_used:
        iterate(target, device=device)
    target.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert facts(target) == facts(source)
    for finite in (True, True, True, False, False, True):
        iterate(source, finite, device)
        iterate(target, finite, device)
        assert facts(target) == facts(source)


def test_every_counter_is_in_the_checkpoint() -> None:
    scaler = GradScaler("cpu", policy=POLICIES[2])
    iterate(scaler, finite=False)
    w = torch.ones(1, requires_grad=True)
    scaler.scale((w * math.nan).sum()).backward()
    scaler.step(torch.optim.SGD([w], lr=1.0))
    scaler.update()
    saved = scaler.state_dict()
    assert saved["gradscale"]["state"] == {"bad_steps": 1}
    assert saved["gradscale"]["counters"] == {"bad_losses": 1, "steps": 2}


def test_torch_loads_our_checkpoint_and_we_load_torchs() -> None:
    ours = GradScaler("cpu", 2.0**9, 4.0, 0.25, 3)
    theirs = torch.amp.GradScaler("cpu")
    iterate(ours)
    theirs.load_state_dict(ours.state_dict())
    keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    assert theirs.state_dict() == {key: ours.state_dict()[key] for key in keys}
    for _ in range(3):
        iterate(theirs)
    fresh = GradScaler("cpu", hysteresis=5)
    fresh.load_state_dict(theirs.state_dict())
    assert {key: fresh.state_dict()[key] for key in keys} == theirs.state_dict()
    assert fresh.policy.hysteresis == 5


def test_settings_false_takes_the_state_alone() -> None:
    source = GradScaler("cpu", 2.0**9, growth_interval=3)
    iterate(source)
    target = GradScaler("cpu", growth_interval=400, hysteresis=2)
    settings = target.policy
    target.load_state_dict(source.state_dict(), settings=False)
    assert target.policy == settings
    assert (target.get_scale(), target._get_growth_tracker()) == (2.0**9, 1)


def test_a_loaded_scale_outside_the_bounds_is_clamped_with_a_warning() -> None:
    saved = {**torch.amp.GradScaler("cpu").state_dict(), "scale": 2.0**-60}
    scaler = GradScaler("cpu")
    with pytest.warns(UserWarning, match="outside"):
        scaler.load_state_dict(saved)
    assert scaler.get_scale() == 2.0**-14


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale", 0.0),
        ("scale", math.nan),
        ("scale", "big"),
        ("growth_factor", 0.5),
        ("backoff_factor", -1.0),
        ("growth_interval", 0),
        ("_growth_tracker", -1),
        ("gradscale", {"version": 99}),
        ("gradscale", None),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_a_damaged_checkpoint_changes_nothing(key: str, value: Any, used: bool) -> None:
    scaler = GradScaler("cpu", policy=POLICIES[2])
    if used:
        iterate(scaler)
    before = facts(scaler)
    saved = GradScaler("cpu", init_scale=4.0).state_dict()
    if key != "gradscale":
        del saved["gradscale"]
    with pytest.raises(StateError):
        scaler.load_state_dict({**saved, key: value})
    assert facts(scaler) == before


def test_an_empty_or_foreign_checkpoint_is_named() -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(RuntimeError, match="enabled=False"):
        scaler.load_state_dict({})
    with pytest.raises(StateError, match="something"):
        scaler.load_state_dict({"something": 4.0})
    still = GradScaler("cpu", policy=Static(init_scale=8.0))
    with pytest.raises(StateError, match="settings=False"):
        still.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    unknown = GradScaler("cpu").state_dict()
    unknown["gradscale"]["policy"] = "Magic"
    with pytest.raises(StateError, match="Magic"):
        scaler.load_state_dict(unknown)
    GradScaler("cpu", enabled=False).load_state_dict({})


@pytest.mark.parametrize(("left", "bad_steps"), [(3, 0), (1, 2), (-4, 2)])
def test_megatrons_patience_is_counted_from_our_hysteresis(left: int, bad_steps: int) -> None:
    scaler = GradScaler("cpu", hysteresis=3)
    saved = {"scale": 1024.0, "growth_tracker": 0, "hysteresis_tracker": left}
    scaler.load_state_dict({"grad_scaler": saved})
    assert scaler.state_dict()["gradscale"]["state"] == {"bad_steps": bad_steps}
    assert scaler.get_scale() == 1024.0


def test_a_scaler_that_is_off_stays_at_1() -> None:
    off = GradScaler("cpu", policy=Off())
    off.load_state_dict(GradScaler("cpu", init_scale=8.0).state_dict(), settings=False)
    assert off.get_scale() == 1.0


# Copies.


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))]
)
@pytest.mark.parametrize("used", [False, True])
def test_copies_go_on_where_the_original_was(copied: Any, used: bool) -> None:
    scaler = GradScaler("cpu", policy=POLICIES[2])
    if used:
        iterate(scaler, finite=False)
    twin = copied(scaler)
    assert isinstance(twin, torch.amp.GradScaler)
    assert facts(twin) == facts(scaler)
    for finite in (True, False, False, True, True, True):
        iterate(twin, finite)
        iterate(scaler, finite)
    assert facts(twin) == facts(scaler)


def test_copying_in_the_middle_of_an_iteration_is_an_error() -> None:
    scaler = GradScaler("cpu")
    w = torch.ones(1, requires_grad=True)
    scaler.backward(w.sum())
    scaler.step(torch.optim.SGD([w], lr=1.0))
    with pytest.raises(CallOrderError, match="update"):
        copy.deepcopy(scaler)


# Losses that are not finite.


def lose(scaler: GradScaler, loss: float) -> Tensor:
    w = torch.ones(1, requires_grad=True)
    scaler.scale((w * loss).sum()).backward()
    scaler.step(torch.optim.SGD([w], lr=1.0))
    scaler.update()
    return w


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_loss_leaves_the_scale_alone_for_32_windows_and_then_counts_every_eighth(
    bad: float,
) -> None:
    scaler = GradScaler("cpu", growth_interval=5)
    for _ in range(3):
        lose(scaler, 1.0)
    seen = []
    for window in range(1, 60):
        assert lose(scaler, bad).tolist() == [1.0]
        if scaler.get_scale() != 2.0 ** (16 - len(seen)):
            seen.append(window)
        elif not seen:
            assert scaler._get_growth_tracker() == 3
    assert seen == [40, 48, 56]
    lose(scaler, 1.0)
    lose(scaler, bad)
    assert scaler.state_dict()["gradscale"]["counters"]["bad_losses"] == 1


@pytest.mark.gpu
def test_loading_puts_numbers_into_the_tensors_that_are_there() -> None:
    scaler = GradScaler("cuda")
    iterate(scaler, device="cuda")
    pointer = scaler._scale.data_ptr()
    scaler.load_state_dict(GradScaler("cuda", init_scale=4.0).state_dict())
    assert scaler._scale.data_ptr() == pointer
    assert scaler.get_scale() == 4.0


def test_loading_is_silent_where_nothing_is_changed() -> None:
    scaler = GradScaler("cpu", init_scale=1e38)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler("cpu").load_state_dict(scaler.state_dict())
