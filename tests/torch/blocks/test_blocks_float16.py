"""In float16, block scales keep gradients that no loss scale keeps."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscale as gs
import torch_has
from gradscale.torch import GradScaler
from gradscale.torch.blocks import BlockScales
from gradscale.torch.optim import AdamW, Lion

torch.set_num_threads(1)
DEPTH, WIDTH = 50, 16


def chain(gain: float, seed: int = 0) -> nn.Sequential:
    """A deep plain net, through whose layers gradients become smaller by about `gain`."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        line = nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(line.weight, gain)
        nn.init.normal_(line.bias, std=0.2)
        layers += [line, nn.Tanh() if gain < 1 else nn.Identity()]
    return nn.Sequential(*layers)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def backward(model: nn.Module, scale: float, half: bool = True) -> list[Tensor]:
    """The gradients of all weights, without the loss `scale`, in float64."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        out = model(some(32, WIDTH))
    ((out.float() - some(32, WIDTH)).square().mean() * scale).backward()
    return [param.grad.double() / scale for param in model.parameters()]


def num_wrong(ours: list[Tensor], truth: list[Tensor]) -> int:
    """How many of `ours` are off by more than float16 rounds in so many layers, or not finite."""
    bound = DEPTH * torch.finfo(torch.float16).eps
    errors = [(a - b).norm() / b.norm() for a, b in zip(ours, truth, strict=True)]
    return sum(not error < bound for error in errors)


@pytest.fixture(scope="module")
def truth() -> list[Tensor]:
    return backward(chain(0.5), 1.0, half=False)


def test_net_needs_more_than_float16_has(truth: list[Tensor]) -> None:
    binades = torch.stack([grad.abs().max() for grad in truth]).log2()
    assert binades.max() - binades.min() > 50


@pytest.mark.parametrize("exponent", range(-10, 41, 5))
def test_no_loss_scale_keeps_all_gradients(truth: list[Tensor], exponent: int) -> None:
    assert num_wrong(backward(chain(0.5), 2.0**exponent), truth) > DEPTH / 2


def test_block_scales_keep_all_gradients(truth: list[Tensor]) -> None:
    model = chain(0.5)
    blocks = BlockScales(model)
    wrong = []
    for _ in range(5):
        wrong.append(num_wrong(backward(model, 2.0**10), truth))
        blocks.update()
    assert wrong[0] > DEPTH
    assert wrong[3:] == [0, 0]


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**16])
def test_block_scales_find_their_place_from_any_loss_scale(
    truth: list[Tensor], scale: float
) -> None:
    model = chain(0.5)
    blocks = BlockScales(model)
    for _ in range(5):
        grads = backward(model, scale)
        blocks.update()
    assert num_wrong(grads, truth) == 0


class Amplify(nn.Module):
    """Hands on `x`, and twice its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 - x.detach()


def test_gradients_that_grow_are_kept_too() -> None:
    def grow() -> nn.Module:
        lines = chain(0.9)[::2]
        return nn.Sequential(*(m for line in lines for m in (line, nn.Tanh(), Amplify())))

    expected = backward(grow(), 1.0, half=False)
    model = grow()
    assert num_wrong(backward(model, 2.0**10), expected) > DEPTH / 2
    blocks = BlockScales(model)
    for _ in range(8):
        grads = backward(model, 2.0**10)
        blocks.update()
    assert num_wrong(grads, expected) == 0
    assert min(blocks.exponents.values()) < -10


def test_overflow_and_zero_are_cured_in_a_few_updates(truth: list[Tensor]) -> None:
    model = chain(0.5)
    blocks = BlockScales(model, every=1)
    for wrong_by in (30, -30):
        for _ in range(5):
            backward(model, 2.0**10)
            blocks.update()
        state = blocks.state_dict()
        middle = blocks.names[DEPTH // 2]
        for name in blocks.names:
            by = wrong_by if blocks.names.index(name) <= blocks.names.index(middle) else 0
            state["exponents"][name] = max(-60, min(60, state["exponents"][name] + by))
        blocks.load_state_dict(state)
        assert num_wrong(backward(model, 2.0**10), truth) > 10
        for _ in range(5):
            blocks.update()
            grads = backward(model, 2.0**10)
        assert num_wrong(grads, truth) == 0


# Training.


class Dim(nn.Module):
    """Hands on `x`, and half of its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + (x * 0.5).detach()


def bottleneck(seed: int) -> nn.Sequential:
    """A deep plain net whose first layer, which has the smallest gradients, has the most to learn.

    It hands on only two of 64 numbers. Adam's epsilon and squares would play a part of their own,
    so it is trained with Lion.
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(64, 2), nn.Tanh(), Dim()]
    for place in range(40):
        line = nn.Linear(WIDTH if place else 2, WIDTH)
        nn.init.orthogonal_(line.weight, 1.2)
        layers += [line, nn.Tanh(), Dim()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def train(seed: int, kind: str, steps: int = 80, **settings: Any) -> float:
    """The last loss, in "float32", in "float16" or with "blocks"."""
    model = bottleneck(seed)
    optimizer = Lion(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", enabled=kind != "float32", on_stuck="ignore", **settings)
    blocks = BlockScales(model) if kind == "blocks" else None
    x = some(128, 64)
    target = torch.tanh(2 * x @ some(64, 1) / 8)
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16, enabled=kind != "float32"):
            out = model(x)
        loss = (out.float() - target).square().mean()
        scaler.backward(loss)
        scaler.apply(optimizer)
        if blocks is not None:
            blocks.update()
    return float(loss.detach())


def test_deep_plain_net_trains_as_in_float32() -> None:
    seeds = range(2)
    float32 = [train(seed, "float32") for seed in seeds]
    scaled = [train(seed, "blocks") for seed in seeds]
    assert abs(statistics.mean(scaled) - statistics.mean(float32)) < max(float32) - min(float32)
    for settings in ({}, {"policy": gs.Static(init_scale=2.0**20)}):
        assert train(0, "float16", **settings) > 2 * max(float32)


# Float16 weights.


def test_float16_weights_get_their_gradients_in_float32(truth: list[Tensor]) -> None:
    def halves() -> nn.Sequential:
        return chain(0.5).half()

    def run(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        x, target = some(32, WIDTH), some(32, WIDTH)
        dtype = next(model.parameters()).dtype
        ((model(x.to(dtype)).float() - target).square().mean() * 2.0**10).backward()
        return [param.grad.double() / 2.0**10 for param in model.parameters()]

    torch_has.grad_dtype()
    expected = run(halves().float())
    model = halves()
    assert num_wrong(run(model), expected) > DEPTH
    model.zero_grad()
    blocks = BlockScales(model)
    for _ in range(5):
        grads = run(model)
        blocks.update()
    assert num_wrong(grads, expected) == 0
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scaler.backward(model(some(4, WIDTH).half()).float().square().mean())
    assert scaler.apply(optimizer).applied
    blocks.remove()
    run(model)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float16}
