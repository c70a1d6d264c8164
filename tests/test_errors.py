from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import gradscale
from gradscale.errors import CallOrderError, SettingError, StateError, StuckError

BASES = [
    (SettingError, {ValueError, AssertionError}),
    (CallOrderError, {RuntimeError, AssertionError}),
    (StateError, {ValueError, RuntimeError}),
    (StuckError, {RuntimeError}),
]


def torch_setting() -> None:
    torch.amp.GradScaler("cpu", growth_factor=1.0)


def torch_update_first() -> None:
    torch.amp.GradScaler("cpu").update()


def torch_step_twice() -> None:
    weight = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight * 2).backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


def torch_empty_state() -> None:
    torch.amp.GradScaler("cpu").load_state_dict({})


def test_bases_cover_every_error() -> None:
    defined = {v for v in vars(gradscale.errors).values() if isinstance(v, type)}
    assert {error for error, _ in BASES} == defined


@pytest.mark.parametrize(("error", "bases"), BASES, ids=lambda v: getattr(v, "__name__", ""))
def test_error_is_the_built_in_ones_and_no_other(
    error: type[Exception], bases: set[type[Exception]]
) -> None:
    assert set(error.__bases__) == bases
    for base in bases:
        with pytest.raises(base, match="what happened"):
            raise error("what happened")


@pytest.mark.parametrize("error", [error for error, _ in BASES], ids=lambda v: v.__name__)
def test_error_is_a_public_name(error: type[Exception]) -> None:
    assert getattr(gradscale, error.__name__) is error
    assert error.__name__ in gradscale.__all__


@pytest.mark.parametrize(
    ("ours", "mistake"),
    [
        (SettingError, torch_setting),
        (CallOrderError, torch_update_first),
        (CallOrderError, torch_step_twice),
        (StateError, torch_empty_state),
    ],
    ids=lambda v: v.__name__,
)
def test_code_that_catches_torchs_error_catches_ours(
    ours: type[Exception], mistake: Callable[[], None]
) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        mistake()
    assert issubclass(ours, caught.type)
