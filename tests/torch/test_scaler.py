from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from gradscale import CallOrderError, Dynamic, SettingError, Static
from gradscale.torch import GradScaler
from tensors import parameter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_it_is_a_torch_gradscaler_and_takes_its_arguments_by_position() -> None:
    scaler = GradScaler("cpu", 8.0, 4.0, 0.25, 7, True)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert (scaler.policy.init_scale, scaler.policy.growth_interval) == (8.0, 7)


def test_a_policy_and_torchs_settings_exclude_each_other() -> None:
    assert GradScaler("cpu", policy=Static(init_scale=4.0)).get_scale() == 4.0
    with pytest.raises(SettingError, match="either policy"):
        GradScaler("cpu", init_scale=8.0, policy=Dynamic())


@pytest.mark.parametrize("device", ["cuda", "cpu", "mps", "xpu", SimpleNamespace(type="mock")])
def test_no_device_disables_it_and_losses_decide_where_it_lives(device: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = GradScaler(device, init_scale=4.0)
    assert scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 4.0
    assert scaler._scale.device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
def test_it_trains_like_float32_under_autocast(device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    losses = {}
    for kind in ("scaled", "plain"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
        inputs = torch.randn(64, 8, device=device)
        targets = inputs.sum(1, keepdim=True)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = GradScaler(device, enabled=kind == "scaled")
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype, enabled=kind == "scaled"):
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses[kind] = loss.item()
    assert losses["scaled"] < 0.5
    assert losses["plain"] < 0.5


# Several optimizers and late or early updates.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_between_two_optimizers_does_not_change_what_the_second_divides_by(
    device: str, fused: bool
) -> None:
    scaler = GradScaler(device, init_scale=4.0, growth_interval=1)
    params = [parameter(device=device) for _ in range(2)]
    for p in params:
        optimizer = SGD([p], lr=1.0, fused=fused)
        if p is params[0]:
            scaler.backward(params[0].sum() + params[1].sum())
        scaler.step(optimizer)
        scaler.update()
    assert [p.item() for p in params] == [-1.0, -1.0]
    assert scaler.get_scale() == 8.0  # one window, one move


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_several_updates_of_one_window_count_an_overflow_once(first: bool, second: bool) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    params = [parameter(), parameter()]
    scaler.backward(params[0].sum() + params[1].sum())
    for p, bad in zip(params, (first, second), strict=True):
        if bad:
            p.grad.fill_(math.inf)
    for p in params:
        scaler.step(SGD([p], lr=1.0))
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert [p.item() for p in params] == [0.0 if bad else -1.0 for bad in (first, second)]


def test_each_optimizer_decides_for_itself_and_one_overflow_backs_off_once() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    params = [parameter(), parameter(), parameter()]
    scaler.backward(sum(p.sum() for p in params))
    params[0].grad.fill_(math.nan)
    params[2].grad.fill_(math.inf)
    for p in params:
        scaler.step(SGD([p], lr=1.0))
    scaler.update()
    assert [p.item() for p in params] == [0.0, -1.0, 0.0]
    assert scaler.get_scale() == 2.0


def test_two_losses_with_steps_in_between_share_one_window() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    critic, maker = parameter(), parameter()
    critics, makers = SGD([critic], lr=1.0), SGD([maker], lr=1.0)
    for _ in range(2):
        critics.zero_grad()
        makers.zero_grad()
        scaler.backward(critic.sum())
        scaler.step(critics)
        critics.zero_grad()
        scaler.backward(maker.sum() + critic.sum())
        scaler.step(makers)
        scaler.update()
    assert (critic.item(), maker.item()) == (-2.0, -2.0)
    assert scaler.get_scale() == 16.0


# Gradients that were left behind.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_training_recovers_from_a_skip_without_zero_grad(device: str, fused: bool) -> None:
    scaler, w = GradScaler(device, init_scale=4.0), parameter(device=device)
    optimizer = SGD([w], lr=1.0, fused=fused)
    scaler.backward(w.sum())
    w.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    for _ in range(2):
        scaler.backward(w.sum())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert w.item() == -2.0
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("overwrite", ["copied", "zeroed through .data"])
def test_gradients_written_in_place_after_the_backward_pass_began_are_the_users(
    overwrite: str,
) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1), parameter()
    master = parameter()
    optimizer = SGD([master], lr=1.0)
    master.grad = torch.zeros(1)
    for _ in range(3):
        w.grad = None
        if overwrite == "zeroed through .data":
            master.grad.data.zero_()
        scaler.backward(w.sum())
        master.grad.add_(w.grad) if "data" in overwrite else master.grad.copy_(w.grad)
        scaler.step(optimizer)
        scaler.update()
    assert master.item() == -3.0


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_pass_after_the_update_is_divided_by_the_scale_it_was_made_with(
    retain: bool,
) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1), parameter()
    optimizer = SGD([w], lr=1.0)
    scaled = scaler.scale(w.sum())
    for _ in range(3):
        scaled.backward(retain_graph=retain)
        scaler.step(optimizer)
        optimizer.zero_grad()
        if not retain:
            scaled = scaler.scale(w.sum())
        scaler.update()
    assert w.item() == -3.0


@pytest.mark.parametrize("first", ["raises", "finds no gradients"])
def test_gradients_made_after_unscale_are_scaled_and_treated_so(first: str) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.scale(w.sum()).backward() if first == "raises" else scaler.scale(w.sum())
    scaler.unscale_(optimizer)  # and then an exception, say: no step, no update
    optimizer.zero_grad()
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    assert w.item() == -1.0


def test_gradients_that_wait_over_iterations_are_added_to() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
    often, seldom = parameter(), parameter()
    each, second = SGD([often], lr=1.0), SGD([seldom], lr=1.0)
    for iteration in range(4):
        each.zero_grad()
        scaler.backward(often.sum() + seldom.sum())
        scaler.step(each)
        if iteration == 1:
            scaler.step(second)
            second.zero_grad()
        if iteration == 3:  # the scale grew after the third
            scaler.step(second)
        scaler.update()
    assert (often.item(), seldom.item()) == (-4.0, -4.0)


def test_gradients_that_only_waited_keep_the_scale_they_were_made_with() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    often, seldom = parameter(), parameter()
    each, second = SGD([often], lr=1.0), SGD([seldom], lr=1.0)
    scaler.backward(seldom.sum())
    scaler.step(second)
    scaler.update()
    second.zero_grad()
    scaler.backward(often.sum() + seldom.sum())
    scaler.step(each)
    scaler.update()
    each.zero_grad()
    scaler.backward(often.sum())
    scaler.step(second)
    assert seldom.item() == -2.0


@pytest.mark.parametrize("zeroed", [True, False])
def test_stepping_again_without_new_gradients_is_an_error(zeroed: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter()
    optimizer = SGD([w], lr=1.0, momentum=0.9)
    scaler.backward(w.sum())
    scaler.step(optimizer)
    scaler.update()
    if zeroed:
        optimizer.zero_grad()
    with pytest.raises(CallOrderError, match=r"scale\(loss\)\.backward\(\)"):
        scaler.step(optimizer)
    assert w.item() == -1.0


def test_losses_scaled_by_hand_work() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.scale(torch.ones(()))  # some frameworks only ever do this, to learn the device
    for _ in range(3):
        optimizer.zero_grad()
        (w.sum() * scaler.get_scale()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert w.item() == -3.0
    assert scaler.get_scale() == 32.0


# Optimizers without gradients, and call order.


def test_an_optimizer_without_gradients_does_nothing_and_says_why() -> None:
    scaler, w = GradScaler("cpu", growth_interval=1), parameter()
    moved_away = SGD([parameter(), parameter()], lr=1.0)
    scaler.backward(w.sum())
    with pytest.warns(UserWarning, match=r"0 of the 2 parameters .* created before the model"):
        assert scaler.step(moved_away) is None
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0**16, 0)


def test_call_order_errors_name_the_missing_call() -> None:
    scaler, w = GradScaler("cpu"), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    with pytest.raises(CallOrderError, match=r"Call scaler\.step\(optimizer\) first"):
        scaler.update()
    scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(CallOrderError, match=r"Call update\(\)"):
            call(optimizer)
    with pytest.raises(CallOrderError, match=r"Call update\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.update()
    assert w.item() == -1.0


def test_a_nan_made_after_unscaling_skips_and_spares_the_scale() -> None:
    for fused in (False, True):
        scaler, w = GradScaler("cpu", init_scale=4.0, recheck=True), parameter()
        optimizer = SGD([w], lr=1.0, fused=fused)
        scaler.backward(w.sum())
        scaler.unscale_(optimizer)
        w.grad.mul_(math.nan)
        scaler.step(optimizer)
        scaler.update()
        assert w.item() == 0.0
        assert scaler.get_scale() == 4.0
        assert w.grad.item() == 0.0


def test_gradients_too_large_for_their_scale_are_skipped_and_do_not_lower_it() -> None:
    for fused in (False, True):
        for how in ("step", "unscale", "clip"):
            scaler, w = GradScaler("cpu", init_scale=2.0**-10), parameter()
            optimizer = SGD([w], lr=1.0, fused=fused)
            scaler.backward((w * 1e37).sum())
            w.grad.fill_(1e37)
            if how == "unscale":
                scaler.unscale_(optimizer)
            if how == "clip":
                assert math.isnan(scaler.clip_grad_norm_(optimizer, 1.0).item())
            scaler.step(optimizer)
            scaler.update()
            assert w.item() == 0.0
            assert scaler.get_scale() == 2.0**-10


@pytest.mark.parametrize("steps", [1, 4, 16])
@pytest.mark.parametrize("fused", [False, True])
def test_microbatches_add_up_to_the_batch_also_around_an_overflow(steps: int, fused: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=2.0**10), parameter()
    optimizer = SGD([w], lr=1.0, fused=fused)
    for iteration in range(3):
        for micro in range(steps):
            scaler.backward(w.sum() / steps)
            if iteration == 1 and micro == steps // 2:
                w.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert w.item() == -2.0
    assert scaler.get_scale() == 2.0**9
