"""Optimizers whose eps is 0 in float16, on float16 parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from gradscale.errors import SettingError
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.optim import AdamW

CALLS: dict[str, Callable[[GradScaler, Any], Any]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "apply": lambda scaler, optimizer: scaler.apply(optimizer),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def half_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, dtype=torch.float16))


def backward(scaler: GradScaler, param: nn.Parameter) -> None:
    scaler.scale((param.float() * 2.0**-10).sum()).backward()


@every_call
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad])
def test_eps_that_is_zero_in_float16_is_refused(kind: Any, call: Any) -> None:
    param = half_parameter()
    optimizer = kind([param], lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    backward(scaler, param)
    name = kind.__name__
    message = rf"eps=1e-.* of {name} is 0 in float16.*MixedPrecision.*gradscale\.torch\.optim"
    for _ in range(2):
        with pytest.raises(SettingError, match=message):
            call(scaler, optimizer)
    assert torch.equal(param, torch.ones_like(param))


@every_call
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda params: optim.AdamW(params, eps=1e-4), torch.float16),
        (lambda params: optim.AdamW(params, eps=3e-8), torch.float16),  # rounds up to 2**-24
        (lambda params: optim.AdamW(params, eps=1e-8), torch.bfloat16),
        (lambda params: optim.AdamW(params, eps=1e-8), torch.float32),
        (lambda params: AdamW(params, eps=1e-8), torch.float16),
        (lambda params: optim.SGD(params, lr=0.1), torch.float16),
    ],
)
def test_others_are_not_refused(make: Any, dtype: torch.dtype, call: Any) -> None:
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    scaler = GradScaler("cpu", init_scale=2.0**8)
    backward(scaler, param)
    call(scaler, make([param]))


def test_a_parameter_that_is_cast_later_is_checked_again() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param])
    scaler = GradScaler("cpu", init_scale=2.0**8)
    backward(scaler, param)
    scaler.apply(optimizer)
    param.data = param.data.half()
    optimizer.state.clear()
    backward(scaler, param)
    with pytest.raises(SettingError, match="is 0 in float16"):
        scaler.apply(optimizer)


def test_with_masters_it_is_not_refused() -> None:
    model = nn.Linear(2, 2)
    mp = MixedPrecision(model, optim.AdamW(model.parameters()), "fp16-master")
    assert mp.run(lambda: model(torch.ones(1, 2)).sum()).applied
