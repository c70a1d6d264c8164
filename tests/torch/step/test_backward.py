from __future__ import annotations

import math
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_graph import keep_in_tensors
from gradscale import CallOrderError, SettingError, Static
from gradscale.torch import GradScaler
from tensors import parameter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize("device", DEVICES)
def test_scale_multiplies_tensors_and_nested_iterables_alike(device: str) -> None:
    scaler = GradScaler(device, init_scale=8.0)
    one = torch.ones((), device=device)
    assert scaler.scale(one).item() == 8.0
    assert scaler.scale([one, (one, one)]) == [8.0, (8.0, 8.0)]
    assert isinstance(scaler.scale(Pair(one, one)), Pair)
    assert list(scaler.scale(x for x in (one, one))) == [8.0, 8.0]


@pytest.mark.parametrize("wrong", [3.0, "loss", {"loss": 1.0}, [3.0], None])
def test_scale_of_anything_else_is_an_error(wrong: object) -> None:
    with pytest.raises(ValueError, match="tensor"):
        GradScaler("cpu").scale(wrong)


def test_backward_takes_one_loss_or_several() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(1.0)
    scaler.backward(w.sum(), retain_graph=True)
    scaler.backward([w.sum(), (w * 2.0).sum()])
    assert w.grad.tolist() == [16.0]


@pytest.mark.parametrize("wrong", [[], {"loss": 1.0}, ["loss"], [None]])
@pytest.mark.parametrize("loss_id", [0, 1])
def test_backward_of_anything_else_is_an_error(wrong: object, loss_id: int) -> None:
    with pytest.raises(ValueError, match="backward"):
        GradScaler("cpu").backward(wrong, loss_id=loss_id)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_brought_to_the_scale_of_the_next_pass(device: str) -> None:
    scaler, w = GradScaler(device, init_scale=4.0), parameter(1.0, device=device)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.watch(optimizer)
    scaler.backward(w.sum())
    scaler.update(1024.0)
    assert w.grad.tolist() == [4.0]
    scaler.backward(w.sum())
    assert w.grad.tolist() == [2048.0]
    assert scaler.get_scale() == 1024.0
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [-1.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
def test_unscale_divides_gradients_of_every_kind(device: str, dtype: torch.dtype) -> None:
    scaler = GradScaler(device, init_scale=16.0)
    w = parameter(1.0, 2.0, device=device, dtype=dtype)
    loss = (w * 3).sum().abs().float()
    scaler.backward(loss)
    scaler.unscale_(torch.optim.SGD([w], lr=1.0))
    assert w.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("device", DEVICES)
def test_unscaling_twice_is_an_error_and_divides_once(device: str) -> None:
    scaler, w = GradScaler(device, init_scale=4.0), parameter(1.0, device=device)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match="twice"):
        scaler.unscale_(optimizer)
    assert w.grad.tolist() == [1.0]


def test_a_wrapper_of_an_optimizer_does_not_divide_a_second_time() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(1.0)
    inner = torch.optim.SGD([w], lr=1.0)
    wrapper = torch.optim.SGD([w], lr=1.0)  # another identity, the same parameters
    scaler.backward(w.sum())
    scaler.unscale_(wrapper)
    scaler.step(inner)
    assert w.tolist() == [0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_come_back_unscaled_and_differentiable(device: str) -> None:
    scaler = GradScaler(device, init_scale=2.0**10)
    w, x = parameter(3.0, device=device), parameter(2.0, device=device)
    (grad,) = scaler.grad((w * x * x).sum(), x, create_graph=True)
    assert grad.tolist() == [12.0]
    scaler.backward(grad.square().sum())  # d/dw (2wx)**2 = 8 w x**2
    scaler.unscale_(torch.optim.SGD([w], lr=1.0))
    assert w.grad.tolist() == [96.0]
    assert scaler.grad(w.sum(), [w, x], allow_unused=True)[1] is None


def test_penalties_of_float16_come_back_in_float32() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**15)
    x = parameter(1.0, dtype=torch.float16)
    (grad,) = scaler.grad((x * 2.0**-14).float().sum(), x)
    assert grad.dtype is torch.float32
    assert grad.tolist() == [2.0**-14]


def test_a_penalty_that_overflows_lowers_the_scale_though_the_loss_is_not_finite() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**16)
    x = parameter(1.0, dtype=torch.float16)
    (grad,) = scaler.grad((x * 2.0).float().sum(), x, create_graph=True)
    loss = grad.square().sum() + (x * 1.0).float().sum()
    assert not torch.isfinite(loss)
    scaler.backward(loss)
    optimizer = torch.optim.SGD([x], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert x.tolist() == [1.0]


def test_a_disabled_scaler_hands_everything_through() -> None:
    scaler, w = GradScaler("cpu", enabled=False), parameter(1.0)
    optimizer = torch.optim.SGD([w], lr=1.0)
    loss = w.sum()
    assert scaler.scale(loss) is loss
    assert scaler.grad(loss, w, retain_graph=True)[0].tolist() == [1.0]
    scaler.backward(loss)
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 0.5).item() == 1.0
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == pytest.approx(0.5, abs=1e-5)
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})


# Clipping.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [0.5, 5.0, 100.0, math.inf])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_clipping_is_torchs_to_the_rounding(
    device: str, max_norm: float, fused: bool, unscale_first: bool
) -> None:
    torch.manual_seed(3)
    start = [torch.randn(n, device=device) for n in (5, 300)]
    results = []
    for scaler in (GradScaler(device), torch.amp.GradScaler(device)):
        params = [t.clone().requires_grad_() for t in start]
        optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
        scaler.scale(sum((p * p).sum() for p in params)).backward()
        if isinstance(scaler, GradScaler):
            if unscale_first:
                scaler.unscale_(optimizer)
            norm = scaler.clip_grad_norm_(optimizer, max_norm)
        else:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        scaler.step(optimizer)
        scaler.update()
        results.append((norm.item(), [p.detach() for p in params]))
    (ours, mine), (theirs, expected) = results
    # Two norms of 305 terms, each off by at most (305 + 3) / 2 units of 2**-24; a few roundings.
    bound = (308 + 8) * 2.0**-24
    assert ours == pytest.approx(theirs, rel=bound)
    for a, b, s in zip(mine, expected, start, strict=True):
        assert torch.all((a - b).abs() <= bound * (b.abs() + s.abs()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_norm_of_a_step_to_be_skipped_is_nan(device: str, bad: float) -> None:
    scaler, w = GradScaler(device), parameter(1.0, 2.0, device=device)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.backward((w * torch.tensor([1.0, 2.0], device=device)).sum())
    w.grad[1] = bad
    assert math.isnan(scaler.clip_grad_norm_(optimizer, 1.0).item())
    scaler.step(optimizer)
    assert w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_huge_finite_norm_clips_and_is_no_overflow(device: str) -> None:
    scaler = GradScaler(device, policy=Static(init_scale=1.0))
    w = parameter(0.0, 0.0, device=device)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.backward((w * torch.tensor([3e30, 4e30], device=device)).sum())
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5e30, rel=2.0**-22)
    scaler.step(optimizer)
    assert w.tolist() == pytest.approx([-0.6, -0.8], rel=2.0**-20)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, True, "1", None])
def test_a_useless_max_norm_is_an_error_that_changes_nothing(wrong: Any) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(1.0)
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.backward(w.sum())
    with pytest.raises(SettingError, match="max_norm must be a number > 0"):
        scaler.clip_grad_norm_(optimizer, wrong)
    assert w.grad.tolist() == [4.0]
    scaler.step(optimizer)
    assert w.tolist() == [0.0]


# float16 losses.


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_float16_loss_gets_a_capped_scale_and_one_warning(shape: tuple[int, ...]) -> None:
    scaler, w = GradScaler("cpu"), torch.ones(shape, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    with pytest.warns(UserWarning, match=r"loss\.float\(\)"):
        scaled = scaler.scale(w * 1.0)
    assert scaled.dtype is torch.float32
    assert scaled.flatten()[0].item() == 2.0**15
    scaled.sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.all(w == 0.0)
    assert scaler.get_scale() == 2.0**15
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(w * 1.0)


def test_the_cap_of_a_float16_loss_goes_with_it() -> None:
    scaler, w = GradScaler("cpu", growth_interval=1), parameter(1.0)
    optimizer = torch.optim.SGD([w], lr=0.0)
    with pytest.warns(UserWarning, match="float16"):
        scaler.backward((w * 2.0).half())
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.backward(w.sum())
    assert scaler.get_scale() == 2.0**17


# Parameters of two optimizers.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_shared_parameter_is_divided_once(
    device: str, fused: tuple[bool, bool], explicit: bool
) -> None:
    scaler, w = GradScaler(device, init_scale=16.0), parameter(0.0, device=device)
    own = [parameter(0.0, device=device) for _ in fused]
    both = [torch.optim.SGD([w, p], lr=1.0, fused=f) for p, f in zip(own, fused, strict=True)]
    scaler.backward((w + own[0] + own[1]).sum())
    if explicit:
        for optimizer in both:
            scaler.unscale_(optimizer)
    for optimizer in both:
        scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [-2.0]
    assert [p.tolist() for p in own] == [[-1.0], [-1.0]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_of_one_optimizer_leaves_the_shared_gradient_to_the_other(
    device: str, fused: bool
) -> None:
    scaler = GradScaler(device, init_scale=16.0)
    w, bad = parameter(0.0, device=device), parameter(0.0, device=device)
    first = torch.optim.SGD([w, bad], lr=1.0, fused=fused)
    second = torch.optim.SGD([w], lr=1.0, fused=fused)
    scaler.backward((w + bad).sum())
    bad.grad.fill_(math.inf)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (w.tolist(), bad.tolist()) == ([-1.0], [0.0])
    assert scaler.get_scale() == 8.0


def test_clearing_after_a_step_is_not_taken_for_an_addition_to_a_shared_gradient() -> None:
    scaler, shared, other = GradScaler("cpu", init_scale=16.0), parameter(0.0), parameter(0.0)
    keep_in_tensors(scaler)  # which clears by a multiplication, in case the step was skipped
    first, second = (torch.optim.SGD([shared], lr=1.0) for _ in range(2))
    for optimizer in (first, second):
        scaler.watch(optimizer)
    scaler.backward(shared.sum())
    scaler.unscale_(first)
    scaler.step(second)
    scaler.backward(other.sum())
    scaler.step(first)
    assert shared.tolist() == [-2.0]


def test_a_shared_gradient_that_is_unscaled_is_not_brought_to_another_scale() -> None:
    scaler, shared, other = GradScaler("cpu", init_scale=16.0), parameter(0.0), parameter(0.0)
    first, second = (torch.optim.SGD([shared], lr=1.0) for _ in range(2))
    for optimizer in (first, second):
        scaler.watch(optimizer)
    scaler.backward(shared.sum())
    scaler.update(4.0)
    scaler.unscale_(first)
    scaler.backward(other.sum())
    scaler.step(first)
    scaler.step(second)
    assert shared.tolist() == [-2.0]


def test_a_loss_of_its_own_is_not_added_to_a_shared_gradient_that_was_clipped_and_stepped() -> None:
    scaler, shared = GradScaler("cpu", init_scale=16.0), parameter(0.0)
    first, second = (torch.optim.SGD([shared], lr=1.0) for _ in range(2))
    scaler.watch(second)
    scaler.backward(shared.sum())
    scaler.clip_grad_norm_(first, 2.0)
    scaler.step(first)
    with pytest.raises(CallOrderError, match="gradients that are already unscaled"):
        scaler.backward(shared.sum(), loss_id=1)


# The law of it all.


@given(
    st.integers(-10, 24),
    st.lists(st.floats(-100.0, 100.0, width=16), min_size=1, max_size=5),
    st.integers(1, 4),
)
def test_scaling_by_a_power_of_two_changes_no_gradient(
    exponent: int, numbers: list[float], passes: int
) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**exponent)
    w = torch.zeros(len(numbers), requires_grad=True)
    plain = torch.zeros(len(numbers), requires_grad=True)
    for _ in range(passes):
        scaler.backward((w * torch.tensor(numbers)).sum())
        (plain * torch.tensor(numbers)).sum().backward()
    scaler.unscale_(torch.optim.SGD([w], lr=1.0))
    assert torch.equal(w.grad, plain.grad)
