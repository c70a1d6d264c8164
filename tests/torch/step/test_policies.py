"""What the torch engine tells a policy, and that every way of stepping tells the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradscale as gs
from gradscale.torch import GradScaler
from gradscale.torch.grads import dispatch as kernels

HERE = "cuda" if torch.cuda.is_available() else "cpu"
SIZED = [gs.Headroom(init_scale=2.0**3), gs.LogMax(init_scale=2.0**3), gs.Histogram(interval=2)]
WAYS = ("apply", "apply, unfused", "torch's loop", "clip_grad_norm_", "step alone", "closure")


def weights() -> list[Tensor]:
    return [torch.full((4,), 0.5, device=HERE, requires_grad=True) for _ in range(2)]


def take(way: str, scaler: Any, optimizer: Any, params: list[Tensor], size: float) -> None:
    """One step with gradients that are `size` without a scale, unscaled and small enough."""

    def loss() -> Tensor:
        return sum(p.sum() for p in params) * size  # type: ignore[return-value]

    if way == "closure":

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss()
            scaler.backward(value)
            return value

        scaler.step(optimizer, closure)
        scaler.update()
    elif way.startswith("apply"):
        scaler.backward(loss())
        scaler.apply(optimizer, clip_norm=1e30)
    else:
        scaler.scale(loss()).backward()
        if way == "torch's loop":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1e30)
        elif way == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, 1e30)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


SIZES = [0.75, 0.75, 2.0**-6, 2.0**-6, 2.0**-6, math.inf, 2.0**-6, 2.0**20, 1.0, 1.0]


def expected(policy: Any, sizes: list[float]) -> list[float]:
    """The scales that the policy gives for gradients of these sizes."""
    state, scales = policy.init(), []
    edge = gs.FORMATS["float16"].max / 8
    for size in sizes:
        amax = size * state.scale
        finite = math.isfinite(amax)
        stats = gs.GradStats(
            finite=finite,
            amax=amax,
            loss_finite=finite,
            exponent=math.frexp(amax)[1] if finite else 0,
            upper=float(amax > edge),
        )
        state = policy.update(state, stats)
        scales.append(state.scale)
    return scales


@pytest.mark.parametrize("policy", SIZED, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_stepping_tells_the_policy_the_same(way: str, policy: Any) -> None:
    params = weights()
    fused = {} if way in ("apply, unfused", "closure") else {"fused": True}
    optimizer = torch.optim.SGD(params, lr=1e-9, **fused)
    scaler, scales = GradScaler(HERE, policy=policy), []
    for size in SIZES:
        take(way, scaler, optimizer, params, size)
        scales.append(scaler.get_scale())
    assert scales == expected(policy, SIZES)


def test_the_comparison_notices_gradients_of_another_size() -> None:
    policy = SIZED[0]
    assert expected(policy, SIZES) != expected(policy, [size / 4 for size in SIZES])


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_kernels_tell_the_policy_the_same(path: str) -> None:
    params = weights()
    optimizer = torch.optim.SGD(params, lr=1e-9, fused=True)
    scaler, scales = GradScaler(HERE, policy=SIZED[0]), []
    with kernels.use(path):
        for size in SIZES:
            take("apply", scaler, optimizer, params, size)
            scales.append(scaler.get_scale())
    assert scales == expected(SIZED[0], SIZES)


def test_several_optimizers_are_told_of_together() -> None:
    a, b = weights()
    optimizers = [torch.optim.SGD([w], lr=1e-9) for w in (a, b)]
    scaler = GradScaler(HERE, policy=gs.Headroom(init_scale=1.0))
    scaler.scale(a.sum() * 2.0**-12 + b.sum() * 2.0**-20).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == expected(gs.Headroom(init_scale=1.0), [2.0**-12])[0]


def test_a_loss_with_a_scale_of_its_own_is_told_of_by_itself() -> None:
    (w, _), policy = weights(), gs.Headroom(init_scale=1.0)
    optimizer, scaler = torch.optim.SGD([w], lr=1e-9), GradScaler(HERE, policy=policy)
    scaler.backward(w.sum() * 2.0**-12)
    scaler.backward(w.sum() * 2.0**-20, loss_id="small")
    scaler.apply(optimizer)
    assert scaler.get_scale("small") == expected(policy, [2.0**-20])[0]


def test_gradients_of_an_older_scale_are_told_of_at_the_one_that_moves() -> None:
    (w, _), policy = weights(), gs.Headroom(init_scale=4.0)
    optimizer, scaler = torch.optim.SGD([w], lr=1e-9), GradScaler(HERE, policy=policy)
    scaler.scale(w.sum() * 2.0**-12).backward()
    scaler.update(2.0**10)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == expected(gs.Headroom(init_scale=2.0**10), [2.0**-12])[0]


def test_one_gradient_near_the_ceiling_is_enough_for_histogram() -> None:
    w = torch.full((1000,), 1.0, device=HERE, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1e-9)
    for bad, halved in ((0, False), (1, True), (20, True)):
        scaler = GradScaler(HERE, policy=gs.Histogram(init_scale=1.0, threshold=1e-6))
        size = torch.full_like(w, 2.0**12)
        size[:bad] = 2.0**14
        scaler.backward((w * size).sum())
        scaler.apply(optimizer)
        assert (scaler.get_scale() == 0.5) is halved


@pytest.mark.parametrize("policy", SIZED, ids=lambda p: type(p).__name__)
def test_resume_is_exact(policy: Any) -> None:
    def walk(scaler: Any, sizes: list[float]) -> list[float]:
        params = weights()
        optimizer, scales = torch.optim.SGD(params, lr=1e-9), []
        for size in sizes:
            take("apply", scaler, optimizer, params, size)
            scales.append(scaler.get_scale())
        return scales

    whole, first, second = (GradScaler(HERE, policy=policy) for _ in range(3))
    scales = walk(whole, SIZES)
    assert walk(first, SIZES[:5]) == scales[:5]
    second.load_state_dict(first.state_dict())
    assert walk(second, SIZES[5:]) == scales[5:]
    other = GradScaler(HERE)
    other.load_state_dict(whole.state_dict())
    assert other.state_dict() == whole.state_dict()


def test_damaged_state_is_refused() -> None:
    scaler = GradScaler(HERE, policy=gs.Headroom())
    for name, value in (("peak", 2**31), ("peak", 0.5), ("crest", "high"), ("last", None)):
        state = scaler.state_dict()
        state["gradscale"]["state"][name] = value
        with pytest.raises(gs.StateError, match=name):
            scaler.load_state_dict(state)


def test_policy_can_be_a_name() -> None:
    assert GradScaler(HERE, policy="headroom").policy == gs.Headroom()
    assert GradScaler(HERE, policy="static", init_scale=8.0).policy == gs.Static(8.0)
    wide = GradScaler(HERE, policy="logmax", format="bfloat16")
    assert (wide.policy.format, wide._state.format.name) == ("bfloat16", "bfloat16")
    with pytest.raises(gs.SettingError, match=r"one of the names headroom, .*got 'best'"):
        GradScaler(HERE, policy="best")


def test_the_format_of_the_policy_is_that_of_the_scaler() -> None:
    (w, _), policy = weights(), gs.Headroom(format="bfloat16")
    for given in ({}, {"format": "bfloat16"}):
        scaler = GradScaler(HERE, policy=policy, **given)
        scaler.backward(w.sum())
        outcome = scaler.apply(torch.optim.SGD([w], lr=1e-9))
        assert float(outcome.headroom) > 100
    with pytest.raises(
        gs.SettingError,
        match="format is 'bfloat16' in the policy, but the argument format is 'float8_e5m2'",
    ):
        GradScaler(HERE, format="float8_e5m2", policy=policy)
