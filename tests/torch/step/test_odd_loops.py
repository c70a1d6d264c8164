"""Loops that people really write, some of them odd: each gives the numbers it would unscaled."""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam

from gradscale import CallOrderError, Dynamic, SettingError, StateError, Static
from gradscale.torch import GradScaler


def parameter(value: float = 0.0, **options: Any) -> Tensor:
    return torch.full((1,), value, requires_grad=True, **options)


def test_an_evaluation_in_inference_mode_does_no_harm() -> None:
    for first in (True, False):
        scaler, w = GradScaler("cpu", growth_interval=1), parameter()
        optimizer = SGD([w], lr=1.0)
        for iteration in range(2):
            if first or iteration:
                with torch.inference_mode():
                    scaler.scale(w.sum())
            scaler.backward(w.sum())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert (w.item(), scaler.get_scale()) == (-2.0, 2.0**18)


def test_conjugated_complex_gradients_are_unscaled() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    w = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j], requires_grad=True)
    plain = w.detach().clone().requires_grad_()
    x = torch.tensor([2.0 - 1.0j, 1.0 + 1.0j])
    scaler.backward((w.conj() * x).real.sum())
    (plain.conj() * x).real.sum().backward()
    scaler.step(SGD([w], lr=1.0))
    SGD([plain], lr=1.0).step()
    assert torch.equal(w, plain)


def test_scaling_inside_a_torch_func_transform_leaks_nothing() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter()
    optimizer = SGD([w], lr=1.0)
    x = torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.func's own
        grads = torch.func.vmap(
            torch.func.grad(lambda p, item: scaler.scale((p * item).sum())), in_dims=(None, 0)
        )(w.detach(), x)
    w.grad = grads.sum(0)
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == -3.0


def test_a_disabled_scaler_says_that_its_steps_were_applied() -> None:
    scaler, w = GradScaler("cpu", enabled=False), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.step(optimizer)
    assert bool(scaler.outcome(optimizer).applied)
    assert float(scaler.outcome().scale) == 1.0


def test_a_closure_that_returns_nothing_is_told_so() -> None:
    scaler, w = GradScaler("cpu"), parameter()
    with pytest.raises(CallOrderError, match="returned nothing"):
        scaler.step(SGD([w], lr=1.0), lambda: scaler.backward(w.sum()))


def test_a_parameter_that_is_never_stepped_may_be_infinite() -> None:
    scaler, w = GradScaler("cpu"), parameter(1.0)
    mask = nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
    optimizer = LBFGS([w, mask])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        scaler.backward(loss)
        return loss

    scaler.step(optimizer, closure)
    assert bool(scaler.outcome().applied)
    assert w.item() < 1.0


def test_arguments_of_step_are_handed_on_as_they_are() -> None:
    class Picky(SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return super().step()

    scaler, w = GradScaler("cpu"), parameter()
    scaler.backward(w.sum())
    scaler.step(Picky([w], lr=1.0), None)
    assert w.item() == -1.0


def test_wrappers_need_not_be_hashable_and_are_not_kept_alive() -> None:
    @dataclass
    class Wrapper:
        inner: SGD

        @property
        def param_groups(self) -> Any:
            return self.inner.param_groups

        def step(self) -> None:
            self.inner.step()

    scaler, w = GradScaler("cpu"), parameter()
    for _ in range(3):
        wrapper: Any = Wrapper(SGD([w], lr=1.0))
        scaler.backward(w.sum())
        scaler.step(wrapper)
        assert bool(scaler.outcome(wrapper).applied)
        scaler.update()
        w.grad = None
    assert w.item() == -3.0
    del wrapper
    gc.collect()
    scaler.backward(w.sum())
    assert scaler._per_optimizer_states == {}
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Wrapper]


def test_a_loss_that_is_never_sent_backward_says_nothing() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1), parameter()
    optimizer = SGD([w], lr=1.0)
    for bad in (False, True):
        scaler.scale(torch.tensor(math.nan))
        scaler.scale([w.sum(), (w * math.inf).sum()])
        scaler.backward(w.sum())
        if bad:
            w.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (4.0 if bad else 8.0)


def test_a_loss_scaled_only_to_be_logged_does_not_touch_waiting_gradients() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    params = [parameter(), parameter()]
    scaler.backward(params[0].sum() + params[1].sum())
    for p in params:
        scaler.step(SGD([p], lr=1.0))
        scaler.update()
        scaler.scale(torch.ones(()))
    assert [p.item() for p in params] == [-1.0, -1.0]


def test_loading_takes_effect_with_the_next_loss() -> None:
    scaler, w = GradScaler("cpu"), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.load_state_dict(GradScaler("cpu", init_scale=4.0).state_dict())
    scaler.step(optimizer)  # made with the scale of before
    scaler.update()
    optimizer.zero_grad()
    scaler.backward(w.sum())
    assert w.grad.item() == 4.0
    scaler.step(optimizer)
    assert w.item() == -2.0


def test_a_float16_loss_does_not_move_a_static_scale() -> None:
    scaler, w = GradScaler("cpu", policy=Static(init_scale=2.0**17)), parameter()
    with pytest.warns(UserWarning, match="float16"):
        scaler.backward(w.sum().half())
    assert w.grad.item() == 2.0**15
    assert scaler.get_scale() == 2.0**17


def test_a_static_scale_survives_a_checkpoint_of_torch() -> None:
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(GradScaler("cpu", policy=Static(init_scale=64.0)).state_dict())
    for policy in (Static(init_scale=2.0), Dynamic()):
        scaler = GradScaler("cpu", policy=policy)
        scaler.load_state_dict(torchs.state_dict(), settings=False)
        assert scaler.policy == policy
        assert scaler.get_scale() == 64.0
    with pytest.raises(StateError, match="settings=False"):
        GradScaler("cpu", policy=Static(init_scale=2.0)).load_state_dict(torchs.state_dict())


def test_bounds_that_nobody_gave_stay_so_through_a_checkpoint() -> None:
    for given in ({}, {"min_scale": 2.0**-14}):
        scaler = GradScaler("cpu")
        scaler.load_state_dict(GradScaler("cpu", **given).state_dict())
        scaler.scale(torch.ones(()))
        if given:
            with pytest.raises(SettingError, match="update"):
                scaler.update(2.0**-20)
        else:
            scaler.update(2.0**-20)
            assert scaler.get_scale() == 2.0**-20


def test_private_names_may_be_set_before_the_first_loss() -> None:
    scaler = GradScaler("cpu")
    scaler._scale = torch.tensor(128.0)
    assert scaler.get_scale() == 128.0


def test_a_nan_made_before_our_clipping_spares_the_scale() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.unscale_(optimizer)
    w.grad.mul_(math.nan)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (w.item(), scaler.get_scale()) == (0.0, 4.0)


def test_float64_gradients_beyond_float32_are_clipped() -> None:
    scaler = GradScaler("cpu", policy=Static(init_scale=1.0))
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    scaler.backward((w * 1e100).sum())
    optimizer = SGD([w], lr=1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert norm.item() == pytest.approx(math.sqrt(2.0) * 1e100, rel=1e-15)
    assert w.tolist() == pytest.approx([-math.sqrt(0.5)] * 2, rel=1e-6)


def test_a_skipped_critic_is_cleared_though_the_makers_loss_adds_to_it() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    critic, maker = parameter(), parameter()
    critics, makers = SGD([critic], lr=1.0), SGD([maker], lr=1.0)
    scaler.backward(critic.sum())
    critic.grad.fill_(math.inf)
    scaler.step(critics)
    scaler.backward(maker.sum() + critic.sum())
    scaler.step(makers)
    scaler.update()
    assert critic.grad.item() == 4.0  # the maker's part of it, and nothing of the overflow


def test_a_skipped_step_is_cleared_though_its_first_gradient_is_gone_for_another_one() -> None:
    scaler, shared, own = GradScaler("cpu", init_scale=4.0), parameter(), parameter()
    first, second = SGD([shared], lr=1.0), SGD([shared, own], lr=1.0)
    scaler.backward(shared.sum() + own.sum())
    own.grad.fill_(math.inf)
    scaler.step(first)
    scaler.step(second)
    first.zero_grad()
    scaler.backward(shared.sum())
    scaler.update()
    scaler.step(second)
    assert scaler.outcome(second).applied
    assert (shared.item(), own.item()) == (-2.0, 0.0)


def test_shared_gradients_that_were_cleared_in_place_are_scaled_by_the_next_pass() -> None:
    scaler, shared, own = GradScaler("cpu", init_scale=4.0), parameter(), parameter()
    first, second = SGD([shared], lr=1.0), SGD([shared, own], lr=1.0)
    scaler.watch(first)
    scaler.backward(shared.sum() + own.sum())
    scaler.unscale_(second)
    scaler.step(second)
    second.zero_grad(set_to_none=False)
    scaler.backward(shared.sum() + own.sum())
    scaler.update()
    scaler.step(second)
    assert (shared.item(), own.item()) == (-2.0, -2.0)


def test_an_optimizer_made_anew_does_not_step_on_old_gradients() -> None:
    scaler, w = GradScaler("cpu"), parameter()
    scaler.backward(w.sum())
    scaler.step(SGD([w], lr=1.0))
    scaler.update()
    with pytest.raises(CallOrderError, match="no new gradients"):
        scaler.step(SGD([w], lr=1.0))
    assert w.item() == -1.0


def test_an_optimizer_beside_another_does_not_step_on_its_old_gradients() -> None:
    scaler, w = GradScaler("cpu"), parameter()
    first = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.step(first)
    scaler.update()
    with pytest.raises(CallOrderError, match="no new gradients"):
        scaler.step(SGD([w], lr=1.0))
    assert w.item() == -1.0


def test_an_optimizer_made_anew_steps_on_new_gradients() -> None:
    scaler, w = GradScaler("cpu"), parameter()
    for count in range(1, 4):
        scaler.backward(w.sum())
        optimizer = SGD([w], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert w.item() == -count
        del optimizer


def test_unscaled_gradients_from_before_an_update_stay_unscaled() -> None:
    scaler, a, b = GradScaler("cpu", init_scale=8.0), parameter(), parameter()
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.watch(first)
    scaler.backward(a.sum())
    scaler.update(64.0)
    scaler.unscale_(first)
    scaler.backward(b.sum())
    assert a.grad.item() == 1.0
    scaler.step(first)
    scaler.step(second)
    assert (a.item(), b.item()) == (-1.0, -1.0)
    assert float(scaler.outcome(first).scale) == 8.0


def test_no_gradients_that_were_unscaled_do_not_move_the_scale() -> None:
    scaler, a, b = GradScaler("cpu", growth_interval=1), parameter(), parameter()
    optimizer = SGD([b], lr=1.0)
    scaler.backward(a.sum())
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match="no gradients were checked"):
        scaler.update()
    b.grad = torch.ones(1)
    with pytest.raises(CallOrderError, match=r"unscale_\(\) had found none"):
        scaler.step(optimizer)
    assert (scaler.get_scale(), b.item()) == (2.0**16, 0.0)


def test_nothing_accumulates_over_many_iterations() -> None:
    scaler, params = GradScaler("cpu", growth_interval=7), [parameter() for _ in range(3)]
    each, seldom = Adam(params[:2]), SGD(params[2:], lr=1.0)

    def run(iterations: int) -> int:
        for iteration in range(iterations):
            scaler.backward(sum(p.sum() for p in params) * 1e-3)
            if iteration % 5 == 0:
                params[0].grad.fill_(math.inf)
            scaler.step(each)
            scaler.step(seldom)
            scaler.update()
            each.zero_grad()
            seldom.zero_grad(set_to_none=False)
        gc.collect()
        return len(gc.get_objects())

    run(20)
    before = run(20)
    assert run(200) - before < 50  # a leak of one object per iteration would be 180


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_compiled_loop_body_works(set_to_none: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0, growth_interval=1), parameter()
    optimizer = SGD([w], lr=1.0)

    @torch.compile(backend="eager")
    def body(x: Tensor) -> Tensor:
        loss = (w * x).sum()
        scaler.scale(loss).backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dynamo says of its graph breaks is not ours
        for _ in range(3):
            body(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert (w.item(), scaler.get_scale()) == (-3.0, 32.0)
