"""The interface of Megatron-LM's scalers; Megatron-LM itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradscale as gs
from gradscale.compat.megatron import MegatronGradScaler
from gradscale.errors import SettingError, StuckError
from gradscale.policy import GradStats
from gradscale.torch import GradScaler

RULE = gs.Dynamic(init_scale=2.0**10, growth_interval=3, hysteresis=2, min_scale=2.0**7)
HISTORIES = st.lists(st.booleans(), max_size=40)


def made(policy: Any = RULE, **how: Any) -> MegatronGradScaler:
    return MegatronGradScaler(policy, device="cpu", **{"on_stuck": "ignore", **how})


def walked(history: list[bool]) -> MegatronGradScaler:
    scaler = made()
    for found_inf in history:
        scaler.update(found_inf)
    return scaler


@given(HISTORIES)
def test_scale_is_that_of_the_plain_rule(history: list[bool]) -> None:
    scaler, state = made(), RULE.init()
    tensor = scaler.scale
    for found_inf in history:
        scaler.update(torch.tensor([found_inf]) if len(history) % 2 else found_inf)
        state = RULE.update(state, GradStats(finite=not found_inf))
        assert scaler.scale.tolist() == [state.scale]
        assert scaler.inv_scale.tolist() == [1 / state.scale]
    assert scaler.scale is tensor  # a CUDA graph may have captured it
    assert (tensor.dtype, tensor.shape) == (torch.float32, (1,))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20))
def test_chained_optimizers_have_one_scale_that_moves_once_per_step(
    history: list[tuple[bool, bool]],
) -> None:
    scaler, state = made(optimizers=2), RULE.init()
    for flags in history:
        for found_inf in flags:
            # Every optimizer divides by the scale of the loss, and reports then.
            assert scaler.scale.tolist() == [state.scale]
            scaler.update(found_inf)
        state = RULE.update(state, GradStats(finite=not any(flags)))
    assert scaler.scale.tolist() == [state.scale]


def test_state_that_is_loaded_begins_a_step() -> None:
    scaler, saved = made(optimizers=2), walked([True, True]).state_dict()
    scaler.update(True)
    for _ in range(2):  # Megatron saves and loads one for each optimizer
        scaler.load_state_dict(saved)
    scaler.update(False)
    scaler.update(False)
    assert scaler.state_dict()["growth_tracker"] == 1


def test_number_of_optimizers_is_checked() -> None:
    with pytest.raises(SettingError, match="optimizers must be a whole number"):
        made(optimizers=0)


def test_inverse_is_rounded_once() -> None:
    scaler = made(gs.Static(3.0, exact=False))
    assert scaler.inv_scale.dtype == torch.float32
    assert scaler.inv_scale.item() == torch.tensor(1 / 3, dtype=torch.float64).float().item()


@given(HISTORIES, HISTORIES)
def test_loaded_state_goes_on_as_the_original(first: list[bool], then: list[bool]) -> None:
    scaler, copy = walked(first), made()
    saved = scaler.state_dict()
    assert sorted(saved) == ["growth_tracker", "hysteresis_tracker", "scale"]
    copy.load_state_dict(saved)
    for found_inf in then:
        scaler.update(found_inf)
        copy.update(found_inf)
        assert copy.scale.equal(scaler.scale)
    assert len(first) < 3 or saved["scale"] is not scaler.scale


@given(HISTORIES)
def test_state_goes_to_our_grad_scaler_and_back(history: list[bool]) -> None:
    scaler = walked(history)
    over = GradScaler("cpu", policy=RULE)
    over.load_state_dict({"grad_scaler": scaler.state_dict()})
    assert over.get_scale() == scaler.scale.item()
    state = over.state_dict()
    assert state["_growth_tracker"] == scaler.state_dict()["growth_tracker"]
    back = made()
    back.load_state_dict(state)
    assert back.scale.equal(scaler.scale)
    for each in (scaler, back):
        each.update(True)
    assert back.scale.equal(scaler.scale)


def test_state_of_megatron_is_read() -> None:
    scaler = made()
    theirs = {"scale": torch.tensor([2.0**9]), "growth_tracker": 2, "hysteresis_tracker": -3}
    scaler.load_state_dict(theirs)
    scaler.update(False)
    assert scaler.scale.item() == 2.0**10  # the third good step
    scaler.load_state_dict({**theirs, "growth_tracker": 0})
    scaler.update(True)
    assert scaler.scale.item() == 2.0**8  # its allowance was spent, and the last step overflowed


def test_constant_scale_has_no_state() -> None:
    scaler = made(gs.Static(64.0))
    scaler.update(True)
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"scale": torch.tensor([2.0]), "growth_tracker": 0})
    assert scaler.scale.item() == 64.0


def test_policy_that_needs_measurements_is_refused() -> None:
    with pytest.raises(SettingError, match=r"only whether gradients were finite, got Headroom\(\)"):
        made(gs.Headroom())


def test_being_stuck_can_be_an_error_and_is_counted() -> None:
    scaler = made(on_stuck="raise", stuck_after=2)
    scaler.update(True)
    with pytest.raises(StuckError, match="2 steps in a row"):
        scaler.update(True)
    assert scaler.scale.item() == 2.0**9
