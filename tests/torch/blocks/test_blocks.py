"""Borders leave every gradient as it is; scales follow what was measured, and are saved."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from block_models import (
    CHAINS,
    WIDTH,
    Residual,
    Skips,
    build,
    gradients,
    inputs,
    plain,
    plant,
    residuals,
)
from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.torch.blocks import BlockPolicy, BlockScales
from gradscale.torch.blocks.edges import OUTSIDE, Clock, Live, Terms, enter
from gradscale.torch.blocks.report import BlockReport, BlocksReport
from tensors import same


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
    assert blocks._hooks.meters.borders.ne(0).sum() > len(blocks.names)  # they were really in use


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_factor_that_float16_cannot_hold_is_exact(device: str, kind: str) -> None:
    x = torch.ones(2, dtype=torch.float16, device=device, requires_grad=True)
    factor = 2.0**20 if kind == "number" else torch.tensor(2.0**20, device=device)
    seen = enter(x, factor, None, None, (0, OUTSIDE, 0), Live(Clock(), 0, Terms()))
    seen.backward(torch.tensor([2.0**-14, 2.0**-24], dtype=torch.float16, device=device))
    assert x.grad.tolist() == [2.0**6, 2.0**-4]


def test_comparison_sees_a_factor_that_is_missing() -> None:
    expected = gradients(build(plain), inputs(plain))
    model = build(plain)
    blocks = BlockScales(model)
    plant(blocks)
    factor = blocks._hooks.factor
    wrong = (2, OUTSIDE)
    blocks._hooks.factor = lambda *way: factor(*way) * (2 if way == wrong else 1)
    assert not same(gradients(model, inputs(plain)), expected)
    assert not same([], [])
    assert not same(expected, expected[1:])


def test_gradient_stays_scaled_from_block_to_block() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    plant(blocks, [30, 30, 30, 30, 30])
    routes, weights = set(), set()
    output = model(inputs(plain))  # keeps its graph
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        routes.add(getattr(node, "route", (0, -1, -1))[1:])
        weights |= set(getattr(node, "places", ()))
        waiting += [near for near, _ in node.next_functions if near is not None]
    assert routes == {(-1, -1), (-1, 4), (4, 3), (3, 2), (2, 1), (1, 0)}
    assert weights == set(range(5))


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

    handle = model[2].register_forward_pre_hook(interrupt)  # when its weights are lent
    with pytest.raises(KeyboardInterrupt):
        model(inputs(plain))
    handle.remove()
    model(inputs(plain))  # hooks do not hear of an interrupt before they run again
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    expected = gradients(build(plain), inputs(plain))
    assert same(gradients(model, inputs(plain)), expected)


def test_without_gradients_nothing_happens() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    with torch.no_grad():
        out = model(inputs(plain))
    assert torch.equal(out, build(plain)(inputs(plain)))
    assert not out.requires_grad
    assert blocks._hooks.made == []


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


@pytest.mark.parametrize("early", [False, True])
def test_hook_on_an_output_is_called_with_its_own_gradient(early: bool) -> None:
    heard: list[Tensor] = []

    def hook(model: nn.Module) -> None:
        model[1].register_forward_hook(lambda m, args, out: out.register_hook(heard.append) and out)

    for scaled in (False, True):
        model = build(residuals)
        if early:
            hook(model)
        if scaled:
            plant(BlockScales(model))
        if not early:
            hook(model)
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
    with pytest.raises(SettingError, match="create_graph=True is not supported with BlockScales"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert grad.any()


# Updates and state.


def test_update_places_what_it_has_measured() -> None:
    model = build(plain)
    blocks = BlockScales(model)
    gradients(model, inputs(plain))
    amax = blocks._hooks.meters.read()
    blocks.update()
    expected = BlockPolicy().update(BlockPolicy().init(5, amax.device), amax).exponents
    assert list(blocks.exponents.values()) == expected.tolist()
    assert torch.equal(blocks._hooks.factors[0], 2.0**expected)
    assert torch.equal(blocks._hooks.factors[1], 2.0**-expected)
    assert blocks._hooks.meters.borders.eq(0).all()
    assert blocks._hooks.meters.weights.eq(0).all()


def test_amax_is_that_of_the_gradients_in_the_block() -> None:
    model = build(residuals)
    blocks = BlockScales(model)
    plant(blocks, [3, 5, -2, 4])
    gradients(model, inputs(residuals))
    other = build(residuals)
    kept = [inputs(residuals).requires_grad_()]
    for block in other:
        kept.append(block(kept[-1]))
        kept[-1].retain_grad()
    (kept[-1].square().mean() * 64).backward()
    scales = torch.tensor([8.0, 32.0, 0.25, 16.0])
    amax = torch.stack([x.grad.abs().max() for x in kept])
    measured = blocks._hooks.meters.read()
    assert torch.equal(measured[0], amax[1:] * scales)
    assert torch.equal(measured[1], amax[:-1] * scales)
    weights = [max(p.grad.abs().max() for p in block.parameters()) for block in other]
    assert torch.equal(measured[2], torch.stack(weights) * scales)


def test_measures_in_every_so_many_updates() -> None:
    model = build(plain)
    blocks = BlockScales(model, every=3)
    measured = []
    for _ in range(22):
        gradients(model, inputs(plain))
        measured.append(bool(blocks._hooks.meters.borders.any()))
        blocks.update()
    assert measured == [number < 16 or number % 3 == 0 for number in range(22)]


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
        ({"exponents": {"0": 1, "2": 61, "4": 0, "6": 0, "8": 0}}, "from -60 to 60, got .'2': 61"),
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
    node = weakref.ref(out.grad_fn)
    assert node() is not None
    del out
    gc.collect()
    assert node() is None


def test_report_has_no_negative_zero() -> None:
    block = BlockReport("0", 3, -0.4, -0.2, {"weight": 0.3}, "")
    assert str(BlocksReport((block,), ())).splitlines()[1].split() == ["0", "3", "0", "to", "0"]
