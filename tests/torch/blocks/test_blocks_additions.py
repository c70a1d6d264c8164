"""Weights that are put into a block later are refused, and so is an Inspector."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import Inspector
from gradscale.torch.blocks import BlockScales


class Adapter(nn.Module):
    """A layer that is frozen, and two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.ModuleDict({"default": nn.Linear(4, 1, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(1, 4, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up["default"](self.down["default"](x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def adapt(model: Chain) -> None:
    model.blocks[1][0] = Adapter(model.blocks[1][0])


def add_weight(model: Chain) -> None:
    model.blocks[1][1].shift = nn.Parameter(torch.zeros(4))


def replace(model: Chain) -> None:
    model.blocks[1][0] = nn.Linear(4, 4)


def parametrize(model: Chain) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[1][0])


def nest(model: Chain) -> None:
    model.blocks[1][1].extra = nn.ModuleDict()
    model(torch.ones(1, 4)).sum().backward()  # there are no weights in it yet
    model.blocks[1][1].extra["late"] = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (adapt, "blocks.1.0.down.default.weight' and 1 more"),
        (add_weight, "blocks.1.1.shift'"),
        (replace, "blocks.1.0.weight' and 1 more"),
        (parametrize, "blocks.1.0.parametrizations.weight.original0' and 1 more"),
        (nest, "blocks.1.1.extra.late.weight' and 1 more"),
    ],
)
@pytest.mark.parametrize("measures", [True, False])
def test_weights_that_are_put_into_a_block_are_refused(
    change: Callable[[Chain], None], name: str, measures: bool
) -> None:
    model = Chain()
    blocks = BlockScales(model)
    blocks._num_updates = 1 if measures else 16
    model(torch.ones(1, 4)).sum().backward()
    blocks.update()
    change(model)
    message = (
        f"Block 'blocks.1' has the new weight '{name}.*blocks.remove.*create BlockScales again"
    )
    for _ in range(2):
        with pytest.raises(CallOrderError, match=message):
            model(torch.ones(1, 4))
        with pytest.raises(CallOrderError, match=message):
            blocks.update()
    with torch.no_grad():
        model(torch.ones(1, 4))
    blocks.remove()
    blocks = BlockScales(model)
    model(torch.ones(1, 4)).sum().backward()
    blocks.update()


def test_what_has_no_weights_or_lies_outside_may_change() -> None:
    model = Chain()
    blocks = BlockScales(model)
    model.blocks[1][1] = nn.ReLU()
    model.blocks[0][0].weight = nn.Parameter(torch.eye(4))
    model.head = nn.Linear(4, 4)
    adapt(Chain())
    model(torch.ones(1, 4)).sum().backward()
    blocks.update()
    assert not blocks._hooks.additions.pending


def test_copy_notices_its_own_weights() -> None:
    model = Chain()
    both = copy.deepcopy((model, BlockScales(model)))
    both[0](torch.ones(1, 4)).sum().backward()
    adapt(both[0])
    with pytest.raises(CallOrderError, match=r"blocks\.1\.0\.down"):
        both[0](torch.ones(1, 4))
    model(torch.ones(1, 4))


def test_inspector_and_block_scales_do_not_go_together() -> None:
    model = Chain()
    blocks = BlockScales(model)
    for whole in (model, nn.Sequential(model), model.blocks[1]):
        with pytest.raises(SettingError, match="Inspector cannot be combined with BlockScales"):
            Inspector(whole)
    blocks.remove()
    with Inspector(model):
        with pytest.raises(SettingError, match="BlockScales cannot be combined with Inspector"):
            BlockScales(model)
        BlockScales(Chain())
    blocks = BlockScales(model)
    blocks.remove()
    blocks.remove()
    Inspector(model)
    gc.collect()
    BlockScales(model)
