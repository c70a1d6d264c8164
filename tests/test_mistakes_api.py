"""Mistakes that other systems made in their API, 29 to 40, and edge cases of torch's scaler.

The second half of test_mistakes.py, which explains the form and lists all tests by number.
"""

from __future__ import annotations

import gc
import json
import math
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from gradscale import Dynamic, GradStats, SettingError, StateError
from gradscale.torch import GradScaler

TORCH, OURS = torch.amp.GradScaler, GradScaler
Kind = type[torch.amp.GradScaler]
HUGE = 2.0**120
"""A gradient that overflows float32 at any scale from 2**8 on."""


class Run:
    """Gradient descent with rate 1 on y = weight * x, where the gradient is x; and its scaler."""

    def __init__(self, kind: Kind, **settings: Any):
        self.scaler: Any = kind("cpu", **settings)
        self.model = line()
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=1.0)

    def backward(self, x: float) -> None:
        self.scaler.scale(self.model(torch.tensor([x])).sum()).backward()

    def train(self, *inputs: float) -> list[float]:
        """torch's loop; the scale after every step."""
        scales = []
        for x in inputs:
            self.optimizer.zero_grad()
            self.backward(x)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales

    @property
    def weight(self) -> float:
        return self.model.weight.item()


def line() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returned, or the type of what it raised."""
    try:
        return call()
    except Exception as error:
        return type(error)


# Mistakes of the API.


def reported_by_step(kind: Kind) -> list[Any]:
    """What the calls of the loop return for an applied and for a skipped step."""
    run, reports = Run(kind), []
    for x in (1.0, HUGE):
        run.optimizer.zero_grad()
        run.backward(x)
        reports.append((run.scaler.step(run.optimizer), run.scaler.update()))
    return reports


@pytest.mark.xfail(raises=AttributeError, strict=True, reason="outcome() comes with issue 3")
def test_skip_is_reported() -> None:
    applied, skipped = reported_by_step(TORCH)
    assert applied == skipped == (None, None)
    run = Run(OURS)
    run.train(1.0)
    assert bool(run.scaler.outcome(run.optimizer).applied)
    run.train(HUGE)
    assert not bool(run.scaler.outcome(run.optimizer).applied)


FIND_PATCHES = """
import torch
from torch.optim import SGD, lr_scheduler

model = torch.nn.Linear(1, 1)
optimizer = SGD(model.parameters(), lr=1.0)
places = [torch, torch.Tensor, torch.amp, torch.amp.GradScaler, torch.autograd, torch.autograd.grad_mode,
    torch.nn.functional, torch.nn.utils, torch.nn.Module, torch.optim.Optimizer, SGD, lr_scheduler, optimizer]
before = [dict(vars(place)) for place in places]

from gradscale.torch import GradScaler

scaler = GradScaler("cpu")
for x in (1.0, 2.0**120):
    scaler.scale(model(torch.tensor([x])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.clip_grad_norm_
    optimizer.zero_grad()
for place, old in zip(places, before):
    print(*(name for name in old if vars(place).get(name) is not old[name]))
print(*set(vars(optimizer)) - set(before[-1]))
"""


def test_nothing_of_torch_or_the_optimizer_is_patched() -> None:
    # apex replaces functions of torch and optimizer.step, accelerate optimizer.step.
    command = [sys.executable, "-W", "ignore", "-c", FIND_PATCHES]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def minimise(kind: Kind | None, by_keyword: bool, search: str | None) -> Any:
    """LBFGS on (w - 3)**2 + w**4 from 1; without a scaler if `kind` is None."""
    model = line()
    optimizer = LBFGS(model.parameters(), max_iter=4, line_search_fn=search)
    scaler: Any = torch.amp.GradScaler("cpu", enabled=False) if kind is None else kind("cpu")

    def closure() -> Tensor:
        optimizer.zero_grad()
        weight = model(torch.ones(1))
        loss = ((weight - 3) ** 2 + weight**4).sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    given = {"closure": closure} if by_keyword else {}
    first_loss = outcome(lambda: scaler.step(optimizer, *([] if given else [closure]), **given))
    return first_loss if isinstance(first_loss, type) else (first_loss.item(), model.weight.item())


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_closure_is_right_by_position_and_by_keyword(search: str | None) -> None:
    right = minimise(None, False, search)
    assert minimise(TORCH, True, search) is RuntimeError
    assert minimise(TORCH, False, search) not in (RuntimeError, right)
    assert minimise(OURS, True, search) == minimise(OURS, False, search) == right


class Wrapper(Optimizer):
    """An optimizer that hands everything on to another one, like accelerate's."""

    def __init__(self, inner: Optimizer):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def weight_of_a_wrapped_step(kind: Kind) -> float:
    """unscale_() is given the optimizer and step() a wrapper of it."""
    run = Run(kind)
    run.backward(1.0)
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(Wrapper(run.optimizer))
    return run.weight


def weight_of_a_recycled_optimizer(kind: Kind) -> float:
    """A new optimizer gets the address of one that was unscaled and is gone."""
    run, other = Run(kind), line()
    run.backward(1.0)
    run.scaler.scale(other(torch.ones(1)).sum()).backward()
    run.scaler.unscale_(run.optimizer)
    address = id(run.optimizer)
    del run.optimizer
    gc.collect()
    misses = []
    while id(optimizer := SGD.__new__(SGD)) != address and len(misses) < 1000:
        misses.append(optimizer)
    optimizer.__init__(other.parameters(), lr=1.0)
    run.scaler.step(optimizer)
    return other.weight.item()


def test_optimizer_is_not_known_by_its_address_alone() -> None:
    assert weight_of_a_wrapped_step(TORCH) == 1.0 - 2.0**-16
    assert weight_of_a_wrapped_step(OURS) == 0.0
    assert weight_of_a_recycled_optimizer(TORCH) == 1.0 - 2.0**16
    assert weight_of_a_recycled_optimizer(OURS) == 0.0


def update_after_each_optimizer(kind: Kind) -> tuple[float, float, float]:
    """One backward pass for two models, as accelerate and Lightning step them; weights and scale."""
    run, other = Run(kind, growth_interval=1), line()
    run.scaler.scale((run.model(torch.ones(1)) + other(torch.ones(1))).sum()).backward()
    for optimizer in (run.optimizer, SGD(other.parameters(), lr=1.0)):
        run.scaler.step(optimizer)
        run.scaler.update()
    return run.weight, other.weight.item(), run.scaler.get_scale()


def test_update_after_each_optimizer_moves_the_scale_once() -> None:
    assert update_after_each_optimizer(TORCH) == (0.0, 0.5, 2.0**18)
    assert update_after_each_optimizer(OURS) == (0.0, 0.0, 2.0**17)


NONSENSE = [
    *[("update", value) for value in (0.0, -1.0, math.nan, math.inf)],
    *[("set_growth_factor", value) for value in (1.0, 0.5, math.nan, math.inf)],
    *[("set_backoff_factor", value) for value in (1.0, 2.0, 0.0, -0.5, math.nan)],
    *[("set_growth_interval", value) for value in (0, -1, 1.5)],
]


def set_nonsense(kind: Kind) -> list[type | None]:
    """What every call says; the scaler must be as before if it was an error."""
    run, answers = Run(kind), []
    run.train(1.0)
    for setter, value in NONSENSE:
        before = run.scaler.state_dict()
        answers.append(outcome(lambda s=setter, v=value: getattr(run.scaler, s)(v)))
        assert answers[-1] is None or run.scaler.state_dict() == before
    return answers


def scale_after_update_to_an_int(kind: Kind) -> Any:
    run = Run(kind)
    run.train(1.0)
    return outcome(lambda: run.scaler.update(1024)) or run.scaler.get_scale()


def test_setters_take_any_number_and_refuse_nonsense() -> None:
    assert scale_after_update_to_an_int(TORCH) is AttributeError
    assert scale_after_update_to_an_int(OURS) == 1024.0
    assert set_nonsense(TORCH) == [None] * len(NONSENSE)
    assert set_nonsense(OURS) == [SettingError] * len(NONSENSE)


def interval_after_loading(kind: Kind, **how: Any) -> tuple[float, int]:
    """A checkpoint of a run with interval 2000 is loaded into a scaler with interval 10."""
    run = Run(kind, init_scale=4.0)
    run.train(1.0)
    scaler: Any = kind("cpu", growth_interval=10)
    scaler.load_state_dict(run.scaler.state_dict(), **how)
    return scaler.get_scale(), scaler.get_growth_interval()


def scale_after_loading_half_a_checkpoint(kind: Kind) -> tuple[type, float]:
    scaler = kind("cpu")
    half = {"scale": 4.0, "growth_factor": 2.0}
    return outcome(lambda: scaler.load_state_dict(half)), scaler.get_scale()


def test_checkpoint_keeps_new_settings_if_asked_and_is_never_half_loaded() -> None:
    assert interval_after_loading(TORCH) == (4.0, 2000)
    assert interval_after_loading(OURS, settings=False) == (4.0, 10)
    assert scale_after_loading_half_a_checkpoint(TORCH) == (KeyError, 4.0)
    assert scale_after_loading_half_a_checkpoint(OURS) == (StateError, 2.0**16)
    # ColossalAI, fairseq and Megatron save too little, DeepSpeed and apex pickled objects.
    run, resumed = Run(OURS, hysteresis=2, growth_interval=7, max_scale=2.0**20), Run(OURS)
    run.train(1.0, 1.0, HUGE)
    resumed.scaler.load_state_dict(json.loads(json.dumps(run.scaler.state_dict())))
    assert resumed.scaler.policy == run.scaler.policy
    rest = [HUGE, *[1.0] * 40]
    assert resumed.train(*rest) == run.train(*rest)
    assert run.scaler.get_scale() == 2.0**20


def weight_of_dtype(kind: Kind, dtype: torch.dtype, fused: bool, device: str = "cpu") -> Any:
    """One step from 1 with gradient 1, in `dtype`."""
    param = nn.Parameter(torch.ones(1, dtype=dtype, device=device))
    scaler, optimizer = kind(device, init_scale=2.0**10), SGD([param], lr=1.0, fused=fused)
    scaler.scale(torch.view_as_real(param) if dtype.is_complex else param.float()).sum().backward()
    return outcome(lambda: scaler.step(optimizer)) or param.item()
