from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, AdamW, Optimizer

from cpu_graph import keep_in_tensors
from gradscale import CallOrderError, SettingError
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.step.contract import as_optimizers, step_on_device, writes_back

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Capable(Optimizer):
    """A third-party optimizer of the contract that does not write unscaled gradients back."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[tuple[Any, float]] = []

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        scale = self.grad_scale
        self.seen.append((None if scale is None else float(scale), float(self.found_inf)))
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    step = p.grad if scale is None else p.grad / scale
                    p.sub_(torch.where(self.found_inf > 0, torch.zeros_like(step), step))
        return "stepped"


def parameter(value: float = 1.0, device: str = "cpu") -> Tensor:
    return torch.full((2,), value, device=device, requires_grad=True)


def test_optimizers_are_one_or_several() -> None:
    one, other = SGD([parameter()], lr=1.0), Capable([parameter()])
    assert as_optimizers(one, "here") == [one]
    for several in ([one, other], (one, other), (each for each in (one, other))):
        assert as_optimizers(several, "here") == [one, other]


@pytest.mark.parametrize(
    ("given", "name", "hint"),
    [
        ([], "none", ""),
        (None, "NoneType", ""),
        (torch.nn.Linear(1, 1), "Linear", " Pass the optimizer of this model."),
        (torch.ones(()), "Tensor", " Pass the loss to backward() first."),
        ([3.0], "float", ""),
    ],
)
def test_what_is_no_optimizer_is_refused_in_the_name_of_the_caller(
    given: Any, name: str, hint: str
) -> None:
    model = torch.nn.Linear(1, 1)
    scaler = GradScaler("cpu")
    mp = MixedPrecision(model, SGD(model.parameters(), lr=1.0))
    calls: dict[str, Any] = {
        "apply()": lambda: scaler.apply(given),
        "calibrate()": lambda: scaler.calibrate(lambda: model(torch.ones(1)).sum(), given),
        "MixedPrecision": lambda: MixedPrecision(model, given),
    }
    if given is not None:  # which means all of them there
        calls["step()"] = lambda: mp.step(given)
    for caller, call in calls.items():
        message = f"{caller}: optimizer must be an optimizer or several of them, got {name}.{hint}"
        with pytest.raises(SettingError, match=f"^{re.escape(message)}$"):
            call()


@pytest.mark.parametrize("device", DEVICES)
def test_the_optimizer_gets_scale_and_flag_and_is_left_as_it_was(device: str) -> None:
    scaler, w = GradScaler(device, init_scale=8.0), parameter(device=device)
    optimizer = Capable([w])
    scaler.backward(w.sum())
    assert scaler.step(optimizer) == "stepped"
    assert optimizer.seen == [(8.0, 0.0)]
    assert w.tolist() == [0.0, 0.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_unscaled_gradients_come_without_a_scale() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter()
    optimizer = Capable([w])
    scaler.backward(w.sum())
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.seen == [(None, 0.0)]


@pytest.mark.parametrize("kept", ["numbers", "tensors"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_flag_is_exactly_one_when_something_is_not_finite(bad: float, kept: str) -> None:
    """Where the host knows of a skip, the optimizer is not called at all."""
    scaler, w, v = GradScaler("cpu", init_scale=8.0), parameter(), parameter()
    if kept == "tensors":
        keep_in_tensors(scaler)
    optimizer = Capable([w, v])
    scaler.backward((w + v).sum())
    w.grad[0] = v.grad[1] = bad
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.seen == ([] if kept == "numbers" else [(8.0, 1.0)])
    assert w.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("bad", [False, True])
def test_the_flags_that_other_libraries_read_are_exactly_0_or_1(bad: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter()
    optimizer = Capable([w])
    scaler.backward(w.sum())
    if bad:
        w.grad[:] = math.inf
    scaler.unscale_(optimizer)
    states = scaler._per_optimizer_states[id(optimizer)]
    for flags in (scaler._found_inf_per_device(optimizer), states["found_inf_per_device"]):
        assert {device: flag.item() for device, flag in flags.items()} == {w.device: float(bad)}
        assert all(flag.dtype is torch.float32 for flag in flags.values())
    assert states["stage"].value == OptState.UNSCALED.value


def test_a_scale_of_the_users_own_is_divided_out_too_and_kept() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter()
    optimizer = Capable([w])
    optimizer.grad_scale = torch.tensor(2.0)
    scaler.backward((w * 2.0).sum())
    scaler.step(optimizer)
    assert optimizer.seen == [(16.0, 0.0)]
    assert float(optimizer.grad_scale) == 2.0


def test_the_attributes_are_put_back_when_the_step_raises() -> None:
    optimizer = AdamW([parameter()], fused=True)

    def fail() -> None:
        raise KeyError("inside step")

    optimizer.step = fail
    optimizer.grad_scale = "theirs"
    with pytest.raises(KeyError):
        step_on_device(optimizer, None, torch.tensor(False), (), {})
    assert optimizer.grad_scale == "theirs"
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    ],
    ids=str,
)
def test_fused_sgd_survives_a_skip_of_its_first_step(device: str, options: dict[str, Any]) -> None:
    results = []
    for skip_first in (False, True):
        scaler, w = GradScaler(device, init_scale=8.0), parameter(device=device)
        optimizer = SGD([w], lr=0.5, fused=True, **options)
        for iteration in range(3):
            if iteration == 0 and not skip_first:
                continue
            optimizer.zero_grad()
            scaler.backward((w * 3.0).sum())
            if iteration == 0:
                w.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        results.append((w.detach(), optimizer.state[w]["momentum_buffer"]))
    for clean, skipped in zip(*results, strict=True):
        assert torch.equal(clean, skipped)


def test_a_shared_gradient_of_an_optimizer_that_unscales_by_itself_asks_for_unscale() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter()
    first, second = Capable([w]), SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.step(first)
    with pytest.raises(CallOrderError, match="unscale_"):
        scaler.step(second)
    assert not writes_back(first)
    assert writes_back(second)


def test_a_shared_gradient_works_with_unscale_first() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter()
    first, second = Capable([w]), SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.unscale_(first)
    scaler.step(first)
    scaler.step(second)
    assert w.tolist() == [-1.0, -1.0]


class Older(Optimizer):
    """An optimizer of torch's older contract: it takes the scaler and asks it for everything."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        skipped = sum(flag.item() for flag in grad_scaler._check_inf_per_device(self).values())
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if not skipped:
                    p.sub_(p.grad / grad_scaler._get_scale_async())


@pytest.mark.parametrize("bad", [False, True])
def test_the_older_contract_still_works_with_a_warning(bad: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0), parameter()
    optimizer = Older([w])
    scaler.backward(w.sum())
    if bad:
        w.grad[0] = math.inf
    with pytest.warns(FutureWarning, match="grad_scaler"):
        scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == ([1.0, 1.0] if bad else [0.0, 0.0])
    assert scaler.get_scale() == (4.0 if bad else 8.0)
