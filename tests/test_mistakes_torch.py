"""Edge cases of torch.amp.GradScaler that are none of the mistakes: T5 to T13.

A part of test_mistakes.py, which explains the form and lists all tests by number.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from gradscale import SettingError
from gradscale.torch import GradScaler
from one_weight import HUGE, OURS, TORCH, Kind, Run, line, outcome


def one_of_two_optimizers_overflows(kind: Kind) -> tuple[float, float, float]:
    run, other = Run(kind), line()
    optimizer = SGD(other.parameters(), lr=1.0)
    run.backward(HUGE)
    run.scaler.scale(other(torch.ones(1)).sum()).backward()
    run.scaler.step(run.optimizer)
    run.scaler.step(optimizer)
    run.scaler.update()
    return run.weight, other.weight.item(), run.scaler.get_scale()


def test_optimizers_decide_alone_and_the_scale_falls_once() -> None:
    assert one_of_two_optimizers_overflows(TORCH) == (1.0, 0.0, 2.0**15)
    assert one_of_two_optimizers_overflows(OURS) == (1.0, 0.0, 2.0**15)


def weight_and_gradient_of_a_shared_parameter(kind: Kind) -> tuple[float, float]:
    """Two optimizers that both have the parameter take a step of 1 each."""
    run = Run(kind)
    other = SGD(run.model.parameters(), lr=1.0)
    run.backward(1.0)
    run.scaler.unscale_(run.optimizer)
    run.scaler.unscale_(other)
    run.scaler.step(run.optimizer)
    run.scaler.step(other)
    return run.weight, run.model.weight.grad.item()


def test_parameter_of_two_optimizers_is_unscaled_once() -> None:
    tiny = 2.0**-16
    assert weight_and_gradient_of_a_shared_parameter(TORCH) == (1.0 - 2 * tiny, tiny)
    assert weight_and_gradient_of_a_shared_parameter(OURS) == (-1.0, 1.0)


def nan_after_unscale(kind: Kind, fused: bool) -> tuple[float, float]:
    """The user divides the gradient by a norm that is 0; weight and scale."""
    run = Run(kind, **({"recheck": True} if kind is OURS else {}))
    run.optimizer = SGD(run.model.parameters(), lr=1.0, fused=fused)
    run.backward(0.0)
    run.scaler.unscale_(run.optimizer)
    run.model.weight.grad.div_(run.model.weight.grad.norm())
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return run.weight, run.scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_nan_made_after_unscale_is_not_applied(fused: bool) -> None:
    weight, scale = nan_after_unscale(TORCH, fused)
    assert math.isnan(weight)
    assert scale == 2.0**16
    assert nan_after_unscale(OURS, fused) == (1.0, 2.0**16)


def train_and_clear_after_applied_steps_only(kind: Kind) -> tuple[float, float]:
    """One overflow and four good samples; weight and scale."""
    run = Run(kind)
    for x in (HUGE, 1.0, 1.0, 1.0, 1.0):
        before = run.weight
        run.backward(x)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        if run.weight != before:
            run.optimizer.zero_grad()
    return run.weight, run.scaler.get_scale()


def test_forgotten_zero_grad_after_a_skip_does_no_harm() -> None:
    assert train_and_clear_after_applied_steps_only(TORCH) == (1.0, 2.0**11)
    assert train_and_clear_after_applied_steps_only(OURS) == (-3.0, 2.0**15)


def step_without_gradients(kind: Kind) -> tuple[Any, list[str]]:
    """An optimizer of a model that the loss does not depend on; what step() and warnings say."""
    run = Run(kind)
    run.backward(1.0)
    run.scaler.step(run.optimizer)
    idle = SGD(line().parameters(), lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = outcome(lambda: run.scaler.step(idle))
    run.scaler.update()
    return answer, [str(warning.message) for warning in caught]


def test_optimizer_without_gradients_steps_with_a_warning() -> None:
    assert step_without_gradients(TORCH) == (AssertionError, [])
    answer, warned = step_without_gradients(OURS)
    assert answer is None
    assert ["0 of the 1 parameters" in message for message in warned] == [True]


UNUSABLE = [
    *[("init_scale", value) for value in (-1.0, 0.0, math.nan, math.inf, 2.0**-130)],
    *[("growth_factor", value) for value in (math.nan, math.inf)],
    *[("backoff_factor", value) for value in (0.0, -1.0)],
    *[("growth_interval", value) for value in (0, -1, 1.5)],
]

ASSERTS_GROWTH = "assert growth_factor > 1.0" in inspect.getsource(TORCH)
"""Whether torch refuses a NaN, as older versions do: newer ones raise if the factor is <= 1."""


@pytest.mark.parametrize(("name", "value"), UNUSABLE)
def test_constructor_refuses_unusable_settings(name: str, value: float) -> None:
    if (name, str(value)) == ("growth_factor", "nan") and ASSERTS_GROWTH:
        assert outcome(lambda: TORCH("cpu", **{name: value})) is AssertionError
    else:
        TORCH("cpu", **{name: value})
    with pytest.raises(SettingError, match=f"{name} must be .*got {re.escape(str(value))}"):
        GradScaler("cpu", **{name: value})


def weights_and_state_of_fused_adamw(kind: Kind, *inputs: float) -> tuple[float, dict[str, float]]:
    run = Run(kind)
    run.optimizer = AdamW(run.model.parameters(), lr=0.1, fused=True)
    run.train(*inputs)
    state = run.optimizer.state[run.model.weight]
    return run.weight, {name: value.item() for name, value in state.items()}


def test_skipped_fused_step_leaves_no_trace() -> None:
    for kind in (TORCH, OURS):
        # Where the host knows of the skip, ours does not call the optimizer at all.
        state = {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0} if kind is TORCH else {}
        assert weights_and_state_of_fused_adamw(kind, HUGE) == (1.0, state)
        stepped = weights_and_state_of_fused_adamw(kind, 1.0, 2.0)
        assert weights_and_state_of_fused_adamw(kind, HUGE, 1.0, HUGE, 2.0, HUGE) == stepped
