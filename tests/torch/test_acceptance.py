"""What users asked for, each as one test, numbered as in our list of needs.

The rest of that list is elsewhere: 1 in test_skip.py, 8 and 10 in test_scaler_device.py and
test_unscale.py, 9 in test_mistakes_sync.py, 12 in test_checking.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from gradscale import CallOrderError, Static
from gradscale.torch import GradScaler
from tensors import parameter


def steps(scaler: GradScaler, w: Tensor, optimizer: Optimizer, *values: float) -> list[bool]:
    """Whether each step with these gradients was applied."""
    applied = []
    for value in values:
        scaler.backward(w.sum())
        w.grad.mul_(value)
        applied.append(bool(scaler.apply(optimizer).applied))
    return applied


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"policy": Static(init_scale=8.0)}, {"init_scale": 2.0**-14, "min_scale": 2.0**-14}],
    ids=["dynamic", "static", "at the floor"],
)
def test_02_applied_is_right(fused: bool, settings: dict[str, Any]) -> None:
    scaler, w = GradScaler("cpu", **settings), parameter(1.0)
    optimizer = AdamW([w], lr=0.5, fused=fused)
    for value in (math.inf, 1.0, math.nan, 1.0):
        before = w.item()
        assert steps(scaler, w, optimizer, value) == [w.item() != before]
        assert (w.item() != before) is math.isfinite(value)


def test_04_the_scale_survives_500_bad_steps_and_recovers() -> None:
    scaler, w = GradScaler("cpu", growth_interval=3, on_stuck="ignore"), parameter(1.0)
    optimizer = SGD([w], lr=2.0**-10)
    steps(scaler, w, optimizer, *[math.nan] * 500)
    assert scaler.get_scale() == 2.0**-14
    assert math.isfinite(1 / scaler.get_scale())
    assert w.item() == 1.0
    assert steps(scaler, w, optimizer, *[1.0] * 90) == [True] * 90
    assert scaler.get_scale() == 2.0 ** (-14 + 30)
    assert w.item() == 1.0 - 90 * 2.0**-10


def test_05_a_tiny_loss_does_not_lift_the_scale_beyond_its_ceiling() -> None:
    scaler, w = GradScaler("cpu", growth_interval=1), parameter(1.0)
    optimizer = SGD([w], lr=1.0)
    for _ in range(200):
        scaler.backward((w * 1e-30).sum())
        scaler.apply(optimizer)
    assert scaler.get_scale() == 2.0**64


@pytest.mark.parametrize("call", ["unscale_", "apply", "step"])
def test_06_gradients_are_divided_once(call: str) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(1.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.unscale_(optimizer)
    if call == "unscale_":
        with pytest.raises(CallOrderError, match="twice"):
            scaler.unscale_(optimizer)
        assert w.grad.tolist() == [1.0]
    else:
        getattr(scaler, call)(optimizer)
        assert w.item() == 0.0


def trained(stop: int, total: int, save: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Everything at the end of `total` steps, with a resume in a new world after `stop` of them."""

    def world() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = AdamW(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        scheduler = StepLR(optimizer, 2, gamma=0.5)
        scaler.follow(scheduler)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}

    here = world()
    for number in range(total):
        if number == stop:
            here["scaler"].flush()
            state = save({name: part.state_dict() for name, part in here.items()})
            here = world()
            if stop:
                # Some wrappers make the optimizer allocate its state before they load it.
                for param in here["model"].parameters():
                    param.grad = torch.zeros_like(param)
                here["optimizer"].step()
                here["optimizer"].zero_grad()
            for name, part in here.items():
                part.load_state_dict(state[name])
        inputs = torch.full((2, 3), math.inf if number % 5 == 4 else 0.1 * number)
        scaler, model = here["scaler"], here["model"]
        scaler.backward(model(torch.nan_to_num(inputs)).square().mean())
        if not torch.isfinite(inputs).all():
            next(model.parameters()).grad.fill_(math.inf)
        scaler.apply(here["optimizer"])
    here["scaler"].flush()
    return plain([part.state_dict() for part in here.values()])


def plain(value: Any) -> Any:
    """`value` with its tensors as lists, so that == compares every bit."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("stop", [0, 1, 7, 12])
def test_07_a_resumed_run_is_the_same_run(stop: int, tmp_path: Any) -> None:
    def save(state: dict[str, Any]) -> dict[str, Any]:
        state["scaler"] = json.loads(json.dumps(state["scaler"]))
        torch.save(state, tmp_path / "checkpoint.pt")
        return torch.load(tmp_path / "checkpoint.pt", weights_only=True)

    assert trained(stop, 15, save) == trained(99, 15, save)
    assert trained(stop, 15, save) != trained(stop, 14, save)  # else this shows nothing


def test_11_a_diagnosis_tells_a_bad_forward_pass_from_an_overflow_and_names_the_parameter() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor, forward: float, backward: float) -> Tensor:
            hidden = self.first(x) * forward
            hidden.register_hook(lambda grad: grad * backward)
            return self.second(hidden).sum()

    def outcome(forward: float, backward: float) -> Any:
        model, scaler = Net(), GradScaler("cpu", init_scale=16.0)
        scaler.name(model)
        scaler.backward(model(torch.ones(1, 2), forward, backward))
        return scaler.apply(SGD(model.parameters(), lr=0.1))

    assert outcome(1.0, 1.0).verdict() == "applied"
    assert outcome(math.nan, 1.0).verdict() == "loss not finite"
    overflow = outcome(1.0, 2.0**127)
    assert overflow.verdict() == "scale too high"
    assert {bad.name for bad in overflow.culprits()} == {"first.weight", "first.bias"}
    never = outcome(1.0, math.nan)
    assert never.verdict() == "NaN at any scale"
    assert [(bad.name, bad.infs, bad.nans) for bad in never.culprits()] == [
        ("first.weight", 0, 4),
        ("first.bias", 0, 2),
    ]


@pytest.mark.parametrize("bad", [None, 9])
def test_13_accumulation_in_1_4_or_16_parts_gives_the_same(bad: int | None) -> None:
    def run(parts: int) -> tuple[list[float], float, bool]:
        torch.manual_seed(0)
        inputs = torch.randint(-8, 8, (16, 4)).float()  # whole numbers: sums are exact
        if bad is not None:
            inputs[bad, 1] = 2.0**124
        scaler, w = GradScaler("cpu", init_scale=2.0**10), parameter(*[1.0] * 4)
        optimizer = SGD([w], lr=2.0**-6)
        applied = []
        for _ in range(3):
            for micro in inputs.chunk(parts):
                scaler.backward((w * micro).sum() / 16)
            applied.append(bool(scaler.apply(optimizer, clip_norm=2.0**40).applied))
        return w.tolist(), scaler.get_scale(), all(applied)

    assert run(1) == run(4) == run(16)
    assert run(1)[2] is (bad is None)
