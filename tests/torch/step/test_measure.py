from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

from gradscale import SettingError
from gradscale.formats import FORMATS
from gradscale.torch import GradScaler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NORMAL = {name: float(FORMATS[name].smallest_normal) for name in ("float16", "float8_e5m2")}


def true_share(values: list[float], scale: float, normal: float) -> float:
    nonzero = [abs(value * scale) for value in values if value]
    return sum(value < normal for value in nonzero) / max(len(nonzero), 1)


@pytest.mark.parametrize("format_", NORMAL)
@pytest.mark.parametrize("way", ["apply", "step", "unscale_", "clip_grad_norm_"])
@given(exponents=st.lists(st.integers(-60, 10) | st.none(), min_size=1, max_size=40))
def test_underflow_is_the_share_that_exact_arithmetic_gives(
    way: str, format_: str, exponents: list[int | None]
) -> None:
    # Powers of two stay exact under the scale, so the count is exact, and one division is rounded.
    slopes = [0.0 if exponent is None else 2.0**exponent for exponent in exponents]
    scaler = GradScaler("cpu", init_scale=4.0, underflow_every=1, format=format_)
    w = torch.zeros(len(slopes), requires_grad=True)
    optimizer = SGD([w], lr=0.0, fused=way == "step")
    scaler.backward((w * torch.tensor(slopes)).sum())
    if way == "apply":
        scaler.apply(optimizer)
    else:
        if way == "unscale_":
            scaler.unscale_(optimizer)
        elif way == "clip_grad_norm_":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    outcome = scaler.outcome()
    expected = torch.tensor(true_share(slopes, 4.0, NORMAL[format_]))
    assert outcome.underflow is not None
    assert outcome.underflow.item() == expected.item()


@pytest.mark.parametrize("device", DEVICES)
def test_underflow_is_measured_as_often_as_asked(device: str) -> None:
    for every, measured in ((0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])):
        scaler = GradScaler(device, underflow_every=every)
        w = torch.zeros(1, device=device, requires_grad=True)
        optimizer, found = SGD([w], lr=0.0), []
        for step in range(5):
            scaler.backward(w.sum())
            if scaler.apply(optimizer).underflow is not None:
                found.append(step)
        assert found == measured
    for wrong in (-1, 1.5, True):
        with pytest.raises(SettingError, match="underflow_every"):
            GradScaler("cpu", underflow_every=wrong)
    with pytest.raises(SettingError, match="format must be one of"):
        GradScaler("cpu", format="half")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("format_", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895e38)])
def test_headroom_is_in_binades_below_the_largest_number(
    device: str, format_: str, largest: float
) -> None:
    scaler = GradScaler(device, init_scale=2.0**10, format=format_)
    w = torch.zeros(2, device=device, requires_grad=True)
    scaler.backward((w * torch.tensor([1.0, -8.0], device=device)).sum())
    outcome = scaler.apply(SGD([w], lr=0.0))
    assert float(outcome.amax) == 2.0**13
    assert float(outcome.headroom) == pytest.approx(math.log2(largest) - 13, abs=1e-4)


def test_torchs_loop_measures_what_it_reads_anyway() -> None:
    def loop(way: str, fused: bool) -> tuple[Tensor | None, Tensor | None]:
        scaler, w = GradScaler("cpu", init_scale=4.0), torch.zeros(1, requires_grad=True)
        optimizer = SGD([w], lr=1.0, fused=fused)
        scaler.backward(w.sum() * 3.0)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        outcome = scaler.outcome(optimizer)
        return outcome.grad_norm, outcome.amax

    for fused in (False, True):
        assert loop("step", fused) == (None, None)
        assert loop("clip", fused)[0] == torch.tensor(3.0)


@pytest.mark.parametrize("device", DEVICES)
def test_amax_is_that_of_all_gradients_as_they_were_scaled(device: str) -> None:
    # A scale below 1 is read on its own; the shared gradient is unscaled by then.
    scaler = GradScaler(device, init_scale=0.5)
    shared, own = (torch.zeros(1, device=device, requires_grad=True) for _ in range(2))
    first, second = SGD([shared], lr=0.0), SGD([own, shared], lr=0.0)
    scaler.backward((9.0 * shared + 3.0 * own).sum())
    scaler.step(first)
    scaler.step(second)
    assert float(scaler.outcome(second).amax) == 4.5


@pytest.mark.parametrize("device", DEVICES)
def test_a_dummy_step_moves_nothing(device: str) -> None:
    scaler = GradScaler(device, init_scale=4.0, growth_interval=1)
    w = torch.zeros(1, device=device, requires_grad=True)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    saved = scaler.state_dict()
    for fresh in (optimizer, SGD([w], lr=1.0)):
        w.grad = torch.zeros_like(w)
        scaler.step(fresh)
        scaler.update()
        fresh.zero_grad()
        assert scaler.state_dict() == saved
    (w.sum() * scaler.get_scale()).backward()  # by hand, but real
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert w.item() == -2.0
