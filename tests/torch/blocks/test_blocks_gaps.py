"""Gradients keep the scale of a block through what lies before it, and come out right."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradscale as gs
import torch_has
from block_models import WIDTH, Damped, Pooled, Residual, build, gradients, plant, positions
from gradscale.errors import SettingError
from gradscale.torch import GradScaler
from gradscale.torch.blocks import BlockScales
from gradscale.torch.optim import Lion
from tensors import same

torch_has.input_metadata()
NUM_EARLY = 16


def calm(blocks: BlockScales, exponents: list[int] | None = None) -> None:
    """Plants scales, and has so many updates pass that passes do not measure any more."""
    for _ in range(NUM_EARLY + 1):
        blocks.update()
    plant(blocks, exponents)
    assert not blocks._hooks.measures


# The net that no loss scale trains.


def step(model: nn.Module, x: Tensor, labels: Tensor, half: bool = True) -> None:
    """A backward pass, in float16 or as the model is."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=half):
        out = model(x)
    out = out.float() if half else out
    (nn.functional.cross_entropy(out, labels) * 2.0**8).backward()


def dead(model: nn.Module) -> list[str]:
    """The weights whose gradients are all zero."""
    return [name for name, param in model.named_parameters() if not param.grad.any()]


@pytest.mark.parametrize("wide", [False, True], ids=["float16", "float32"])
@pytest.mark.parametrize("between", [False, True], ids=["module", "call"])
@pytest.mark.parametrize("kind", ["mean", "sum", "stride", "reshape", "add"])
def test_no_weight_below_a_pooling_is_without_a_gradient(
    kind: str, between: bool, wide: bool
) -> None:
    torch.manual_seed(0)
    model = Pooled(kind, between=between, wide=wide)
    blocks = BlockScales(model)
    x, labels = positions(0, 8)
    step(model, x, labels)
    assert len(dead(model)) > 10
    for _ in range(5):
        blocks.update()
        step(model, x, labels)
    assert dead(model) == []
    assert blocks.report()[0].unscaled_because == ""
    exact = Pooled(kind, between=between).double()
    exact.load_state_dict(model.state_dict())
    step(exact, x.double(), labels, half=False)
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < len(blocks.names) * 2 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("depth", [20, 100])
def test_depth_does_not_matter(depth: int) -> None:
    torch.manual_seed(0)
    model = Pooled(depth=depth)
    for block in model.blocks:
        if isinstance(block, Damped):
            block.forward = lambda x, line=block.line: damp(line(x), 0.25 ** (24 / depth))
    blocks = BlockScales(model)
    x, labels = positions(0, 4)
    for _ in range(8):
        step(model, x, labels)
        blocks.update()
    assert dead(model) == []
    scales = list(blocks.exponents.values())
    changes = sum(a != b for a, b in itertools.pairwise(scales))
    assert changes < 16  # neighbours have the same scale


def damp(x: Tensor, by: float) -> Tensor:
    y = torch.tanh(x)
    return y * by + (y * (1 - by)).detach()


def train(seed: int, kind: str, steps: int) -> tuple[float, list[str]]:
    """The accuracy, and the weights without a gradient after ten updates."""
    torch.manual_seed(seed)
    model = Pooled()
    optimizer = Lion(model.parameters(), lr=1e-3)
    half = kind != "float32"
    policy = gs.Headroom() if kind == "blocks" else None
    scaler = GradScaler("cpu", enabled=half, on_stuck="ignore", policy=policy)
    blocks = BlockScales(model) if kind == "blocks" else None
    x, labels = positions(100 + seed, 2048)
    without: list[str] = []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - number / steps)
        some = torch.randint(2048, (64,), generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = model(x[some])
        scaler.backward(nn.functional.cross_entropy(out.float(), labels[some]))
        scaler.apply(optimizer, zero_grad=False)
        if number == 10:
            without = dead(model)
        optimizer.zero_grad()
        if blocks is not None:
            blocks.update()
    x, labels = positions(999, 1024)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=half):
        right = model(x).argmax(1) == labels
    return float(right.float().mean()), without


def test_pooled_net_learns_in_a_few_steps_as_in_float32() -> None:
    steps = 80
    float32, _ = train(0, "float32", steps)
    scaled, without = train(0, "blocks", steps)
    assert without == []
    assert scaled > float32 - 0.05
    assert train(0, "torch", steps)[0] < float32 - 0.05


def test_batch_almost_without_a_loss_costs_no_later_step() -> None:
    torch.manual_seed(0)
    model = Pooled()
    blocks = BlockScales(model, every=18)
    x, labels = positions(0, 8)
    for _ in range(18):
        step(model, x, labels)
        blocks.update()
    before = blocks.exponents
    assert blocks._hooks.measures
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    (nn.functional.cross_entropy(out.float(), labels) * 2.0**-20).backward()
    blocks.update()
    assert blocks.exponents == {name: exponent + 2 for name, exponent in before.items()}
    step(model, x, labels)
    assert all(param.grad.isfinite().all() for param in model.parameters())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_pooled_net_trains_as_in_float32(seed: int) -> None:
    float32, _ = train(seed, "float32", 400)
    scaled, without = train(seed, "blocks", 400)
    assert without == []
    assert abs(scaled - float32) < 0.01
    assert train(seed, "torch", 400)[0] < float32 - 0.15


# Any graph.


class Anything(nn.Module):
    """Blocks and operations between them, as a program says.

    `kept` are tensors that a loss uses though the model did not return them.
    """

    def __init__(self, program: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Line() for _ in range(4)), Both()])
        self.shift = nn.Parameter(torch.randn(4) / 2)
        self.shared = nn.Softplus()
        self.first = nn.Linear(4, 4)
        self.program = program
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        there = [self.first(x)]
        for what, first, second in self.program:
            a, b = there[first % len(there)], there[second % len(there)]
            if what == "keep":
                self.kept.append(a)
            elif what == "write":
                there.append(a.clone().mul_(self.shift))
            else:
                there.append(self.apply_one(what, a, b, second))
        return there[-1] + there[len(there) // 2]

    def apply_one(self, what: str, a: Tensor, b: Tensor, which: int) -> Tensor:
        if what == "block":
            return self.blocks[which % 4](a)
        if what == "both":
            return self.blocks[4]([a, b])["sum"]
        if what == "mean":
            return a.mean(1, keepdim=True) + b * 0.5
        if what == "stride":
            return a[:, ::2].repeat_interleave(2, 1)
        if what == "split":
            left, right = a.chunk(2, 1)
            return torch.cat([right, left * right], 1)
        if what == "shift":
            return a * self.shift + self.shift
        if what == "shared":
            return self.shared(a.transpose(0, 1)).transpose(0, 1)
        return a + b  # "add"


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


class Both(nn.Module):
    """Takes a list and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: list[Tensor]) -> dict[str, Tensor]:
        return {"sum": self.line(x[0]).sin() + x[1]}


OPERATIONS = ["block", "both", "mean", "stride", "split", "shift", "shared", "add", "write", "keep"]


def all_gradients(model: nn.Module, passes: int) -> list[Tensor]:
    """Of the input and all weights that have one; the tensors that were kept are in the loss."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x.to(dtype).requires_grad_()
    for _ in range(passes):
        loss = model(x).square().mean() * 8
        loss = loss + sum(kept.sum() * 0.25 for kept in model.kept)
        (loss + model.blocks[0].line.weight.square().sum()).backward()
    return [t.grad for t in (x, *model.parameters()) if t.grad is not None]


def near(ours: list[Tensor], exact: list[Tensor]) -> bool:
    """Whether they differ by no more than float32 rounds in 30 operations, in any weight."""
    bound = 128 * torch.finfo(torch.float32).eps
    errors = [
        (a - b).abs().max() / b.abs().max().clamp(min=1e-3)
        for a, b in zip(ours, exact, strict=True)
    ]
    return all(error <= bound for error in errors)


programs = st.lists(
    st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 30), st.integers(0, 30)),
    min_size=4,
    max_size=14,
).filter(lambda program: any(what in ("block", "both") for what, *_ in program))


@given(
    program=programs,
    exponents=st.lists(st.integers(-20, 20), min_size=5, max_size=5),
    data=st.data(),
)
@settings(max_examples=60)
def test_gradients_of_any_graph_are_right(
    program: list[tuple[str, int, int]], exponents: list[int], data: st.DataObject
) -> None:
    torch.manual_seed(0)
    model = Anything(program)
    exact = all_gradients(copy.deepcopy(model).double(), 1)
    blocks = BlockScales(model)
    if data.draw(st.booleans(), label="measures"):
        plant(blocks, exponents)
    else:
        calm(blocks, exponents)
    assert near(all_gradients(model, 1), exact)
    # The graph of a later pass may be another one.
    other = data.draw(programs, label="other program")
    model.program = other
    reference = Anything(other).double()
    reference.load_state_dict(model.state_dict())
    assert near(all_gradients(model, 2), all_gradients(reference, 2))


def test_comparison_sees_a_wrong_scale() -> None:
    program = [("block", 0, 0), ("mean", 1, 0), ("block", 2, 1)]
    torch.manual_seed(0)
    model = Anything(program)
    exact = all_gradients(copy.deepcopy(model).double(), 1)
    blocks = BlockScales(model)
    calm(blocks, [3, 4, 0, 0, 0])
    assert near(all_gradients(model, 1), exact)
    factor = blocks._hooks.factor
    blocks._hooks.factor = lambda *way: factor(*way) * (2 if way == (1, 0) else 1)
    assert not near(all_gradients(model, 1), exact)


# Passes that do not measure, with borders only where scales change.


class Chain(nn.Module):
    """Residual blocks one after the other, the third of which can be asked to write in place."""

    def __init__(self, act: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(5))
        self.act = act
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for place, block in enumerate(self.blocks):
            x = block(x)
            self.seen.append(x)
            if place == 2 and self.act is not None:
                x = self.act(x)
        return x


EQUAL = [[7, 7, 7, 7, 7], [0, 0, 7, 7, 7], [7, 7, 0, 0, -5], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("exponents", EQUAL, ids=str)
def test_blocks_with_equal_scales_have_no_border_between_them(exponents: list[int]) -> None:
    x = torch.randn(4, WIDTH)
    expected = gradients(build(Chain), x, passes=2)
    model = build(Chain)
    blocks = BlockScales(model)
    calm(blocks, exponents)
    out = model(x)
    found, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        found.add(getattr(node, "route", (0, 0, 0))[1:])
        waiting += [near for near, _ in node.next_functions if near is not None]
    changes = {(n + 1, n) for n in range(4) if exponents[n] != exponents[n + 1]}
    last = {(-1, 4)} if any(exponents) else set()
    assert found - {(0, 0)} == changes | last
    assert same(gradients(model, x, passes=2), expected)


def test_loss_may_use_what_lies_between_blocks_without_borders() -> None:
    def run(model: Chain) -> list[Tensor]:
        model.zero_grad()
        out = model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype))
        penalty = sum(param.square().sum() for param in model.parameters())
        (out.square().mean() + model.seen[1].mean() + model.seen[3].sum() + penalty).backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = run(build(Chain).double())
    model = build(Chain)
    calm(BlockScales(model), [7] * 5)
    assert near(run(model), expected)


def test_write_to_an_input_without_a_border_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model[1].forward = lambda x: x.tanh_() if model.writes else x.tanh()
    model.writes = False
    blocks = BlockScales(model, [model[0], list(model[1:])])
    model(torch.ones(1, WIDTH)).sum().backward()
    calm(blocks, [3, 3])
    model.writes = True
    with pytest.raises(SettingError, match="Block '1' writes to one of its inputs in place"):
        model(torch.ones(1, WIDTH))


def test_weights_may_be_frozen_replaced_and_moved() -> None:
    x = torch.randn(4, WIDTH)
    model, other = build(Chain), build(Chain)
    calm(BlockScales(model), [7] * 5)
    for change in ("nothing", "freeze", "thaw", "data", "parameter", "nothing"):
        for net in (model, other):
            line = net.blocks[1].wide
            if change in ("freeze", "thaw"):
                line.weight.requires_grad_(change == "thaw")
            elif change == "data":
                line.weight.data = line.weight.data * 2
            elif change == "parameter":
                line.weight = nn.Parameter(line.weight.detach() * 2)
            with torch.no_grad():
                line.bias.add_(1.0)  # as an optimizer does
        assert same(gradients(model, x), gradients(other, x)), change
        for net in (model, other):  # a block on its own, outside of a pass of the model
            net.zero_grad()
            net.blocks[1].wide.weight.data = net.blocks[1].wide.weight.data * 2
            net.blocks[1](x).square().sum().backward()
        pairs = zip(model.blocks[1].parameters(), other.blocks[1].parameters(), strict=True)
        assert all(a.grad is b.grad is None or torch.equal(a.grad, b.grad) for a, b in pairs)


def test_several_forward_passes_before_a_backward_pass() -> None:
    def run(model: Chain) -> list[Tensor]:
        model.zero_grad()
        losses = [model(torch.full((2, WIDTH), float(n))).square().mean() for n in range(3)]
        sum(losses).backward(retain_graph=True)
        sum(losses[1:]).backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = run(build(Chain))
    model = build(Chain)
    calm(BlockScales(model), [7, 7, 3, 3, 3])
    assert same(run(model), expected)


def test_scales_that_come_late_move_in_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    torch.manual_seed(0)
    model = Pooled()
    x, labels = positions(0, 8)
    blocks = BlockScales(model, every=2)
    for _ in range(NUM_EARLY):
        step(model, x, labels)
        blocks.update()
    found = blocks.state_dict()
    plant(blocks, [0] * len(blocks.names))
    event = Event()

    def send(at_once: bool) -> None:
        assert not at_once
        blocks._awaited = blocks._state.exponents.clone(), event

    monkeypatch.setattr(blocks, "_send", send)
    step(model, x, labels)
    assert blocks._hooks.measures
    blocks.update()
    assert not any(blocks.exponents.values())
    assert not blocks._hooks.measures  # not before those are there
    step(model, x, labels)  # and passes are right meanwhile
    blocks.update()
    assert event.waited == 1
    assert any(blocks.exponents.values())
    assert blocks._hooks.measures
    for _ in range(12):
        step(model, x, labels)
        blocks.update()
    assert dead(model) == []
    assert len(set(blocks.exponents.values())) == len(set(found["exponents"].values()))
    copy.deepcopy(blocks)


# Gaps.


def halve(x: Tensor) -> Tensor:
    return (x * 0.5).transpose(0, 1).transpose(0, 1)


@pytest.mark.parametrize("measures", [True, False])
def test_backward_pass_that_ends_in_a_gap_leaves_nothing_behind(measures: bool) -> None:
    def act(x: Tensor) -> Tensor:
        return x * act.shift

    def run(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        loss = model(torch.ones(2, WIDTH)).square().mean()
        (alone,) = torch.autograd.grad(loss, act.shift, retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [alone, *(param.grad.clone() for param in model.parameters())]

    act.shift = torch.ones(WIDTH).requires_grad_()
    expected = run(build(lambda: Chain(act)))
    act.shift = torch.ones(WIDTH).requires_grad_()
    model = build(lambda: Chain(act))
    blocks = BlockScales(model)
    calm(blocks, [7, 7, 3, 5, 5]) if not measures else plant(blocks, [7, 7, 3, 5, 5])
    assert same(run(model), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hook_on_a_tensor_before_a_block_is_called_with_its_own_gradient(when: str) -> None:
    heard: list[Tensor] = []
    kept: list[Tensor] = []

    def act(x: Tensor) -> Tensor:
        x = x * 0.5
        kept[:] = [x]
        if when == "before":
            x.register_hook(heard.append)
        return x

    grads = []
    for scaled in (False, True):
        model = build(lambda: Chain(act))
        if scaled:
            plant(BlockScales(model), [7, 7, 3, 5, 5])
        loss = model(torch.ones(2, WIDTH)).square().mean()
        if when == "after":
            kept[0].register_hook(heard.append)
        loss.backward()
        grads.append([param.grad for param in model.parameters()])
    assert same(*grads)
    assert torch.equal(*heard)


@pytest.mark.parametrize("num", [0, 1, 2])
@pytest.mark.parametrize("measures", [True, False])
def test_output_whose_gradient_is_kept_gets_it_through_operations(measures: bool, num: int) -> None:
    kept: list[Tensor] = []

    def act(x: Tensor) -> Tensor:
        x.retain_grad()
        kept.append(x)
        for _ in range(num):
            x = torch.sin(x)
        return x

    x = torch.randn(2, WIDTH)
    expected = gradients(build(lambda: Chain(act)), x)
    model = build(lambda: Chain(act))
    blocks = BlockScales(model)
    if not measures:
        calm(blocks)
    plant(blocks, [7, 7, 3, 5, 5])
    assert same(gradients(model, x), expected)
    assert torch.equal(*[each.grad for each in kept])


class Around(Chain):
    """The input of block 3, whose gradient is halved and kept, is also added to its output."""

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            before, x = x, block(x)
            if place == 2:
                x.register_hook(lambda grad: grad / 2)
                x.retain_grad()
                self.seen = [x]
            if place == 3:
                x = x + before * 0.5
        return x


@pytest.mark.parametrize("measures", [True, False])
def test_hook_on_an_input_is_called_with_what_comes_around_the_block_too(measures: bool) -> None:
    x = torch.randn(2, WIDTH)
    model = build(Around)
    expected = [*gradients(model, x), model.seen[0].grad]
    model = build(Around)
    blocks = BlockScales(model)
    if not measures:
        gradients(model, x)
        calm(blocks)
    plant(blocks, [7, 7, 3, 5, -5])
    assert near([*gradients(model, x), model.seen[0].grad], expected)
    assert blocks.report()[4].unscaled_because == "the gradient of an input is kept, or has a hook"


class Double(torch.autograd.Function):
    """A function that gaps cannot call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def many(x: Tensor) -> Tensor:
    for _ in range(65):
        x = x + 0.01
    return x


def recomputed(x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.sin(x * x), x, use_reentrant=False)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (halve, ""),
        (Double.apply, "DoubleBackward is a Python function of autograd"),
        (many, "there are more than 64 operations"),
        (recomputed, "its saved tensors are packed, as by a checkpoint"),
    ],
)
def test_what_cannot_be_carried_is_unscaled_and_reported(act: Any, reason: str) -> None:
    x = torch.randn(4, WIDTH)
    expected = gradients(build(lambda: Chain(act)), x)
    model = build(lambda: Chain(act))
    blocks = BlockScales(model)
    plant(blocks)
    for _ in range(2):
        assert same(gradients(model, x), expected)
        calm(blocks)
    reports = blocks.report()
    assert [each.unscaled_because for each in reports] == ["", "", "", reason, ""]
    assert (f"inputs are unscaled: {reason}" in str(reports)) == bool(reason)


@pytest.mark.parametrize("measures", [True, False])
def test_gap_before_a_checkpointed_block_is_carried_through(measures: bool) -> None:
    class Recomputed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, halve(torch.sin(x)), use_reentrant=False)
            return x

    x = torch.randn(4, WIDTH)
    expected = gradients(build(Recomputed), x)
    model = build(Recomputed)
    blocks = BlockScales(model)
    if measures:
        plant(blocks)
    else:
        gradients(model, x)
        calm(blocks)
    assert same(gradients(model, x), expected)
    assert not any(each.unscaled_because for each in blocks.report())


class Towers(nn.Module):
    """Blocks that all use what many operations, or a few, have made of the first block's output."""

    def __init__(self, num_operations: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.num_operations = num_operations

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for _ in range(self.num_operations):
            x = torch.sin(x)
        return sum(block(x) for block in self.blocks[1:])


@pytest.mark.parametrize(("num", "unscaled"), [(8, 0), (9, 2)])
def test_many_operations_are_carried_through_once(num: int, unscaled: int) -> None:
    x = torch.randn(4, WIDTH)
    model = build(lambda: Towers(num))
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    blocks = BlockScales(model)
    for _ in range(2):
        plant(blocks)
        model.zero_grad()
        model(x).square().mean().backward()
        assert near([p.grad for p in model.parameters()], [p.grad for p in exact.parameters()])
        assert sum(bool(each.unscaled_because) for each in blocks.report()) == unscaled
        calm(blocks)


class Ends(nn.Module):
    """Weights before the first block, between blocks, and after the last; one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, WIDTH)
        self.place = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(torch.arange(4)) + self.place
        for block in self.blocks:
            x = block(x * self.place)
        return x @ self.tokens.weight.T


@pytest.mark.parametrize("measures", [True, False])
def test_weights_outside_of_blocks_are_right(measures: bool) -> None:
    expected = gradients(build(Ends), torch.ones(1))
    model = build(Ends)
    blocks = BlockScales(model)
    plant(blocks, [5, 9, 3]) if measures else calm(blocks, [5, 9, 3])
    assert same(gradients(model, torch.ones(1)), expected)
    assert not blocks._hooks.reasons


def test_embedding_before_the_first_block_keeps_small_gradients() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(4, 16).half()
            self.blocks = nn.ModuleList(Damped(16, 16).half() for _ in range(24))

        def forward(self, x: Tensor) -> Tensor:
            x = self.tokens(x)
            for block in self.blocks:
                x = block(x)
            return x

    torch_has.grad_dtype()
    torch.manual_seed(0)
    model = Deep()
    blocks = BlockScales(model)
    for _ in range(6):
        model.zero_grad()
        model(torch.arange(4)).float().square().sum().backward()
        blocks.update()
    assert model.tokens.weight.grad.dtype is torch.float32
    assert 0 < model.tokens.weight.grad.abs().max() < 2.0**-40
    blocks.remove()
    assert model.tokens.weight.grad_dtype is torch.float16


# What is said about it.


def test_report_says_what_vanished_and_where() -> None:
    torch.manual_seed(0)
    model = Pooled()
    blocks = BlockScales(model)
    x, labels = positions(0, 8)
    step(model, x, labels)
    blocks.update()
    report = blocks.report()
    assert [block.name for block in report] == blocks.names
    assert [block.exponent for block in report] == list(blocks.exponents.values())
    assert report[0].vanished[:2] == ("outputs", "blocks.0.line.weight")
    assert set(report.never) <= {name for name, _ in model.named_parameters()}
    assert "blocks.0.line.weight" in report.never
    last = report[-1]
    assert last.vanished == ()
    low, high = last.range
    grads = [param.grad.abs().max().log2().item() for param in model.blocks[-1].parameters()]
    assert low < min(grads) + 1e-6
    assert high > max(grads) - 1e-6
    assert list(last.weights.values()) == pytest.approx(grads)
    lines = str(report).splitlines()
    assert lines[1].startswith("blocks.0")
    assert "vanished: outputs, blocks.0.line.weight" in lines[1]
    assert lines[-1].startswith("never had a gradient: blocks.0.line.weight")


def test_weights_that_never_get_a_gradient_are_named() -> None:
    model = build(Chain)
    blocks = BlockScales(model)
    model.act = lambda x: x * 0.0
    for _ in range(NUM_EARLY - 1):
        gradients(model, torch.ones(1, WIDTH))
        blocks.update()
    gradients(model, torch.ones(1, WIDTH))
    with pytest.warns(
        UserWarning,
        match=r"first 16 updates of BlockScales: blocks\.0\.\w+\.weight, .* and 15 more",
    ):
        blocks.update()
    gradients(model, torch.ones(1, WIDTH))
    blocks.update()  # once
