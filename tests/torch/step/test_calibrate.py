"""Calibration: the scale it finds, in how many passes, and that nothing else is left of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscale as gs
from gradscale.torch import GradScaler

HERE = "cuda" if torch.cuda.is_available() else "cpu"


class Task:
    """A loss whose gradients have a known size, in float16 on the way if asked for."""

    def __init__(self, size: float, half: bool = False) -> None:
        self.weight = torch.ones(8, device=HERE, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.size, self.half, self.passes = size, half, 0

    def __call__(self) -> Tensor:
        self.passes += 1
        x = self.weight.half() if self.half else self.weight
        return x.sum().float() * self.size


def good(task: Task, scale: float) -> bool:
    """Whether the largest gradient is where `Headroom` wants it, or a little below."""
    return 10 <= math.frexp(task.size * scale)[1] <= 14


@pytest.mark.parametrize("policy", [None, gs.Headroom(), gs.LogMax()])
@pytest.mark.parametrize("start", range(0, 41, 8))
@pytest.mark.parametrize("exponent", [-37, -20, -5, 3])
def test_the_scale_suits_the_gradients_in_a_handful_of_passes(
    policy: Any, start: int, exponent: int
) -> None:
    task = Task(2.0**exponent, half=True)  # float16: overflows, and vanishes below 2**-25
    settings = {"init_scale": 2.0**start}
    scaler = GradScaler(HERE, **settings) if policy is None else None
    if scaler is None:
        scaler = GradScaler(HERE, policy=type(policy)(**settings))
    scale = scaler.calibrate(task, task.optimizer)
    assert scaler.get_scale() == scale
    assert good(task, scale)
    assert task.passes <= 5


def test_the_comparison_notices_a_scale_that_is_off() -> None:
    assert good(Task(2.0**-5), 2.0**18)
    assert not good(Task(2.0**-5), 2.0**16 * 2.0**-3)
    assert not good(Task(2.0**-5), 2.0**21)


def test_scale_of_off_is_one_without_a_pass() -> None:
    task = Task(2.0**-30)
    scaler = GradScaler(HERE, policy=gs.Off())
    assert scaler.calibrate(task, task.optimizer) == scaler.get_scale() == 1.0
    assert task.passes == 0


def test_the_first_step_uses_it() -> None:
    task = Task(2.0**-30)
    scaler = GradScaler(HERE)
    scale = scaler.calibrate(task, task.optimizer)
    scaler.backward(task())
    outcome = scaler.apply(task.optimizer)
    assert bool(outcome.applied)
    assert float(outcome.scale) == scale


def test_an_open_window_gives_way() -> None:
    task = Task(2.0**-30)
    scaler = GradScaler(HERE)
    scaler.backward(task())
    scaler.apply(task.optimizer)
    scale = scaler.calibrate(task, task.optimizer)
    scaler.backward(task())
    assert float(scaler.apply(task.optimizer).scale) == scale


def test_what_headroom_has_learned_is_kept() -> None:
    task = Task(2.0**-30)
    scaler = GradScaler(HERE, policy=gs.Headroom())
    scaler.calibrate(task, task.optimizer)
    state = scaler.state_dict()["gradscale"]["state"]
    assert (state["seen"], state["last"]) == (1, -29)


def test_nothing_else_is_left_of_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(HERE)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 4, device=HERE)
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads if g is not None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seeds = torch.get_rng_state(), torch.cuda.get_rng_state() if HERE == "cuda" else None
    drawn = []

    def closure() -> Tensor:
        out = model(x)
        drawn.append(out.detach())
        return out.square().sum()

    GradScaler(HERE).calibrate(closure, [optimizer], model)
    assert len(drawn) >= 2
    assert all(torch.equal(drawn[0], other) for other in drawn)  # the same dropout every time
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(g, c) for g, c in zip(grads, copies, strict=True))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert torch.equal(seeds[0], torch.get_rng_state())
    assert seeds[1] is None or torch.equal(seeds[1], torch.cuda.get_rng_state())


def test_a_loss_that_is_not_finite_is_nobodys_fault() -> None:
    task = Task(math.nan)
    scaler = GradScaler(HERE)
    with pytest.raises(gs.StuckError, match="a loss of nan"):
        scaler.calibrate(task, task.optimizer)
    assert scaler.get_scale() == 2.0**16


def test_gradients_that_are_never_finite_are_told_of() -> None:
    w = torch.zeros(3, device=HERE, requires_grad=True)
    scaler = GradScaler(HERE)
    with pytest.raises(gs.StuckError, match="found no scale"):
        scaler.calibrate(lambda: w.sqrt().sum(), torch.optim.SGD([w], lr=0.1))
    assert w.grad is None
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize(
    ("closure", "complaint"),
    [
        (lambda w: 3.0, "closure must return the loss"),
        (lambda w: w.sum().detach(), "closure must return the loss"),
        (
            lambda w: torch.ones((), device=HERE, requires_grad=True) * 2,
            "does not depend on any parameter",
        ),
    ],
)
def test_what_is_no_closure_is_refused(closure: Any, complaint: str) -> None:
    w = torch.ones(3, device=HERE, requires_grad=True)
    with pytest.raises(gs.SettingError, match=complaint):
        GradScaler(HERE).calibrate(lambda: closure(w), torch.optim.SGD([w], lr=0.1))


def test_it_belongs_between_iterations() -> None:
    task = Task(1.0)
    scaler = GradScaler(HERE)
    scaler.scale(task()).backward()
    scaler.unscale_(task.optimizer)
    with pytest.raises(gs.CallOrderError, match="in the middle of an iteration"):
        scaler.calibrate(task, task.optimizer)


def test_a_disabled_scaler_needs_none() -> None:
    task = Task(1.0)
    assert GradScaler(HERE, enabled=False).calibrate(task, task.optimizer) == 1.0
    assert task.passes == 0
