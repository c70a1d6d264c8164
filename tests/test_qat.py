"""Quantization-aware training: examples/qat_tensorrt.py and docs/how-to/quantize.md."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytest.importorskip("torchao")

EXAMPLE = Path(__file__).parents[1] / "examples/qat_tensorrt.py"


class Forgetful(GradScaler):
    """Leaves the step sizes of the first weight, a quantizer's parameter, out of the unscaling."""

    def apply(self, optimizers: Any, **options: Any) -> Any:
        if self.is_enabled():
            optimizers.param_groups[0]["params"][2].grad.mul_(self.get_scale())
        return super().apply(optimizers, **options)


@pytest.fixture
def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("qat_tensorrt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def gradients(example: Any, scaler: GradScaler, half: bool) -> dict[str, Tensor]:
    """The unscaled gradients of one pass, by name of the parameter."""
    model = example.quantized(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs, quarters = example.turned(example.IMAGES[:32])
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        outputs = model(inputs)
    scaler.backward(nn.functional.cross_entropy(outputs.float(), quarters))
    scaler.apply(optimizer, zero_grad=False)
    return {name: param.grad for name, param in model.named_parameters()}


def step_sizes(gradients: dict[str, Tensor]) -> list[str]:
    """The names of the quantizers' step sizes."""
    return [name for name in gradients if name.endswith(".scale")]


def test_step_sizes_are_unscaled_to_the_bit_like_all_parameters(example: Any) -> None:
    plain = gradients(example, GradScaler("cpu", enabled=False), half=False)
    scaled = gradients(example, GradScaler("cpu"), half=False)
    assert len(step_sizes(plain)) == 4
    assert all(plain[name].abs().sum() > 0 for name in step_sizes(plain))
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_gradients_in_float16_are_near_those_of_float32_through_the_scale_alone(
    example: Any,
) -> None:
    single = gradients(example, GradScaler("cpu", enabled=False), half=False)
    learned = [name for name in single if not name.endswith("zero_point")]

    def worst(scale: float) -> float:
        scaler = GradScaler("cpu", init_scale=scale, min_scale=min(scale, 1.0))
        half = gradients(example, scaler, half=True)
        return max(float((half[n] - single[n]).norm() / single[n].norm()) for n in learned)

    # Not less, because float16 moves some elements across the border of a step.
    assert worst(2.0**16) < 0.15
    assert worst(2.0**-14) > 1.0


def test_forgotten_step_size_is_noticed_by_the_comparison(example: Any) -> None:
    plain = gradients(example, GradScaler("cpu", enabled=False), half=False)
    scaled = gradients(example, Forgetful("cpu"), half=False)
    assert [name for name in plain if not torch.equal(plain[name], scaled[name])] == [
        step_sizes(plain)[0]
    ]


def test_forgotten_step_size_fails_the_check_of_the_example(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "GradScaler", Forgetful)
    with pytest.raises(SystemExit, match="do not agree"):
        example.main(steps=300)


def test_file_is_the_model_but_for_elements_on_a_border_of_two_steps(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = functools.partial(onnxruntime.InferenceSession, sess_options=options)
    monkeypatch.setattr(example, "InferenceSession", session)
    example.main(steps=300)
    printed = capsys.readouterr().out
    # On some CPUs none, on others the two libraries add up in another order, and an element next to
    # the border of two INT8 steps gets the other one: 1/127 of the largest input of a layer.
    gap = float(printed.split("ONNX differs by ")[1].split("%")[0])
    assert gap <= 100 / 127
    # Of each of three layers: the input is quantized, the weight is stored in INT8.
    assert "'QuantizeLinear': 3" in printed
    assert "'DequantizeLinear': 6" in printed


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_float16_ends_within_a_point_of_float32(example: Any, seed: int) -> None:
    example.main(seed)
