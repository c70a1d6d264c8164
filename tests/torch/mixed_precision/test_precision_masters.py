"""MixedPrecision with masters: whose gradients they have, and what is written where."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradscale as gs
from gradscale.errors import SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.optim import SGD, AdamW
from precision_runs import (
    HALF_WEIGHTS,
    OPTIMIZERS,
    advance,
    built,
    data,
    every_optimizer,
    loss_of,
    net,
    picture,
)
from tensors import same

torch.set_num_threads(1)


class Turns:
    """Two networks that took turns: the second has gradients of a scale of 256, and it is 4096."""

    def __init__(self, mode: str, make: Any, begun: bool = True) -> None:
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        for each in (self.first, self.second):
            nn.init.constant_(each.weight, 0.25)
            nn.init.zeros_(each.bias)
        self.one, self.other = (
            make(each.parameters(), lr=0.5) for each in (self.first, self.second)
        )
        policy = gs.Dynamic(init_scale=16.0, growth_interval=1, growth_factor=16.0)
        models, optimizers = [self.first, self.second], [self.one, self.other]
        self.mp = MixedPrecision(models, optimizers, mode, policy=policy)
        if begun:
            self.pass_through_second()
            self.mp.step(self.other)
        self.mp.backward(self.second(self.middle()).float().mean())
        self.mp.step(self.one)

    def middle(self) -> Tensor:
        return self.first(torch.ones(8, 4))

    def pass_through_second(self) -> None:
        self.mp.backward(self.second(self.middle().detach()).float().mean())

    def pass_through_first(self) -> None:
        self.mp.backward(self.middle().float().mean())


turning = pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])


PLAIN = {
    "ours": SGD,
    "fused": partial(optim.SGD, fused=True),
    "foreach": partial(optim.SGD, foreach=True),
}


@turning
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("between", ["nothing", "a pass", "a step"])
def test_gradients_that_were_left_are_divided_by_their_own_scale(
    mode: str, make: Any, between: str
) -> None:
    turns = Turns(mode, make)
    if between != "nothing":
        turns.pass_through_first()  # at 4096
    if between == "a step":
        turns.mp.step(turns.one)  # then the scale is 65536
    turns.mp.step(turns.other)
    # No tolerance: all are sums of few powers of two, which float16 has at any of the scales. What
    # leaves the first layer is 1 at both passes, so the second moves twice by 0.5 * 1, and between
    # them the first by 0.5 * -0.25. A scale that is 16 times off moves the second by 1/32 or by 8.
    state = turns.mp.float32_model_state(turns.second)
    assert torch.equal(state["weight"], torch.full((1, 4), 0.25 - 0.5 - 0.5))
    assert torch.equal(state["bias"], torch.full((1,), -0.5 - 0.5))
    assert torch.equal(turns.second.weight.float(), state["weight"])
    # The mean of four outputs has moved it back by 0.5 * 0.25.
    moved = 0.0 if between == "a step" else 0.125
    state = turns.mp.float32_model_state(turns.first)
    assert torch.equal(state["weight"], torch.full((4, 4), 0.25 + moved))
    assert torch.equal(state["bias"], torch.full((4,), moved))


@turning
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_gradients_of_two_scales_add_up(mode: str, make: Any) -> None:
    turns = Turns(mode, make)
    turns.pass_through_second()  # at 4096, on top of gradients of 256
    turns.mp.step(turns.other)
    # The first layer has moved by 0.125, so 4 * 0.375 + 0.125 leaves it now. Exact, as above.
    state = turns.mp.float32_model_state(turns.second)
    assert torch.equal(state["weight"], torch.full((1, 4), 0.25 - 0.5 - 0.5 * (1 + 1.625)))
    assert torch.equal(state["bias"], torch.full((1,), -0.5 - 0.5 * 2))


@turning
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_gradients_are_left_for_an_optimizer_that_has_never_stepped(mode: str, make: Any) -> None:
    turns = Turns(mode, make, begun=False)
    turns.pass_through_first()
    turns.mp.step(turns.other)
    assert torch.equal(turns.second.weight, torch.full_like(turns.second.weight, 0.25 - 0.5))


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_what_was_loaded_is_exported(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    advance(model, mp, 3)
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    state = mp.float32_model_state()
    atol = 2.0**-11 if mode == "fp16-pure" else 0.0  # its 16 bits stay as they are
    for name, value in loaded.items():
        torch.testing.assert_close(state[name].float(), value.float(), rtol=0, atol=atol)
    with pytest.raises(SettingError, match="model must be one of those that"):
        mp.float32_model_state(nn.Linear(2, 2))


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
@pytest.mark.parametrize("limits", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01}])
def test_a_step_that_raises_can_be_asked_for_again(
    mode: str, make: Any, limits: dict[str, Any]
) -> None:
    runs = []
    for fails in (False, True):
        model, mp = built(mode, make)
        mp.backward(loss_of(model, data()))
        before = [param.grad.clone() for param in model.parameters()]
        planted = [fails]

        def fail(*_: Any, planted: list[bool] = planted) -> None:
            if planted and planted.pop():
                raise RuntimeError("planted")

        mp.optimizers[0].register_step_pre_hook(fail)
        with pytest.raises(SettingError, match="clip_norm must be"):
            mp.step(clip_norm=-1.0)
        if fails:
            with pytest.raises(RuntimeError, match="planted"):
                mp.step(**limits)
            if make is not AdamW or "clip_value" not in limits:  # which clips in place
                assert same([param.grad for param in model.parameters()], before)
        assert mp.step(**limits).applied
        runs.append(picture(mp))
    assert same(*runs)


@pytest.mark.parametrize("limits", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01, "clip_norm": 0.1}])
def test_the_second_of_two_optimizers_raises_and_is_asked_again(limits: dict[str, Any]) -> None:
    runs = []
    for fails in (False, True):
        model = net()
        parts = [model.wide, nn.ModuleList([model.norm, model.narrow])]
        optimizers = [optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
        mp = MixedPrecision(model, optimizers, "fp16-master")
        planted = [fails]

        def fail(*_: Any, planted: list[bool] = planted) -> None:
            if planted and planted.pop():
                raise RuntimeError("planted")

        optimizers[1].register_step_pre_hook(fail)
        mp.backward(loss_of(model, data()))
        if fails:
            with pytest.raises(RuntimeError, match="planted"):
                mp.step(**limits)
        assert mp.step(**limits).applied
        runs.append(picture(mp))
    assert same(*runs)


@pytest.mark.parametrize(
    "limits", [{}, {"clip_norm": 0.5}, {"clip_value": 0.5}, {"clip_value": 0.5, "clip_norm": 0.5}]
)
def test_an_optimizer_of_ours_beside_one_with_masters(limits: dict[str, Any]) -> None:
    runs = []
    for second in (SGD, optim.SGD):
        models = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
        for model in models:
            nn.init.constant_(model.weight, 1.0)
        makers = (optim.SGD, second)
        optimizers = [make(m.parameters(), lr=1.0) for m, make in zip(models, makers, strict=True)]
        policy = gs.Static(init_scale=8.0)
        mp = MixedPrecision(models, optimizers, "fp16-master", policy=policy)
        # 32 gradients of 1: the norm is a root of 32, and after clipping by value of 8.
        loss = sum(model(torch.ones(1, 4)).sum() for model in models)
        mp.backward(loss)
        outcome = mp.step(**limits)
        assert outcome.applied
        assert float(outcome.grad_norm) == pytest.approx(32**0.5)
        runs.append([mp.float32_model_state(model)["weight"] for model in models])
    size = min(1.0, limits.get("clip_value", 1.0))
    if "clip_norm" in limits:
        size *= 0.5 / (size * 32**0.5)
    for weights in runs:
        for weight in weights:
            # One of ours clips by value in float16.
            assert weight == pytest.approx(torch.full((4, 4), 1.0 - size), abs=2.0**-11 * size)


def test_what_was_loaded_after_a_failed_step_stays() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    mp.backward(loss_of(model, data()))
    hook = mp.optimizers[0].register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mp.step()
    hook.remove()
    mp.zero_grad()
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    model.eval()
    mp.backward(loss_of(model, data()))
    assert mp.step().applied
    assert (model.wide.weight - 1).abs().max() < 0.1  # the load was not undone


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_an_overflow_of_a_loss_of_its_own_scale_holds_the_step_back(mode: str, make: Any) -> None:
    model, mp = built(mode, make, policy=gs.Dynamic(init_scale=2.0**8))
    model.eval()
    before = picture(mp)
    harm = [1.0]
    model.wide.weight.register_hook(lambda grad: grad * harm[0])
    mp.backward(loss_of(model, data()))
    harm[0] = math.inf
    mp.backward(loss_of(model, data()), loss_id="other")
    outcome = mp.step()
    assert not outcome.applied
    assert same(picture(mp), before)
    harm[0] = 1.0
    mp.backward(loss_of(model, data()), loss_id="other")
    assert mp.step().applied


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_that_masters_can_hold_fit(closure: bool) -> None:
    """At a scale below 1, unscaled gradients of half weights may be beyond 65504."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = optim.SGD(model.parameters(), lr=2.0**-17)
    mp = MixedPrecision(model, optimizer, "fp16-master", policy=gs.Static(init_scale=2.0**-4))
    before = mp.float32_model_state()["weight"].item()

    def evaluate() -> Tensor:
        model.zero_grad()
        loss = model(torch.ones(1, 1)).sum() * 2.0**17
        mp.backward(loss)
        return loss

    if closure:
        outcome = mp.step(closure=evaluate)
    else:
        evaluate()
        outcome = mp.step()
    assert outcome.applied
    assert mp.float32_model_state()["weight"].item() == before - 1.0


def test_what_listens_may_raise() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    mp.scaler.on("skip", lambda event: 1 / 0)
    hook = model.wide.weight.register_hook(lambda grad: grad * math.inf)
    mp.backward(loss_of(model, data()))
    with pytest.raises(ZeroDivisionError):
        mp.step()
    hook.remove()
    assert not mp._masters[0].in_place
    assert advance(model, mp).applied


@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_a_parameter_has_one_master(mode: str) -> None:
    model = net()
    both = [optim.SGD(model.parameters(), lr=0.1), optim.SGD(model.wide.parameters(), lr=0.1)]
    with pytest.raises(SettingError, match=r"in two optimizers.*the mode ") as error:
        MixedPrecision(model, both, mode)
    MixedPrecision(model, both, str(error.value).split('"')[1])


def test_a_closure_that_clears_the_model() -> None:
    norms = []
    for mode in ("fp16", "fp16-master"):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
        mp = MixedPrecision(model, optimizer, mode, policy=gs.Static(init_scale=256.0))

        def closure(model: Any = model, mp: Any = mp) -> Tensor:
            model.zero_grad()
            loss = model(torch.eye(4)).float().square().sum()
            mp.backward(loss)
            return loss

        mp.step(closure=closure)
        norms.append(model.weight.detach().float())
    torch.testing.assert_close(*norms, rtol=0, atol=2.0**-10)


@every_optimizer
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_half_weights_that_are_unfrozen_have_masters(mode: str, make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[0].requires_grad_(False)
    mp = MixedPrecision(model, make(model.parameters(), lr=1e-3), mode)
    for step in range(6):
        model[0].requires_grad_(step > 1)
        outcome = mp.run(lambda: model(torch.randn(8, 4)).float().square().mean())
        assert outcome.applied
    state = mp.optimizers[0].state_dict()["state"][0]
    assert state["master"].dtype is torch.float32
    assert model[0].weight.isfinite().all()
    assert torch.equal(state["master"].half(), model[0].weight)
