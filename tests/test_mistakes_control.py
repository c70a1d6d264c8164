"""Mistakes that other systems made in their control logic, 11 to 18.

A part of test_mistakes.py, which explains the form and lists all tests by number.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gradscale import Dynamic, GradStats, Off, Static
from gradscale.torch import GradScaler
from one_weight import HUGE, OURS, TORCH, Kind, Run, root, step_by_closure


def scales_with_a_counter_beyond_the_interval(kind: Kind, load: bool) -> list[float]:
    """Five finite steps at interval 100, then ten at interval 4, set or loaded."""
    run = Run(kind, init_scale=1.0, growth_interval=100)
    run.train(*[1.0] * 5)
    if load:
        run.scaler.load_state_dict({**run.scaler.state_dict(), "growth_interval": 4})
    else:
        run.scaler.set_growth_interval(4)
    return run.train(*[1.0] * 10)


@pytest.mark.parametrize("load", [False, True])
def test_counter_beyond_the_interval_still_grows_the_scale(load: bool) -> None:
    assert scales_with_a_counter_beyond_the_interval(TORCH, load) == [1.0] * 10
    grown = [*[2.0] * 4, *[4.0] * 4, *[8.0] * 2]
    assert scales_with_a_counter_beyond_the_interval(OURS, load) == grown


def test_hysteresis_counts_consecutive_overflows() -> None:
    # Megatron documents that and counts all since the last growth; so do DeepSpeed and ColossalAI.
    run = Run(OURS, hysteresis=2)
    assert run.train(*[HUGE, 1.0] * 5) == [2.0**16] * 10
    assert run.train(HUGE, HUGE, HUGE) == [2.0**16, 2.0**15, 2.0**14]
    assert run.train(1.0, HUGE, HUGE) == [2.0**14, 2.0**14, 2.0**13]


def step_plainly(run: Run, x: float) -> None:
    run.scaler.scale(run.loss(x)).backward()
    run.scaler.step(run.optimizer)


def step_unscaled(run: Run, x: float) -> None:
    run.scaler.backward(run.loss(x))
    run.scaler.unscale_(run.optimizer)
    run.scaler.step(run.optimizer)


def step_clipped(run: Run, x: float) -> None:
    run.scaler.backward(run.loss(x))
    run.scaler.clip_grad_norm_(run.optimizer, 1e9)
    run.scaler.step(run.optimizer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("step", [step_plainly, step_unscaled, step_clipped, step_by_closure])
def test_every_way_to_step_follows_the_same_rule(
    step: Callable[[Run, float], None], fused: bool
) -> None:
    # DeepSpeed's two optimizers, Paddle's two kernels and MindSpore's three classes disagree.
    dice = random.Random(0)
    policy = Dynamic(init_scale=2.0**30, growth_interval=3, hysteresis=2)
    run, state, weight = Run(OURS, 0.0, fused, policy=policy), policy.init(), 0.0
    scales = set()
    for x in dice.choices([0.5, 1.0, 2.0, HUGE], k=100):
        run.optimizer.zero_grad()
        step(run, x)
        run.scaler.update()
        state = policy.update(state, GradStats(finite=x < HUGE))
        weight -= x if x < HUGE else 0.0
        assert (run.scaler.get_scale(), run.weight) == (state.scale, weight)
        scales.add(state.scale)
    assert len(scales) > 3


def reloaded(scaler: GradScaler) -> GradScaler:
    """A scaler of other settings that has loaded the checkpoint of `scaler`."""
    other = GradScaler("cpu", 2.0, 8.0, 0.125, 1, enabled=scaler.is_enabled(), hysteresis=3)
    other.load_state_dict(scaler.state_dict())
    return other


BASE = {"init_scale": 16.0, "growth_interval": 3}
SETTINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "none": (BASE, [16, 16, 32, 16, 8, 8, 8]),
    "init_scale": (BASE | {"init_scale": 64}, [64, 64, 128, 64, 32, 32, 32]),
    "growth_factor": (BASE | {"growth_factor": 4}, [16, 16, 64, 32, 16, 16, 16]),
    "backoff_factor": (BASE | {"backoff_factor": 0.25}, [16, 16, 32, 8, 2, 2, 2]),
    "growth_interval": (BASE | {"growth_interval": 2}, [16, 32, 32, 16, 8, 8, 16]),
    "enabled": (BASE | {"enabled": False}, [1, 1, 1, 1, 1, 1, 1]),
    "policy": ({"policy": Static(init_scale=4)}, [4, 4, 4, 4, 4, 4, 4]),
    "min_scale": (BASE | {"min_scale": 16}, [16, 16, 32, 16, 16, 16, 16]),
    "max_scale": (BASE | {"max_scale": 16}, [16, 16, 16, 8, 4, 4, 4]),
    "hysteresis": (BASE | {"hysteresis": 2}, [16, 16, 32, 32, 16, 16, 16]),
}
# Of these the tests of outcomes and events show an effect.
TELLING = {"format", "groups", "on_drift", "on_stuck", "recheck", "stuck_after", "underflow_every"}


def test_every_setting_has_an_effect_and_survives_copying() -> None:
    # Dead are apex' scale_factor and DeepSpeed's hysteresis; a copy in jmp loses min_loss_scale.
    settings = set(inspect.signature(GradScaler.__init__).parameters) - {"self", "device"}
    assert settings | {"none"} == set(SETTINGS) | TELLING
    copies = [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), reloaded]
    for name, (given, scales) in SETTINGS.items():
        for duplicate in copies:
            run = Run(OURS, **given)
            run.optimizer.param_groups[0]["lr"] = 0.0
            run.scaler = duplicate(run.scaler)
            assert (name, run.train(*[0.0] * 3, *[2.0**126] * 2, *[0.0] * 2)) == (name, scales)


def test_scale_grows_on_the_step_that_completes_the_interval() -> None:
    # Flax and DeepSpeed grow one step later.
    assert Run(OURS, growth_interval=3).train(*[1.0] * 4) == [2.0**16, 2.0**16, 2.0**17, 2.0**17]


def test_floor_does_not_end_the_run() -> None:
    # DeepSpeed raises an Exception there, fairseq a FloatingPointError.
    run = Run(OURS, weight=0.0, init_scale=4.0, min_scale=1.0, growth_interval=2)
    assert run.train(*[1.0] * 60, loss=root)[-58:] == [1.0] * 58
    nn.init.constant_(run.model.weight, 3.0)
    assert run.train(1.0, 1.0) == [1.0, 2.0]
    assert run.weight == 1.0


@pytest.mark.parametrize("loss", [root, lambda outputs: outputs.sum() * math.nan])
@pytest.mark.parametrize("fused", [False, True])
def test_nonfinite_gradients_are_never_accepted(
    fused: bool, loss: Callable[[Tensor], Tensor]
) -> None:
    # optax' apply_if_finite lets the NaN through after max_consecutive_errors of them.
    for policy in (Dynamic(), Static(init_scale=1.0), Off()):
        run = Run(OURS, weight=0.0, fused=fused, policy=policy)
        run.train(*[1.0] * 100, loss=loss)
        assert run.weight == 0.0


def skipped_steps_of_a_float16_model(**settings: Any) -> int:
    """Of 20 steps of a small classifier under float16 autocast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    scaler, optimizer = GradScaler("cpu", **settings), SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(32, 8), torch.randint(10, (32,))
    skipped = 0
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
        assert outputs.dtype is torch.float16
        scaler.scale(nn.functional.cross_entropy(outputs.float(), targets)).backward()
        before = model[0].weight.clone()
        scaler.step(optimizer)
        scaler.update()
        skipped += torch.equal(model[0].weight, before)
    return skipped


def test_defaults_waste_no_step_on_an_ordinary_float16_model() -> None:
    # Megatron, DeepSpeed and fp16_utils start at 2**32, MindSpore at 2**24.
    assert skipped_steps_of_a_float16_model(init_scale=2.0**32) > 10
    assert skipped_steps_of_a_float16_model() == 0
