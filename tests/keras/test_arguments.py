"""The arguments of the constructor: Keras' own, with its errors, and ours."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import gradscale as gs
from gradscale.keras import LossScaleOptimizer
from keras_steps import scale_of

# Keras 3.15's own conversion meets a deprecation of NumPy's.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WRONG: list[dict[str, Any]] = [
    {"dynamic": False},
    {"foo": True, "bar": 3},
    {"clipnorm": 0.5},
    {"use_ema": True},
    {"gradient_accumulation_steps": 2},
    {"loss_scale_factor": 0.5},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ", ".join(wrong))
def test_errors_are_those_of_keras(wrong: dict[str, Any]) -> None:
    errors = []
    for kind in (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer):
        with pytest.raises(ValueError, match="LossScaleOptimizer") as caught:
            kind(keras.optimizers.SGD(0.1), **wrong)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_defaults_are_those_of_keras() -> None:
    kinds = (keras.optimizers.LossScaleOptimizer, LossScaleOptimizer)
    theirs, ours = (kind(keras.optimizers.SGD(0.1)) for kind in kinds)
    for name in ("initial_scale", "dynamic_growth_steps"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.policy == gs.Dynamic(init_scale=2.0**15, exact=False)
    assert isinstance(ours, keras.optimizers.LossScaleOptimizer)
    ours.learning_rate = 0.25
    assert float(ours.inner_optimizer.learning_rate) == 0.25


def test_scale_is_there_before_the_first_step() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), 3.0)
    assert scale_of(optimizer) == 3.0
    assert float(optimizer.scale_loss(2.0)) == 6.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"initial_scale": 0.0}, "initial_scale must be finite, > 0"),
        ({"dynamic_growth_steps": 0}, "dynamic_growth_steps must be a whole number"),
        ({"clip_norm": -1.0}, "clip_norm must be finite and > 0, got -1.0"),
        ({"policy": "bold"}, "policy must be a policy"),
        (
            {"policy": "headroom", "initial_scale": 4.0},
            r"Pass either policy or .* policy=gs\.Headroom\(init_scale=4\.0\)",
        ),
    ],
)
def test_wrong_setting_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(gs.SettingError, match=message):
        LossScaleOptimizer(keras.optimizers.SGD(0.1), **given)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            "adam",
            r"must be a Keras optimizer .* got 'adam'\. Pass keras\.optimizers\.get\('adam'\)",
        ),
        (None, "got None"),
        (keras.optimizers.SGD, "must be a Keras optimizer"),
    ],
    ids=str,
)
def test_what_cannot_be_wrapped_is_named(inner: Any, message: str) -> None:
    with pytest.raises(gs.SettingError, match=message):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize("kind", [keras.optimizers.LossScaleOptimizer, LossScaleOptimizer])
def test_gradients_cannot_be_divided_by_two_scales(kind: Any) -> None:
    wrapped = kind(keras.optimizers.SGD(0.1))
    with pytest.raises(gs.SettingError, match=r"must not be a LossScaleOptimizer.* Pass its inner"):
        LossScaleOptimizer(wrapped)
    LossScaleOptimizer(wrapped.inner_optimizer)


def test_lists_of_another_length_get_the_error_of_keras() -> None:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    message = "not supported" if keras.backend.backend() == "tensorflow" else "must be built"
    with pytest.raises(ValueError, match=message):
        optimizer.stateless_apply([], [], [])
    optimizer.build([keras.Variable([1.0])])
    if keras.backend.backend() != "tensorflow":
        with pytest.raises(ValueError, match="must be a list of tensors"):
            optimizer.stateless_apply([], [], [])
