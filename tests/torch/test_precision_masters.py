"""MixedPrecision with masters: whose gradients they have, and what is written where."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradscale as gs
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import MixedPrecision
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

torch.set_num_threads(1)


def turns(mode: str, make: Any, left: bool) -> list[Tensor]:
    """A loop of two networks that takes gradients of an earlier scale along, or clears them."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    for each in (first, second):
        nn.init.constant_(each.weight, 0.25)
    one, other = make(first.parameters(), lr=1e-3), make(second.parameters(), lr=1e-3)
    policy = gs.Dynamic(init_scale=16.0, growth_interval=1, growth_factor=16.0)
    mp = MixedPrecision([first, second], [one, other], mode, policy=policy)
    x = torch.ones(8, 4)
    mp.backward(second(first(x).detach()).float().mean())
    mp.step(other)
    mp.backward(second(first(x)).float().mean())
    mp.step(one)
    if left:
        mp.step(other)  # with what the last pass left for it
        return picture(mp)
    mp.backward(second(first(x).detach()).float().mean())
    mp.step(other)
    return picture(mp)


@every_optimizer
@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])
def test_gradients_of_two_scales_are_not_added_up(mode: str, make: Any) -> None:
    with pytest.raises(CallOrderError, match="another scale were left"):
        turns(mode, make, left=False)


@every_optimizer
def test_gradients_that_were_left_are_divided_by_their_own_scale(make: Any) -> None:
    torch.manual_seed(0)
    wide = turns("fp16", make, left=True)
    torch.manual_seed(0)
    half = turns("fp16-master", make, left=True)
    # The weights are powers of two and the rest is exact in both.
    sizes = [value.shape for value in wide[:4]]
    assert sizes == [value.shape for value in half[:4]]
    for one, other in zip(wide[:4], half[:4], strict=True):
        assert (one - other.float()).abs().max() <= 2.0**-11


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
    with pytest.raises(SettingError, match="model must be one that"):
        mp.float32_model_state(nn.Linear(2, 2))


def test_a_step_that_raises_leaves_the_gradients_where_they_were() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    mp.backward(loss_of(model, data()))
    grads = [param.grad.clone() for param in model.parameters()]
    fails = [True]

    def fail(*_: Any) -> None:
        if fails and fails.pop():
            raise RuntimeError("planted")

    mp.optimizers[0].register_step_pre_hook(fail)
    for limit, error in ((-1.0, SettingError), (1.0, RuntimeError)):
        with pytest.raises(error):
            mp.step(clip_norm=limit)
        assert all(param.grad is not None for param in model.parameters())
    mp.zero_grad()
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    model.eval()
    mp.backward(loss_of(model, data()))
    assert mp.step().applied
    assert (model.wide.weight - 1).abs().max() < 0.1  # the load was not undone
    assert len(grads) == 6


def test_what_listens_may_raise() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    mp.scaler.on("skip", lambda event: 1 / 0)
    hook = model.wide.weight.register_hook(lambda grad: grad * math.inf)
    mp.backward(loss_of(model, data()))
    with pytest.raises(ZeroDivisionError):
        mp.step()
    hook.remove()
    assert mp._masters[id(mp.optimizers[0])].pairs() == []
    assert advance(model, mp).applied


def test_a_parameter_has_one_master() -> None:
    model = net()
    both = [optim.SGD(model.parameters(), lr=0.1), optim.SGD(model.wide.parameters(), lr=0.1)]
    with pytest.raises(SettingError, match=r'in two optimizers.*the mode "fp16"'):
        MixedPrecision(model, both, "fp16-master")
    MixedPrecision(model, both, "fp16")


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
    state = mp.optimizers[0].state[model[0].weight]
    assert state["master"].dtype is torch.float32
    assert model[0].weight.isfinite().all()
    assert torch.equal(state["master"].half(), model[0].weight)


def test_names_of_masters_do_not_pile_up() -> None:
    model, mp = built("fp16-pure", OPTIMIZERS["foreach"])
    advance(model, mp, 3)
    count = len(mp.scaler._names._given)
    kept = []
    for _ in range(20):
        advance(model, mp)
        kept.append(torch.zeros(16, 6))
    assert len(mp.scaler._names._given) <= count
