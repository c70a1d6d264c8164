"""Blocks are found, and those that gradients get around are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from block_models import (
    WIDTH,
    Residual,
    Stream,
    attention,
    build,
    gradients,
    inputs,
    nested,
    plain,
    plant,
    residuals,
)
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.blocks import BlockScales
from gradscale.torch.blocks.references import extra
from tensors import same


def test_chain_is_cut_before_every_module_with_weights() -> None:
    found = BlockScales(nested())._hooks.blocks
    kinds = [[type(module).__name__ for module in block.modules] for block in found]
    first = [["Linear", "ReLU"], ["LayerNorm", "Dropout"]]
    assert kinds == [*first, *first, ["Residual"], ["Linear"]]
    assert [block.name for block in found] == ["0.0", "0.2", "1.0.0", "1.0.2", "1.1", "2"]


def test_lists_of_blocks_are_found_below_the_model() -> None:
    assert BlockScales(Stream()).names == [f"blocks.{place}" for place in range(4)]
    assert BlockScales(attention()).names == [f"layers.{place}" for place in range(3)]
    wrapped = nn.ModuleDict({"inner": Stream(), "head": nn.Linear(1, 1)})
    assert BlockScales(wrapped).names == [f"inner.blocks.{place}" for place in range(4)]


def test_module_that_comes_twice_is_one_block() -> None:
    line = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(line, nn.Tanh(), line, nn.Tanh(), nn.Linear(WIDTH, 1))
    blocks = BlockScales(model)
    assert blocks.names == ["0", "4"]
    other = copy.deepcopy(model)
    plant(blocks)
    blocks_of_copy = other[0]._forward_hooks  # a copy has borders of its own
    assert blocks_of_copy
    ours = gradients(model, inputs(plain))
    blocks.remove()
    assert same(ours, gradients(model, inputs(plain)))


@pytest.mark.parametrize(
    ("model", "blocks", "message"),
    [
        (nn.Linear(1, 1), None, "Linear has no nn.Sequential or nn.ModuleList"),
        (plain(), [], "at least one module"),
        (plain(), ["0"], "must be modules of the model, or sequences of them, got '0'"),
        (plain(), [nn.Linear(1, 1)], "got a Linear that is not"),
        (nn.Sequential(nn.Tanh()), None, "has no nn.Sequential"),
    ],
)
def test_blocks_that_cannot_be_are_refused(model: nn.Module, blocks: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        BlockScales(model, blocks)


def test_overlapping_blocks_are_refused() -> None:
    model = residuals()
    with pytest.raises(SettingError, match=r"overlap: '1\.wide' is in both '1' and '1\.wide'"):
        BlockScales(model, [model[0], model[1], model[1].wide])


@pytest.mark.parametrize("measures", [True, False])
def test_blocks_may_share_modules_without_weights(measures: bool) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            act = nn.Sequential(nn.Tanh(), nn.Dropout(0.0))
            self.blocks = nn.ModuleList(Shares(act) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Shares(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.line, self.act = nn.Linear(WIDTH, WIDTH), act

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.line(x))

    expected = gradients(build(Chain), inputs(plain))
    model = build(Chain)
    blocks = BlockScales(model)
    if not measures:
        gradients(model, inputs(plain))
        for _ in range(17):
            blocks.update()
    plant(blocks)
    assert blocks._hooks.measures == measures
    assert same(gradients(model, inputs(plain)), expected)


def test_weights_and_members_of_two_blocks_are_refused() -> None:
    act = nn.PReLU()
    model = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), act) for _ in range(2))
    with pytest.raises(SettingError, match=r"overlap: '0\.1' is in both '0' and '1'"):
        BlockScales(model, [*model])
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    with pytest.raises(SettingError, match="overlap: '1' is in both '0' and '2'"):
        BlockScales(model, [[model[0], model[1]], [model[2], model[1]]])


def test_blocks_without_weights_or_on_two_devices_are_refused() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(1, 1))
    with pytest.raises(SettingError, match="one device, got no weights"):
        BlockScales(model, [model[0]])
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(SettingError, match="one device, got cpu, meta"):
        BlockScales(model)


@pytest.mark.parametrize("every", [0, -1, 1.0, True, None])
def test_every_must_be_a_count(every: Any) -> None:
    with pytest.raises(SettingError, match="every must be a whole number >= 1, got"):
        BlockScales(plain(), every=every)


def test_model_that_moves_to_another_device_is_refused() -> None:
    model = plain()
    BlockScales(model)
    model.to("meta")
    with pytest.raises(CallOrderError, match=r"'0' is called on meta\. Create BlockScales after"):
        model(torch.randn(2, WIDTH, device="meta", requires_grad=True))


# Paths around borders.


class Leaky(nn.Module):
    """Blocks between which something passes by."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.outer = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].forward = self.forward_1  # type: ignore[method-assign]

    def forward_1(self, x: Tensor) -> Any:
        y = self.blocks[1].wide(x)
        if self.way == "parameter":
            return x * self.outer
        if self.way == "tensor":
            return x * self.first
        if self.way == "object":
            return Hidden(self.blocks[1].narrow(y))
        self.kept = y
        return self.blocks[1].narrow(y)

    def forward(self, x: Tensor) -> Tensor:
        self.first = self.blocks[0](x) * 2
        x = self.blocks[1](self.blocks[0](x))
        x = self.blocks[2](x.tensor if isinstance(x, Hidden) else x)
        return x + self.kept.mean() if self.way == "attribute" else x


class Hidden:
    """A container that nobody knows."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("parameter", r"Block 'blocks\.1' uses 'outer', which is neither one of its weights nor"),
        ("tensor", r"Block 'blocks\.1' uses something that is computed outside of it"),
        ("object", r"A tensor that block 'blocks\.1' computes is used outside of the block"),
        ("attribute", r"A tensor that block 'blocks\.1' computes is used outside of the block"),
    ],
)
def test_path_around_a_border_is_refused(way: str, message: str) -> None:
    model = Leaky(way)
    blocks = BlockScales(model)
    with pytest.raises(SettingError, match=message):
        model(inputs(plain))
    blocks.remove()
    BlockScales(model, blocks=[model.blocks[0], model.blocks[2]])
    model(inputs(plain)).sum().backward()


class Leaves(Residual):
    """Makes a tensor that requires a gradient, as T5 does in checkpoints."""

    def __init__(self, kept: list[Tensor] | None) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        leaf = torch.ones(WIDTH, requires_grad=True)
        if self.kept is not None:
            self.kept.append(leaf)
        return super().forward(x * leaf + leaf)  # the graph saves it, too


def test_leaf_that_a_block_has_made_is_refused_if_its_gradient_can_be_read() -> None:
    if extra() is None:
        pytest.skip("needs a torch whose references are counted")
    kept: list[Tensor] = []
    model = nn.Sequential(*(Leaves(None) for _ in range(3)))
    blocks = BlockScales(model)
    model(inputs(plain)).sum().backward()
    blocks.remove()
    model[1].kept = kept
    BlockScales(model)
    with pytest.raises(SettingError, match=r"Block '1' uses 'a leaf of shape \(8,\)'"):
        model(inputs(plain))


class Recurrent(nn.Module):
    """Layers that keep a list of their weights."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Keeps(nn.Linear):
    """Does not look at its weight again."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x @ self.kept,)


def test_recurrent_layers_are_right() -> None:
    def make() -> nn.Module:
        return Recurrent(nn.LSTM)

    expected = gradients(build(make), inputs(plain))
    model = build(make)
    plant(BlockScales(model))
    assert same(gradients(model, inputs(plain)), expected)


def test_weights_that_a_module_keeps_elsewhere_are_refused() -> None:
    model = Recurrent(Keeps)
    for layer in model.layers:
        layer.__dict__["kept"] = layer.weight
    BlockScales(model)
    with pytest.raises(SettingError, match=r"'layers\.1' uses 'layers\.1\.weight'"):
        model(inputs(plain))
