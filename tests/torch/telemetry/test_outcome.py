from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from gradscale import CallOrderError, Static
from gradscale.torch import GradScaler, StepOutcome
from gradscale.torch.telemetry.names import Names

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def facts(outcome: StepOutcome) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(outcome) if field.name != "_values"]
    values = {name: getattr(outcome, name) for name in names}
    found = {name: value.item() for name, value in values.items() if isinstance(value, Tensor)}
    return {name: "NaN" if value != value else value for name, value in found.items()}


def step(scaler: GradScaler, spoil: str, fused: bool, device: str) -> Tensor:
    w = torch.ones(2, device=device, requires_grad=True)
    optimizer = SGD([w], lr=1.0, fused=fused)
    scaler.backward((w * (math.nan if spoil == "loss" else 1.0)).sum())
    if spoil in ("inf", "nan"):
        w.grad[1] = float(spoil)
    if spoil == "too large":
        w.grad[1] = 1e38
    if spoil == "edit":
        scaler.unscale_(optimizer)
        w.grad[1] = math.nan
    scaler.step(optimizer)
    outcome = scaler.outcome(optimizer)
    scaler.update()
    assert facts(scaler.outcome()) == facts(outcome)
    assert bool(outcome.applied) is (w.tolist() != [1.0, 1.0])
    return w


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("spoil", "false"),
    [
        ("nothing", set()),
        ("inf", {"applied", "finite"}),
        ("nan", {"applied", "finite"}),
        ("loss", {"applied", "finite", "loss_finite"}),
        ("too large", {"applied", "fits"}),
        ("edit", {"applied", "fits"}),
    ],
)
def test_an_outcome_says_whether_the_step_was_applied_and_why_not(
    device: str, fused: bool, spoil: str, false: set[str]
) -> None:
    scaler = GradScaler(device, init_scale=0.25, recheck=True)
    step(scaler, spoil, fused, device)
    found = facts(scaler.outcome())
    assert {name for name, value in found.items() if value is False} == false
    assert found["scale"] == 0.25


def test_skipped_steps_in_a_row_are_counted_anew_after_an_applied_one() -> None:
    scaler, w = GradScaler("cpu"), torch.zeros(1, requires_grad=True)
    optimizer, rows = SGD([w], lr=1.0), []
    for factor in (1.0, math.inf, math.inf, 1.0, math.inf):
        scaler.backward(w.sum())
        w.grad *= factor  # type: ignore[operator]
        rows.append(int(scaler.apply(optimizer).skipped_in_a_row))
    assert rows == [0, 1, 2, 0, 1]


def test_an_outcome_keeps_its_values_when_the_scaler_moves_on() -> None:
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    kept = []
    for spoil in ("nothing", "inf", "nothing", "loss"):
        step(scaler, spoil, False, "cpu")
        kept.append(scaler.outcome())
    assert [bool(outcome.applied) for outcome in kept] == [True, False, True, False]
    assert [float(outcome.scale) for outcome in kept] == [4.0, 8.0, 4.0, 8.0]


def test_each_optimizer_has_an_outcome_of_its_own_also_with_a_static_scale() -> None:
    scaler = GradScaler("cpu", policy=Static(init_scale=4.0))
    params = [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizers = [SGD([p], lr=1.0) for p in params]
    scaler.backward(params[0].sum() + params[1].sum())
    params[0].grad.fill_(math.inf)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [bool(scaler.outcome(optimizer).applied) for optimizer in optimizers] == [False, True]
    assert scaler.get_scale() == 4.0


def test_a_step_with_a_closure_or_without_gradients_has_an_outcome_too() -> None:
    scaler, w = GradScaler("cpu"), torch.ones(1, requires_grad=True)
    optimizer = SGD([w], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        scaler.backward(w.sum())
        return w.sum()

    scaler.step(optimizer, closure)
    scaler.update()
    assert bool(scaler.outcome(optimizer).applied)
    scaler.scale(w.sum())
    with pytest.warns(UserWarning, match="0 of the 1"):
        scaler.step(SGD([torch.ones(1)], lr=1.0))
    assert not bool(scaler.outcome().applied)


def test_an_outcome_before_the_first_step_is_an_error() -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(CallOrderError, match="step"):
        scaler.outcome()
    with pytest.raises(CallOrderError, match="step"):
        scaler.outcome(SGD([torch.ones(1)], lr=1.0))


def test_a_master_in_the_groups_goes_by_the_name_of_its_weight() -> None:
    model, names = torch.nn.Linear(2, 1), Names()
    names.take(model)
    master = torch.ones(1, 2)
    optimizer = SGD([master, model.bias], lr=1.0)
    names.aliases = {id(master): model.weight}
    assert list(names.of([optimizer]).values()) == ["weight", "bias"]
    names.aliases = {}
    assert list(names.of([optimizer]).values()) == ["group 0, parameter 0, shape (1, 2)", "bias"]
