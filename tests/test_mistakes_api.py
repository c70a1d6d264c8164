"""Mistakes that other systems made in their API, 29 to 40.

A part of test_mistakes.py, which explains the form and lists all tests by number.
"""

from __future__ import annotations

import inspect
import json
import math
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from gradscale import Dynamic, GradStats, SettingError, StateError
from one_weight import HUGE, OURS, TORCH, Kind, Run, line, outcome
from programs import run_python


def reported_by_step(kind: Kind) -> list[Any]:
    """What the calls of the loop return for an applied and for a skipped step."""
    run, reports = Run(kind), []
    for x in (1.0, HUGE):
        run.optimizer.zero_grad()
        run.backward(x)
        reports.append((run.scaler.step(run.optimizer), run.scaler.update()))
    return reports


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
places = [
    torch, torch.Tensor, torch.amp, torch.amp.GradScaler, torch.autograd, torch.autograd.grad_mode,
    torch.nn.functional, torch.nn.utils, torch.nn.Module, torch.optim.Optimizer, SGD, lr_scheduler,
    optimizer,
]
before = [dict(vars(place)) for place in places]

from gradscale.torch import GradScaler

scaler = GradScaler("cpu")
for x in (1.0, 2.0**120):
    scaler.scale(model(torch.tensor([x])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
for place, old in zip(places, before):
    print(*(name for name in old if vars(place).get(name) is not old[name]))
print(*set(vars(optimizer)) - set(before[-1]))
"""


def test_nothing_of_torch_or_the_optimizer_is_patched() -> None:
    # apex replaces functions of torch and optimizer.step, accelerate optimizer.step.
    done = run_python("-c", FIND_PATCHES, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def minimise(kind: Kind | None, by_keyword: bool, search: str | None) -> Any:
    """LBFGS on (w - 1.25)**2 + (w - 1)**4 from 1; without a scaler if `kind` is None."""
    model = line()
    optimizer = LBFGS(model.parameters(), max_iter=4, line_search_fn=search)
    scaler: Any = torch.amp.GradScaler("cpu", enabled=False) if kind is None else kind("cpu")

    def closure() -> Tensor:
        optimizer.zero_grad()
        weight = model(torch.ones(1))
        loss = ((weight - 1.25) ** 2 + (weight - 1) ** 4).sum()
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
    misses = []
    while id(optimizer := SGD.__new__(SGD)) != address and len(misses) < 1000:
        misses.append(optimizer)
    optimizer.__init__(other.parameters(), lr=1.0)
    run.scaler.step(optimizer)
    return other.weight.item()


def test_optimizer_is_not_known_by_its_address_alone() -> None:
    assert weight_of_a_wrapped_step(TORCH) == 1.0 - 2.0**-16
    assert weight_of_a_wrapped_step(OURS) == 0.0
    # The allocator need not give an address out again, so there are a few tries.
    assert 1.0 - 2.0**16 in [weight_of_a_recycled_optimizer(TORCH) for _ in range(5)]
    assert [weight_of_a_recycled_optimizer(OURS) for _ in range(5)] == [0.0] * 5


def update_after_each_optimizer(kind: Kind) -> tuple[float, float, float]:
    """One backward pass for two models, stepped as accelerate does; their weights and the scale."""
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


def test_all_gradient_dtypes_work_alike() -> None:
    assert weight_of_dtype(TORCH, torch.float16, fused=False) is ValueError
    assert weight_of_dtype(TORCH, torch.float16, fused=True) == 0.0
    missing = outcome(torch.ones(1, dtype=torch.complex64).erf)  # in torch 2.4 a RuntimeError
    assert weight_of_dtype(TORCH, torch.complex64, fused=False) is missing
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for fused in (False, True):
            assert (dtype, weight_of_dtype(OURS, dtype, fused)) == (dtype, 0.0)
    assert weight_of_dtype(OURS, torch.complex64, fused=False) == -1j


@pytest.mark.gpu
def test_bfloat16_gradients_work_on_the_gpu() -> None:
    assert weight_of_dtype(TORCH, torch.bfloat16, fused=False, device="cuda") is NotImplementedError
    assert weight_of_dtype(OURS, torch.bfloat16, fused=False, device="cuda") == 0.0


def overflow_without_cuda(kind: Kind) -> tuple[bool, float]:
    """The default scaler, whose device is "cuda", where there is none."""
    run = Run(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is disabling itself
        run.scaler = kind()
    run.train(HUGE)
    return run.scaler.is_enabled(), run.weight


def test_scaler_never_disables_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Paddle turns itself off for bfloat16.
    common = torch.cuda.amp.common
    monkeypatch.setattr(common, "amp_definitely_not_available", lambda: True)
    assert overflow_without_cuda(TORCH) == (False, -HUGE)
    assert overflow_without_cuda(OURS) == (True, 1.0)


def test_norm_of_a_skipped_step_is_no_number() -> None:
    # apex and DeepSpeed return -1, which a logger averages.
    for x in (HUGE, math.inf, math.nan):
        run = Run(OURS)
        run.backward(x)
        assert math.isnan(run.scaler.clip_grad_norm_(run.optimizer, 1.0).item())
        run.scaler.step(run.optimizer)
        assert run.weight == 1.0


def test_library_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    # apex and Paddle print at every decrease of the scale.
    run = Run(OURS, init_scale=2.0, min_scale=1.0, growth_interval=2)
    assert run.train(1.0, 1.0, *[2.0**127] * 3) == [2.0, 4.0, 2.0, 1.0, 1.0]
    run.scaler.load_state_dict(run.scaler.state_dict())
    run.scaler.update(2)
    assert set_nonsense(OURS) == [SettingError] * len(NONSENSE)
    assert minimise(OURS, True, None) == minimise(None, False, None)
    assert capfd.readouterr() == ("", "")


def rule_of_the_docstring() -> Callable[[dict[str, Any]], None]:
    """The pseudo-code in the docstring of `Dynamic`, as a program on the names it uses."""
    doc = inspect.getdoc(Dynamic) or ""  # Python 3.13 takes the indentation out of `__doc__` itself
    block = re.search(r"^    if not loss_finite:\n(?:(?: {4}.*)?\n)+", doc, re.MULTILINE)
    assert block
    lines = [line[4:] for line in block[0].replace("nothing changes", "pass").splitlines()]
    code = compile("\n".join(lines), "Dynamic.__doc__", "exec")
    return lambda names: exec(code, {}, names)


def test_documented_rule_is_the_rule() -> None:
    # Graphcore's header has the direction backwards, Megatron's text another hysteresis.
    rule, dice = rule_of_the_docstring(), random.Random(0)
    settings = {"growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 3, "hysteresis": 2}
    settings |= {"min_scale": 0.25, "max_scale": 2.0**10}
    policy = Dynamic(init_scale=16.0, **settings)
    state, met = policy.init(), set()
    names = {**settings, **state._asdict()}
    for _ in range(2000):
        names["finite"], names["loss_finite"] = dice.random() < 0.6, dice.random() < 0.9
        rule(names)
        state = policy.update(state, GradStats(names["finite"], loss_finite=names["loss_finite"]))
        assert state._asdict() == {field: names[field] for field in state._fields}
        met.add(state.scale)
    assert {policy.min_scale, policy.max_scale} <= met


def test_documented_defaults_are_the_defaults() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "differences.md"
    told = dict(re.findall(r"`(m\w+_scale)` \((2\^-?\d+)\)", page.read_text(encoding="utf-8")))
    default = Dynamic()
    assert {name: 2.0 ** int(power[2:]) for name, power in told.items()} == {
        "min_scale": default.min_scale,
        "max_scale": default.max_scale,
    }
