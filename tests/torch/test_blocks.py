"""Borders leave every gradient as it is, blocks are found, and wrong ones are refused."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.torch.blocks import BlockScales, Placing
from gradscale.torch.blocks.rule import MAX_EXPONENT, BlockState

torch.set_num_threads(1)
WIDTH = 8


class Residual(nn.Module):
    """`x` and what two layers add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Stream(nn.Module):
    """An embedding, blocks, and a head that uses the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens((x[:, :3] * 3).abs().long() % 11)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T


class Skips(nn.Module):
    """Long skips over blocks, one called twice, tied weights, dicts and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Residual() for _ in range(3)), Pair(), Two()])
        self.blocks[1].wide.weight = self.blocks[0].wide.weight
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.blocks[2].wide.weight = nn.Parameter(torch.randn(16, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[0](first)
        third = self.blocks[1](second)
        pair = self.blocks[3]({"left": self.blocks[2](third), "right": second})
        both = self.blocks[4](pair["left"], other=[pair["right"], first])
        return both[0] + both[1] + first + self.outer.weight.sum(0) + third


class Pair(nn.Module):
    """From a dict to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Any]:
        return {"left": self.line(x["left"]) + x["right"], "right": self.line(x["right"]), "n": 1}


class Two(nn.Module):
    """Two tensors to a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, other: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.line(x).sin() + other[1], x * other[0]


def plain() -> nn.Module:
    return nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def nested() -> nn.Module:
    def stage() -> nn.Module:
        layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH), nn.Dropout(0)
        return nn.Sequential(*layers)

    return nn.Sequential(stage(), nn.Sequential(stage(), Residual()), nn.Linear(WIDTH, 1))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def residuals() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(4)))


CHAINS = [plain, nested, residuals, Stream, attention]


def inputs(make: Callable[[], nn.Module]) -> Tensor:
    shape = (2, 3, WIDTH) if make is attention else (4, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plant(blocks: BlockScales, exponents: Iterable[int] | None = None) -> None:
    """Gives the blocks very different scales."""
    if exponents is None:
        exponents = [(7 * place) % 23 - 11 for place in range(len(blocks.names))]
    state = blocks.state_dict()
    state["exponents"] = dict(zip(blocks.names, exponents, strict=True))
    blocks.load_state_dict(state)


def gradients(model: nn.Module, x: Tensor, passes: int = 1, half: bool = False) -> list[Tensor]:
    """The gradients of all parameters, and of the input."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    for _ in range(passes):
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = model(x)
        ((out if out.dtype is torch.float64 else out.float()).square().mean() * 64).backward()
    return [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether they are equal to the bit."""
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("make", CHAINS, ids=lambda make: make.__name__)
def test_scales_of_one_change_no_bit(make: Callable[[], nn.Module], half: bool) -> None:
    expected = gradients(build(make), inputs(make), half=half)
    model = build(make)
    blocks = BlockScales(model)
    assert same(gradients(model, inputs(make), half=half), expected)
    blocks.remove()
    assert same(gradients(model, inputs(make), half=half), expected)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("make", CHAINS, ids=lambda make: make.__name__)
def test_scales_come_out_again_to_the_bit(make: Callable[[], nn.Module], passes: int) -> None:
    expected = gradients(build(make), inputs(make), passes)
    model = build(make)
    blocks = BlockScales(model)
    plant(blocks)
    assert same(gradients(model, inputs(make), passes), expected)
    assert blocks._amax.ne(0).sum() > len(blocks.names)  # they were really in use


@pytest.mark.parametrize("passes", [1, 2])
def test_scales_come_out_again_where_paths_and_weights_meet(passes: int) -> None:
    models = [build(Skips), build(Skips), build(Skips)]
    BlockScales(models[1])
    plant(BlockScales(models[2]))
    without, ones, planted = (gradients(model, inputs(Skips), passes) for model in models)
    assert same(ones, planted)
    # Three gradients of one tensor, added up in another order.
    exact = gradients(build(Skips).double(), inputs(Skips).double(), passes)
    for ours, theirs, truth in zip(ones, without, exact, strict=True):
        bound = 2 * (theirs - truth).abs().max() + truth.abs().max() * 2.0**-23
        assert (ours - truth).abs().max() <= bound


def test_scales_come_out_again_in_float16() -> None:
    # Far from the ends of float16, where a power of two is exact there too.
    expected = gradients(build(residuals), inputs(residuals), half=True)
    model = build(residuals)
    plant(BlockScales(model), [2, 1, 2, 1])
    assert same(gradients(model, inputs(residuals), half=True), expected)


def test_comparison_sees_a_factor_that_is_missing() -> None:
    expected = gradients(build(plain), inputs(plain))
    model = build(plain)
    blocks = BlockScales(model)
    plant(blocks)
    with torch.no_grad():
        blocks._factors[1, 2] *= 2
    assert not same(gradients(model, inputs(plain)), expected)
    assert not same([], [])
    assert not same(expected, expected[1:])


def test_gradient_stays_scaled_from_block_to_block() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    plant(blocks, [30, 30, 30, 30, 30])
    seen: list[Tensor] = []
    model[4].register_full_backward_pre_hook(lambda module, grads: seen.append(grads[0]))
    out = model(inputs(plain))
    names = set()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        names.add(getattr(node, "route", (0, -1, -1))[1:])
        waiting += [near for near, _ in node.next_functions if near is not None]
    assert {(4, 3), (3, 2), (1, 0)} <= names  # no way back to the scale 1 in between


def test_weights_are_the_modules_own_outside_of_the_forward_pass() -> None:
    model = build(plain)
    names = list(model.state_dict())
    before = list(model.parameters())
    blocks = BlockScales(model)
    inside: list[type] = []
    model[0].register_forward_hook(lambda module, args, out: inside.append(type(module.weight)))
    gradients(model, inputs(plain))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert inside == [nn.Parameter]
    blocks.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in list(model.modules())[2:])


def test_failing_forward_pass_gives_the_weights_back() -> None:
    model = build(plain)
    BlockScales(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, WIDTH + 1))
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())

    def interrupt(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    handle = model[3].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(plain))
    handle.remove()
    expected = gradients(build(plain), inputs(plain))
    assert same(gradients(model, inputs(plain)), expected)


def test_without_gradients_nothing_happens() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    with torch.no_grad():
        out = model(inputs(plain))
    assert torch.equal(out, build(plain)(inputs(plain)))
    assert not out.requires_grad
    assert blocks._made == []


def test_frozen_and_unfrozen_weights_are_right() -> None:
    model, other = build(plain), build(plain)
    plant(BlockScales(model))
    for frozen in (True, False):
        for net in (model, other):
            net[2].weight.requires_grad_(not frozen)
        assert same(gradients(model, inputs(plain)), gradients(other, inputs(plain)))


def test_penalty_on_weights_is_not_scaled() -> None:
    model, other = build(plain), build(plain)
    blocks = BlockScales(model)
    plant(blocks)
    for net in (model, other):
        loss = net(inputs(plain)).square().mean() + sum(p.square().sum() for p in net.parameters())
        blocks.check(loss)
        loss.backward()
    ours, theirs = ([p.grad for p in net.parameters()] for net in (model, other))
    assert same(ours, theirs)


def test_sparse_gradients_are_unscaled() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), nn.Linear(WIDTH, 1))

    model, other = build(make), build(make)
    plant(BlockScales(model), [5, -3])
    for net in (model, other):
        net(torch.tensor([1, 4, 4])).square().sum().backward()
    assert torch.equal(model[0].weight.grad.to_dense(), other[0].weight.grad.to_dense())


def test_kept_gradient_of_an_output_is_its_own() -> None:
    kept = []
    for scaled in (False, True):
        model = build(plain)
        if scaled:
            plant(BlockScales(model))
        middle = model[:4](inputs(plain))
        middle.retain_grad()
        model[4:](middle).square().mean().backward()
        kept.append(middle.grad)
    assert torch.equal(*kept)


def test_hook_on_an_output_is_called_with_its_own_gradient() -> None:
    heard: list[Tensor] = []
    for scaled in (False, True):
        model = build(residuals)
        if scaled:
            plant(BlockScales(model))
        model[1].register_forward_hook(lambda m, args, out: out.register_hook(heard.append) and out)
        gradients(model, inputs(residuals))
    assert torch.equal(*heard)


def test_writing_to_an_output_between_blocks_is_right() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Residual() for _ in range(3))
            self.place = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x *= self.place
                x += self.place
            return x

    expected = gradients(build(Adds), inputs(plain))
    model = build(Adds)
    plant(BlockScales(model))
    assert same(gradients(model, inputs(plain)), expected)


def test_block_that_begins_by_writing_to_its_input_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 1))
    BlockScales(model, blocks=list(model))
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(inputs(plain))


def test_gradients_of_gradients_are_refused() -> None:
    model = build(plain)
    BlockScales(model)
    x = inputs(plain).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


# Finding.


def test_chain_is_cut_before_every_module_with_weights() -> None:
    found = BlockScales(nested())._blocks
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
        (plain(), ["0"], "must be modules, or sequences of modules, got '0'"),
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
    with pytest.raises(CallOrderError, match=r"'0' is called on meta\. Make it after"):
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
        ("parameter", r"Block 'blocks\.1' uses 'outer', which is neither a weight of it nor"),
        ("tensor", r"Block 'blocks\.1' uses something that is computed outside of it"),
        ("object", r"Something that block 'blocks\.1' computes is used outside of it"),
        ("attribute", r"Something that block 'blocks\.1' computes is used outside of it"),
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


def test_weights_that_a_module_keeps_elsewhere_are_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, _ = layer(x)
            return x

    model = Recurrent()
    BlockScales(model)
    with pytest.raises(SettingError, match=r"'layers\.1' uses 'layers\.1\.\w+'"):
        model(inputs(plain))


# The rule.


def state_of(*exponents: int, resting: int = 0) -> BlockState:
    numbers = torch.tensor(exponents, dtype=torch.int32)
    return BlockState(numbers, torch.full_like(numbers, resting))


def moved(rows: list[list[float]], *exponents: int, resting: int = 0) -> list[int]:
    """The exponents after entering, leaving and weights."""
    new = Placing().update(state_of(*exponents, resting=resting), torch.tensor(rows))
    return new.exponents.tolist()


inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("rows", "before", "after"),
    [
        ([[1.0], [0.0], [0.0]], [0], [0]),  # just high enough
        ([[0.99], [0.0], [0.0]], [0], [6]),
        ([[4095.0], [0.0], [16380.0]], [5], [5]),  # just low enough
        ([[4096.0], [0.0], [0.0]], [5], [-2]),
        ([[1.0], [4096.0], [0.0]], [0], [-7]),
        ([[1.0], [0.0], [16384.0]], [0], [-7]),
        ([[2.0**-30, 2.0**-10], [0.0, 0.0], [0.0, 0.0]], [0, 0], [35, 15]),
        ([[0.0, 0.0, 2.0**-10], [0.0] * 3, [0.0] * 3], [3, 1, 0], [18, 16, 15]),  # follow
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [3, -4], [3, -4]),
        ([[nan, inf], [nan, inf], [nan, inf]], [3, -4], [3, -4]),  # not for a block to cure
        ([[nan, 64.0], [nan, inf], [nan, 1.0]], [3, 4], [-5, -4]),
        ([[8.0], [1.0], [inf]], [0], [-8]),
        ([[2.0**20], [nan], [nan]], [0], [-15]),  # falls further from further up
        ([[2.0**-12], [nan], [nan]], [0], [-3]),  # and not below the normal numbers
        ([[2.0**-20], [nan], [nan]], [0], [0]),
        ([[2.0**-100], [0.0], [0.0]], [0], [60]),
    ],
)
def test_rule_places_blocks(rows: Any, before: list[int], after: list[int]) -> None:
    assert moved(rows, *before) == after


def test_block_does_not_rise_soon_after_a_fault() -> None:
    rule = Placing(rest=3)
    fault, quiet = torch.tensor([[64.0], [inf], [1.0]]), torch.tensor([[0.01], [0.01], [0.01]])
    state = rule.update(state_of(0), fault)
    assert (state.exponents.item(), state.resting.item()) == (-8, 3)
    for _ in range(3):
        state = rule.update(state, quiet)
        assert state.exponents.item() == -8
    assert rule.update(state, quiet).exponents.item() == 4
    assert moved([[2.0**14], [0.0], [0.0]], 0, resting=9) == [-9]  # but it does fall


amaxes = st.one_of(
    st.sampled_from([0.0, inf, nan]), st.floats(2.0**-149, 2.0**127, width=32, allow_nan=False)
)


@given(st.data(), st.integers(1, 6))
def test_rule_keeps_its_bounds(data: st.DataObject, num: int) -> None:
    rows = data.draw(st.lists(st.lists(amaxes, min_size=num, max_size=num), min_size=3, max_size=3))
    bounded = st.integers(-MAX_EXPONENT, MAX_EXPONENT)
    before = data.draw(st.lists(bounded, min_size=num, max_size=num))
    amax = torch.tensor(rows)
    new = Placing().update(state_of(*before), amax)
    again = Placing().update(state_of(*before), amax)
    assert all(map(torch.equal, new, again))
    assert [number.dtype for number in new] == [torch.int32, torch.int32]
    assert new.exponents.abs().max() <= MAX_EXPONENT
    assert new.resting.min() >= 0
    # Once moved, a block whose gradients move along and are finite stays.
    if amax.isfinite().all() and (new.exponents.abs() < MAX_EXPONENT).all():
        shifted = amax.double() * 2.0 ** (new.exponents - torch.tensor(before)).double()
        if (shifted < 2.0**127).all() and ((shifted > 2.0**-120) | (amax == 0)).all():
            assert torch.equal(Placing().update(new, shifted.float()).exponents, new.exponents)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 6.0}, "target must be a whole number, got 6.0"),
        ({"low": True}, "low must be a whole number, got True"),
        ({"low": 7}, "must rise from -14 to 16, got 7, 6, 12"),
        ({"high": 17}, "must rise from -14 to 16, got 0, 6, 17"),
        ({"drop": 0}, "drop must be >= 1, got 0"),
        ({"rest": -1}, "rest must be >= 0, got -1"),
    ],
)
def test_settings_of_the_rule_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Placing(**settings)


# Updates and state.


def test_update_places_what_it_has_measured() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    gradients(model, inputs(plain))
    amax = blocks._amax.clone()
    blocks.update()
    expected = Placing().update(state_of(*[0] * 5), amax).exponents
    assert list(blocks.exponents.values()) == expected.tolist()
    assert torch.equal(blocks._factors[0], 2.0**expected)
    assert torch.equal(blocks._factors[1], 2.0**-expected)
    assert blocks._amax.eq(0).all()


def test_amax_is_that_of_the_gradients_in_the_block() -> None:
    model = build(residuals)
    blocks = BlockScales(model)
    plant(blocks, [3, 5, -2, 4])
    with torch.no_grad():
        outs = [inputs(residuals)]
        for block in build(residuals):
            outs.append(block(outs[-1]))
    loss = gradients(model, inputs(residuals))
    other = build(residuals)
    kept = [inputs(residuals).requires_grad_()]
    for block in other:
        kept.append(block(kept[-1]))
        kept[-1].retain_grad()
    (kept[-1].square().mean() * 64).backward()
    scales = torch.tensor([8.0, 32.0, 0.25, 16.0])
    amax = torch.stack([x.grad.abs().max() for x in kept])
    assert torch.equal(blocks._amax[0], amax[1:] * scales)
    assert torch.equal(blocks._amax[1], amax[:-1] * scales)
    weights = [max(p.grad.abs().max() for p in block.parameters()) for block in other]
    assert torch.equal(blocks._amax[2], torch.stack(weights) * scales)
    assert len(loss) == 25


def test_measures_in_every_so_many_updates() -> None:
    model = build(plain)
    blocks = BlockScales(model, every=3)
    measured = []
    for _ in range(7):
        gradients(model, inputs(plain))
        measured.append(bool(blocks._amax.any()))
        blocks.update()
    assert measured == [True, False, False, True, False, False, True]


def test_update_before_the_backward_pass_is_refused() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    loss = model(inputs(plain)).sum()
    blocks.update()
    with pytest.raises(CallOrderError, match=r"Call blocks\.update\(\) after the backward pass"):
        loss.backward()


def test_state_goes_through_json_and_back() -> None:
    blocks = BlockScales(build(plain))
    state = blocks.state_dict()
    state["exponents"] = dict(zip(blocks.names, [5, -4, 3, 60, -60], strict=True))
    state["resting"] = dict(zip(blocks.names, [1, 2, 3, 4, 5], strict=True))
    other = BlockScales(build(plain))
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.state_dict() == state
    assert other.exponents == state["exponents"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"exponents": {}}, r"exponents must have a number for each of the blocks \['0', '2'"),
        ({"resting": None}, "resting must have a number for each"),
        ({"exponents": {"0": 1, "2": 61, "4": 0, "6": 0, "8": 0}}, "from -60 to 60, got 61 for"),
        ({"exponents": {"0": 1, "2": 1.0, "4": 0, "6": 0, "8": 0}}, "whole numbers"),
    ],
)
def test_state_that_cannot_be_read_changes_nothing(change: dict[str, Any], message: str) -> None:
    blocks = BlockScales(build(plain))
    plant(blocks)
    before = blocks.state_dict()
    with pytest.raises(StateError, match=message):
        blocks.load_state_dict({**before, "resting": {}, **change} | change)
    assert blocks.state_dict() == before


def test_resumed_run_goes_on_the_same() -> None:
    def run(steps: int, model: nn.Module, blocks: BlockScales) -> list[Tensor]:
        for _ in range(steps):
            grads = gradients(model, inputs(plain) * 2.0**-20, half=True)
            blocks.update()
        return grads

    model = build(plain)
    blocks = BlockScales(model)
    whole = run(6, model, blocks)
    model = build(plain)
    first = BlockScales(model)
    run(3, model, first)
    saved = first.state_dict()
    model = build(plain)
    second = BlockScales(model)
    second.load_state_dict(saved)
    assert same(run(3, model, second), whole)
    assert second.state_dict() == blocks.state_dict()


def test_model_can_be_copied_and_pickled() -> None:
    model = build(residuals)
    blocks = BlockScales(model)
    plant(blocks)
    expected = gradients(model, inputs(residuals))
    assert same(gradients(copy.deepcopy(model), inputs(residuals)), expected)
    assert same(gradients(pickle.loads(pickle.dumps(model)), inputs(residuals)), expected)


def test_graph_of_a_forward_pass_is_not_kept() -> None:
    model = build(plain)
    BlockScales(model)
    out = model(inputs(plain))
    node = out.grad_fn
    del out
    gc.collect()
    assert sum(held is node for held in gc.get_objects()) <= 1
