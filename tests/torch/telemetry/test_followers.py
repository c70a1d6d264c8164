from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from gradscale import SettingError
from gradscale.torch import GradScaler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def step(scaler: GradScaler, w: Tensor, optimizer: Any, good: bool, two_calls: bool = True) -> None:
    scaler.backward(w.sum())
    if not good:
        w.grad.fill_(math.inf)
    if two_calls:
        scaler.apply(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("two_calls", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_a_scheduler_moves_with_the_optimizer_alone(
    device: str, two_calls: bool, fused: bool, wait: bool
) -> None:
    # Also the first steps may be skipped: torch's scheduler then warns that it came too early.
    scaler, w = GradScaler(device), torch.zeros(1, device=device, requires_grad=True)
    optimizer = SGD([w], lr=1.0, fused=fused)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    scaler.follow(scheduler, wait=wait)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for good in (False, False, True, False, True, True):
            step(scaler, w, optimizer, good, two_calls)
    assert w.item() == -(1.0 + 0.5 + 0.25)
    if wait:
        assert scheduler.last_epoch == 3
    scaler.flush()
    scaler.flush()
    assert scheduler.last_epoch == 3


@pytest.mark.parametrize("wait", [False, True])
def test_an_average_sees_the_parameters_as_each_step_left_them(wait: bool) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    scaler, optimizer = GradScaler("cpu"), SGD(model.parameters(), lr=1.0)
    average = AveragedModel(model)
    scaler.follow(lambda: average.update_parameters(model), wait=wait)
    for good in (True, False, True, True):
        step(scaler, model.weight, optimizer, good)
    scaler.flush()
    assert average.module.weight.item() == (-1.0 - 2.0 - 3.0) / 3
    assert int(average.n_averaged) == 3


def test_a_scheduler_follows_its_own_optimizer_and_a_function_any_or_the_one_named() -> None:
    scaler = GradScaler("cpu")
    params = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizers = [SGD([w], lr=1.0) for w in params]
    schedulers = [StepLR(optimizer, 1) for optimizer in optimizers]
    calls: list[str] = []
    scaler.follow(*schedulers)
    scaler.follow(lambda: calls.append("any"))
    scaler.follow(lambda: calls.append("second"), optimizer=optimizers[1])
    for bad in ((0,), (1,), (0, 1), (), (0,)):
        scaler.backward(params[0].sum() + params[1].sum())
        for i in bad:
            params[i].grad.fill_(math.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    step(scaler, params[0], optimizers[0], True)  # the second one rests
    scaler.flush()
    assert [scheduler.last_epoch for scheduler in schedulers] == [3, 3]
    assert calls == ["any", "second", "any", "any", "second", "any", "second", "any"]


def test_followers_of_a_disabled_scaler_follow_every_step() -> None:
    scaler, w = GradScaler("cpu", enabled=False), torch.zeros(1, requires_grad=True)
    optimizer = AdamW([w])
    scheduler = StepLR(optimizer, 1)
    scaler.follow(scheduler)
    for two_calls in (False, True):
        step(scaler, w, optimizer, True, two_calls)
    scaler.flush()
    assert scheduler.last_epoch == 2


def test_a_follower_must_be_callable_without_arguments() -> None:
    scaler, optimizer = GradScaler("cpu"), SGD([torch.zeros(1)], lr=1.0)
    model = torch.nn.Linear(1, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for wrong in (0.5, AveragedModel(model), model, plateau, lambda x: x):
        with pytest.raises(SettingError, match="lambda"):
            scaler.follow(wrong)
    scaler.follow(lambda: plateau.step(0.5), lambda x=1: x)


class Wrapper:
    """An optimizer as accelerate wraps it."""

    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def test_a_wrapper_is_taken_for_what_is_inside() -> None:
    scaler, w, calls = GradScaler("cpu"), torch.zeros(1, requires_grad=True), []
    inner, other = SGD([w], lr=1.0), SGD([w], lr=1.0)
    wrapper, scheduler = Wrapper(inner), StepLR(inner, 1)
    scaler.follow(scheduler)
    scaler.follow(lambda: calls.append(1), optimizer=wrapper)  # type: ignore[arg-type]
    for optimizer in (wrapper, other, wrapper):
        step(scaler, w, optimizer, True)
    scaler.flush()
    assert scheduler.last_epoch == 2
    assert len(calls) == 2
    with pytest.raises(SettingError, match="optimizer must be one"):
        scaler.follow(print, optimizer=w)  # type: ignore[arg-type]


def test_who_comes_late_does_not_follow_the_past() -> None:
    scaler, w, calls = GradScaler("cpu"), torch.zeros(1, requires_grad=True), []
    optimizer = SGD([w], lr=1.0)
    scaler.follow(lambda: calls.append("old"))
    step(scaler, w, optimizer, True)
    scaler.follow(lambda: calls.append("new"))
    step(scaler, w, optimizer, True)
    scaler.flush()
    assert calls == ["old", "old", "new"]


def test_a_follower_of_an_optimizer_that_is_gone_rests() -> None:
    scaler, w = GradScaler("cpu"), torch.zeros(1, requires_grad=True)
    calls: list[int] = []
    scaler.follow(lambda: calls.append(1), optimizer=SGD([w], lr=1.0))
    step(scaler, w, SGD([w], lr=1.0), True)
    scaler.flush()
    assert calls == []


def test_a_follower_that_raises_holds_up_no_other() -> None:
    scaler, w = GradScaler("cpu"), torch.zeros(1, requires_grad=True)
    calls: list[int] = []

    def fail() -> None:
        raise KeyError

    scaler.follow(fail, lambda: calls.append(1))
    step(scaler, w, SGD([w], lr=1.0), True)
    with pytest.raises(KeyError):
        scaler.flush()
    scaler.flush()
    assert calls == [1]


def test_a_load_drops_what_is_due() -> None:
    scaler, w = GradScaler("cpu"), torch.zeros(1, requires_grad=True)
    optimizer, calls = SGD([w], lr=1.0), []
    scaler.follow(lambda: calls.append(1))
    step(scaler, w, optimizer, True)
    scaler.load_state_dict(scaler.state_dict())
    scaler.flush()
    assert calls == []


@pytest.mark.gpu
def test_following_does_not_wait_for_later_work(no_sync: Any) -> None:
    scaler, w = GradScaler("cuda"), torch.zeros(1, device="cuda", requires_grad=True)
    optimizer = AdamW([w], fused=True)
    scheduler = StepLR(optimizer, 1)
    scaler.follow(scheduler)
    step(scaler, w, optimizer, True)
    with no_sync():
        for i in range(100):
            step(scaler, w, optimizer, i % 10 != 3)
    scaler.flush()
    assert scheduler.last_epoch == 91
