"""The interface of DeepSpeed's loss scalers; DeepSpeed itself is not needed here."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradscale as gs
from gradscale.compat.deepspeed import DynamicLossScaler, LossScaler, attach
from gradscale.errors import SettingError, StateError, StuckError
from gradscale.policy import GradStats
from gradscale.torch import GradScaler

RULE = gs.Dynamic(init_scale=2.0**10, growth_interval=3, hysteresis=2, min_scale=2.0**7)
HISTORIES = st.lists(st.booleans(), max_size=40)


def walked(overflows: list[bool], policy: gs.Dynamic = RULE) -> DynamicLossScaler:
    scaler = DynamicLossScaler(policy=policy, on_stuck="ignore")
    for overflow in overflows:
        scaler.update_scale(overflow)
    return scaler


def theirs(scaler: DynamicLossScaler) -> SimpleNamespace:
    """An object with the attributes of DeepSpeed's class, and the values of `scaler`."""
    names = "cur_iter last_overflow_iter cur_hysteresis scale_factor scale_window min_scale"
    values = {name: getattr(scaler, name) for name in names.split()}
    values |= {"delayed_shift": scaler.delayed_shift, "consecutive_hysteresis": True}
    return SimpleNamespace(cur_scale=scaler.next_scale, dynamic=True, **values)


@given(HISTORIES)
def test_scale_is_that_of_the_plain_rule(overflows: list[bool]) -> None:
    scaler, state = DynamicLossScaler(policy=RULE, on_stuck="ignore"), RULE.init()
    for overflow in overflows:
        loss = scaler.scale_loss(torch.tensor(1.0))
        assert loss.item() == scaler.cur_scale == scaler.loss_scale == state.scale
        used = state.scale
        scaler.update_scale(overflow)
        state = RULE.update(state, GradStats(finite=not overflow))
        assert scaler.next_scale == state.scale
        # What ZeRO divides by after this is the scale that the gradients were made with.
        assert scaler.cur_scale == (state.scale if overflow else used)


def test_settings_of_deepspeed_are_those_of_the_policy() -> None:
    scaler = DynamicLossScaler(2**10, 3, 2**7, 2, True)
    assert scaler.policy == RULE
    shown = (scaler.scale_window, scaler.min_scale, scaler.delayed_shift, scaler.scale_factor)
    assert shown == (3, 128.0, 2, 2.0)
    assert (scaler.dynamic, scaler.consecutive_hysteresis) == (True, True)
    assert not scaler.raise_error_at_min_scale
    assert DynamicLossScaler(8, 3, 1, 1, False).policy.hysteresis == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"init_scale": 8.0}, "needs scale_window, min_scale, delayed_shift"),
        ({"init_scale": 8.0, "policy": RULE}, "either policy or DeepSpeed's settings"),
        ({"policy": gs.Headroom()}, "gs.Dynamic"),
        ({"policy": gs.Static(2.0)}, "Use LossScaler for a constant scale"),
        ({"policy": RULE, "on_stuck": "print"}, "on_stuck"),
        ({"policy": RULE, "stuck_after": 0}, "stuck_after"),
    ],
)
def test_wrong_argument_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError) as caught:
        DynamicLossScaler(**arguments)
    assert named in str(caught.value)


def test_float16_loss_is_scaled_in_float32() -> None:
    loss = torch.tensor(8.0, dtype=torch.float16)
    for scaler in (LossScaler(2.0**16), DynamicLossScaler(policy=gs.Dynamic())):
        assert scaler.scale_loss(loss).item() == 2.0**19
    assert LossScaler(2.0).scale_loss(loss.double()).dtype == torch.float64


def test_backward_leaves_scaled_gradients() -> None:
    for scaler in (LossScaler(1024.0), DynamicLossScaler(policy=RULE)):
        weight = torch.ones(2, requires_grad=True)
        scaler.backward((3 * weight).sum())
        assert weight.grad is not None
        assert weight.grad.tolist() == [3072.0, 3072.0]
        assert not scaler.has_overflow([weight, torch.ones(1)])
        assert scaler.scale_gradient(None, (None, torch.ones(1)), ())[1].item() == 1024.0
        weight.grad[1] = torch.nan
        assert scaler.has_overflow([torch.ones(1), weight])


@given(HISTORIES, HISTORIES)
def test_pickle_goes_on_as_the_original(first: list[bool], then: list[bool]) -> None:
    scaler = walked(first)
    copy = pickle.loads(pickle.dumps(scaler))
    assert copy.state_dict() == scaler.state_dict()
    for overflow in then:
        scaler.update_scale(overflow)
        copy.update_scale(overflow)
        assert copy.next_scale == scaler.next_scale
    assert copy.state_dict() == scaler.state_dict()


@given(HISTORIES)
def test_state_goes_to_our_grad_scaler_and_back(overflows: list[bool]) -> None:
    scaler = walked(overflows)
    over = GradScaler("cpu")
    over.load_state_dict({"loss_scaler": scaler, "dynamic_loss_scale": True})
    assert over.state_dict() == scaler.state_dict()
    back = DynamicLossScaler(policy=gs.Dynamic())
    back.load_state_dict(over.state_dict())
    assert back.state_dict() == scaler.state_dict()
    assert back.policy == RULE


@given(HISTORIES)
def test_counters_are_read_as_what_they_were(overflows: list[bool]) -> None:
    scaler = walked(overflows)
    back = DynamicLossScaler(policy=RULE)
    back.load_state_dict({"loss_scaler": theirs(scaler)})
    ours, read = scaler._held.state, back._held.state
    assert (read.scale, read.good_steps) == (ours.scale, ours.good_steps)
    assert read.bad_steps == min(ours.bad_steps, RULE.hysteresis - 1)  # more are all alike


def test_constant_scale_goes_to_our_grad_scaler_and_back() -> None:
    scaler = LossScaler(96.0)
    scaler.update_scale(True)
    over = GradScaler("cpu")
    over.load_state_dict({"loss_scaler": pickle.loads(pickle.dumps(scaler))})
    assert over.get_scale() == 96.0
    back = LossScaler(2.0)
    back.load_state_dict(over.state_dict())
    assert (back.cur_scale, back.policy) == (96.0, gs.Static(96.0, exact=False))
    with pytest.raises(StateError, match="settings=False"):
        back.load_state_dict(walked([]).state_dict())
    back.load_state_dict(walked([]).state_dict(), settings=False)
    assert back.loss_scale == 1024.0


def test_scale_can_be_set() -> None:
    for scaler in (LossScaler(8.0), walked([False] * 3)):
        scaler.cur_scale = 32.0
        assert scaler.cur_scale == scaler.scale_loss(torch.tensor(1.0)).item() == 32.0
        with pytest.raises(SettingError, match="loss_scale must be finite"):
            scaler.cur_scale = 0.0


def test_being_stuck_is_reported_once() -> None:
    scaler = DynamicLossScaler(policy=RULE, stuck_after=5)
    for _ in range(4):
        scaler.update_scale(True)
    with pytest.warns(UserWarning, match=r"5 steps in a row .*stuck at the floor"):
        scaler.update_scale(True)
    scaler.update_scale(True)
    raising = DynamicLossScaler(8, 3, 1, 1, True, raise_error_at_min_scale=True, stuck_after=2)
    raising.update_scale(True)
    with pytest.raises(StuckError, match="2 steps in a row"):
        raising.update_scale(True)
    assert raising.next_scale == 2.0  # the step is counted all the same


def test_engine_without_a_loss_scaler_is_refused() -> None:
    with pytest.raises(SettingError, match=r"got object\. Set zero_optimization"):
        attach(SimpleNamespace(optimizer=object()), RULE)


def test_present_scaler_of_ours_is_taken_over() -> None:
    present = walked([False, True])
    optimizer = SimpleNamespace(loss_scaler=present, dynamic_loss_scale=True)
    engine = SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: True)
    scaler = attach(engine, on_stuck="raise")
    assert scaler is optimizer.loss_scaler is not present
    assert scaler.state_dict() == present.state_dict()
    attach(engine, gs.Off())
    assert (optimizer.loss_scaler.cur_scale, optimizer.dynamic_loss_scale) == (1.0, False)
