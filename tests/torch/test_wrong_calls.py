"""Calls that are wrong in a common way: the error names the value and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradscale as gs
from gradscale import CallOrderError, SettingError, StateError
from gradscale.torch import GradScaler, Inspector, MixedPrecision, examine


def run() -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    model = nn.Sequential(nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1.0), GradScaler("cpu", init_scale=4.0)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(1, 2)).sum()
    return loss


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("headroom", "got 'headroom'. Use policy='headroom'."),
        (gs.Headroom(margin=3), "got Headroom(margin=3). Use policy=Headroom(margin=3)."),
        (2.0**12, "got 4096.0. Use init_scale=4096.0."),
    ],
)
def test_another_argument_in_the_place_of_the_device(device: Any, hint: str) -> None:
    with pytest.raises(SettingError, match=f"^device, the first argument, .*{re.escape(hint)}$"):
        GradScaler(device)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (1.5, "float. Pass the loss itself, not loss.item()."),
        (None, "NoneType."),
        ("loss", "str."),
        ({"loss": torch.ones(())}, "dict."),
        ([1.5], "float."),
    ],
)
def test_what_is_no_loss(loss: Any, got: str) -> None:
    message = f"backward() takes a tensor or an iterable of tensors, got {got}"
    for kwargs in ({}, {"loss_id": 1}):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            GradScaler("cpu").backward(loss, **kwargs)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, optimizer, scaler, loss: scaler.apply(optimizer, closure=loss),
        lambda model, optimizer, scaler, loss: scaler.calibrate(loss, optimizer),
        lambda model, optimizer, scaler, loss: MixedPrecision(model, optimizer).run(loss),
        lambda model, optimizer, scaler, loss: MixedPrecision(model, optimizer).calibrate(loss),
        lambda model, optimizer, scaler, loss: Inspector(model, scaler).replay(loss),
        lambda model, optimizer, scaler, loss: examine(model, loss),
    ],
    ids=["apply", "calibrate", "run", "mp.calibrate", "replay", "examine"],
)
def test_a_loss_in_the_place_of_a_closure(call: Callable[..., Any]) -> None:
    model, optimizer, scaler = run()
    with pytest.raises(SettingError, match=r"^closure must be a function .*, got Tensor\.$"):
        call(model, optimizer, scaler, loss_of(model))
    scaler.backward(loss_of(model))
    assert scaler.apply(optimizer).applied


def test_a_callback_that_cannot_be_called() -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(SettingError, match=r"^callback must be a function .*, got NoneType\.$"):
        scaler.on("skip", None)  # type: ignore[arg-type]


def test_a_model_in_the_place_of_the_optimizer() -> None:
    model, optimizer, _ = run()
    message = r"got Sequential\. Pass the optimizer of this model\.$"
    with pytest.raises(SettingError, match=message):
        MixedPrecision(optimizer, model)  # type: ignore[arg-type]


def test_what_is_no_model() -> None:
    model, optimizer, scaler = run()
    with pytest.raises(SettingError, match=r"^name\(\) takes the model, .*, got generator\.$"):
        scaler.name(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"one or more models, .*, got generator\.$"):
        MixedPrecision([model.parameters()], optimizer)  # type: ignore[list-item]
    with pytest.raises(SettingError, match=r"one or more models, .*, got none\.$"):
        MixedPrecision([], optimizer)


def test_a_scheduler_that_was_stepped_instead_of_passed() -> None:
    model, optimizer, scaler = run()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(SettingError, match=r"got NoneType\. Pass the object itself\.$"):
        scaler.follow(scheduler, None)
    scaler.backward(loss_of(model))
    scaler.apply(optimizer)
    scaler.flush()
    assert scheduler.last_epoch == 0  # nothing is followed after an error


def test_an_update_after_apply() -> None:
    model, optimizer, scaler = run()
    scaler.backward(loss_of(model))
    scaler.apply(optimizer)
    with pytest.raises(CallOrderError, match=r"apply\(\) updates by itself: after it, leave"):
        scaler.update()


def test_gradients_of_another_scaler() -> None:
    model, optimizer, scaler = run()
    scaler.backward(loss_of(model))
    scaler.apply(optimizer)
    GradScaler("cpu").backward(loss_of(model))
    with pytest.raises(CallOrderError, match="no loss was scaled for them by this scaler"):
        scaler.apply(optimizer)


def test_the_state_of_a_policy_of_ones_own() -> None:
    class Own(gs.Dynamic):
        """Torch's rule."""

    saved = GradScaler("cpu", policy=Own(init_scale=8.0)).state_dict()
    with pytest.raises(StateError, match=r"got 'Own'\. .* pass settings=False\.$"):
        GradScaler("cpu").load_state_dict(saved)
    scaler = GradScaler("cpu", policy=Own())
    scaler.load_state_dict(saved, settings=False)
    assert scaler.get_scale() == 8.0
