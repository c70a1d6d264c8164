"""Gradients are right where weights, outputs or the model itself are replaced by something else."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import torch_has
from gradscale.errors import SettingError
from gradscale.torch.blocks import BlockScales

torch_has.input_metadata()
WIDTH, EXPONENTS = 8, [24, 16, 16, 8, 0, 8]
NUM_EARLY = 16


class Chain(nn.Module):
    """Blocks one after the other; `call` can call one of them in another way."""

    def __init__(self, num: int = len(EXPONENTS), gain: float = 0.9) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num)
        )
        for block in self.blocks:
            nn.init.orthogonal_(block[0].weight, gain)
        self.call: Callable[[int, nn.Module, Tensor], Tensor] = lambda _, block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = self.call(place, block, x)
        return x


class Silent(Chain):
    """Returns nothing."""

    def forward(self, x: Tensor) -> None:
        self.output = super().forward(x)


def settled() -> tuple[Chain, Chain, BlockScales]:
    """A model in passes that do not measure, a twin without scales, and the scales."""
    torch.manual_seed(0)
    model = Chain()
    twin, blocks = copy.deepcopy(model), BlockScales(model)
    for _ in range(NUM_EARLY + 1):
        model(torch.randn(4, WIDTH)).sum().backward()
        blocks.update()
    move(blocks, EXPONENTS)
    model.zero_grad()
    return model, twin, blocks


def move(blocks: BlockScales, exponents: list[int]) -> None:
    state = blocks.state_dict()
    state["exponents"] = dict(zip(blocks.names, exponents, strict=True))
    blocks.load_state_dict(state)


def near(ours: nn.Module, theirs: nn.Module) -> bool:
    """Whether gradients are equal: factors are powers of two, and nothing leaves float32."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_other_gradients_are_not_near() -> None:
    model, twin, _ = settled()
    x = torch.randn(4, WIDTH)
    model(x).sum().backward()
    (twin(x).sum() * 1.001).backward()
    assert not near(model, twin)


@pytest.mark.parametrize("early", [True, False])
def test_weights_of_functional_call_are_used(early: bool) -> None:
    model, twin, blocks = settled()
    if early:
        blocks.remove()
        BlockScales(model)

    def call(place: int, block: nn.Module, x: Tensor) -> Tensor:
        if place != 2:
            return block(x)
        doubled = {name: param * 2 for name, param in block.named_parameters()}
        return functional_call(block, doubled, (x,))

    x = torch.randn(4, WIDTH)
    outputs = []
    for each in (model, twin):
        each.call = call
        outputs.append(each(x))
        outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert near(model, twin)


def test_transforms_of_torch_func_are_refused() -> None:
    model, _, blocks = settled()
    x = torch.randn(4, WIDTH)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, params, (x,)).sum()

    with pytest.raises(SettingError, match=r"torch\.func transforms of a model with Block"):
        torch.func.grad(loss)(dict(model.named_parameters()))
    with torch.no_grad():
        assert torch.func.vmap(model)(x[None]).shape == (1, 4, WIDTH)
    blocks.remove()
    torch.func.grad(loss)(dict(model.named_parameters()))


def test_pruned_weights_are_used() -> None:
    model, twin, _ = settled()
    model(torch.randn(4, WIDTH)).sum().backward()
    for each in (model, twin):
        first, second = each.blocks[2][0], each.blocks[3][0]
        first.weight.data, first.bias.data = first.weight.data[:4], first.bias.data[:4]
        second.weight.data = second.weight.data[:, :4]
        each.zero_grad()
    x = torch.randn(4, WIDTH)
    model(x).sum().backward()
    twin(x).sum().backward()
    assert near(model, twin)


def test_output_that_is_found_by_a_weak_reference_has_its_gradient() -> None:
    model, twin, _ = settled()
    x = torch.randn(4, WIDTH)
    for each in (model, twin):
        found: list[Any] = []

        def call(place: int, block: nn.Module, x: Tensor, found: list[Any] = found) -> Tensor:
            output = block(x)
            found.append(weakref.ref(output))
            return output

        each.call = call
        output = each(x)
        (output.sum() + found[1]().square().sum()).backward()
    assert near(model, twin)


def test_model_that_returns_nothing_keeps_its_scales() -> None:
    torch.manual_seed(0)
    model = Silent(30, 0.3)
    blocks = BlockScales(model)
    x = torch.randn(4, WIDTH)
    for number in range(NUM_EARLY + 4):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            model(x)
        model.output.float().sum().backward()
        alive = [bool(param.grad.any()) for param in model.parameters()]  # type: ignore[union-attr]
        assert all(alive) or number == 0
        blocks.update()


def test_copy_that_follows_its_original_is_another_model() -> None:
    model, twin, blocks = settled()
    model2, blocks2 = copy.deepcopy((model, blocks))
    twin2 = copy.deepcopy(twin)
    move(blocks2, EXPONENTS[::-1])
    x = torch.randn(4, WIDTH)
    model2(model(x)).sum().backward()
    twin2(twin(x)).sum().backward()
    assert near(model, twin)
    assert near(model2, twin2)


def test_float64_models_have_scales() -> None:
    model = Chain().double()
    blocks = BlockScales(model)
    model(torch.randn(4, WIDTH, dtype=torch.float64)).sum().backward()
    blocks.update()
    assert all(param.grad.any() for param in model.parameters())  # type: ignore[union-attr]
