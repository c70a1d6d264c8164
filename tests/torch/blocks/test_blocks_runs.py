"""Blocks that are called one after the other have no hooks and no borders, and are right all the
same: also in a pass that turns out to be another one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_has
from block_models import plant
from gradscale.torch.blocks import BlockScales, runs
from gradscale.torch.blocks.hooks import BlockHooks

torch_has.input_metadata()
NUM_BLOCKS, WIDTH = 7, 4
EXPONENTS = [12, 12, 12, 6, 6, 0, 0]
NUM_EARLY = 16


class Stop(Exception):
    """Ends a forward pass in the middle."""


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x))


class Times(Line):
    """Nobody else has the gradients of its weights, so they are written over."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.line.weight.mean(0)) + self.line.bias


class Recomputed(Line):
    """Computes a part of itself once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda x: torch.tanh(self.line(x)), x, use_reentrant=False)


class Dropped(Line):
    """Returns its input if it is `dropped`, as with stochastic depth."""

    dropped = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.dropped else super().forward(x)


class Acts(nn.Module):
    """Blocks one after the other, and what happens after some of them, which can be changed."""

    def __init__(self, acts: dict[int, str], kind: type[Line] = Line) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.acts = acts
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        for place, block in enumerate(self.blocks):
            before, x = x, block(x)
            act = self.acts.get(place, "")
            if act == "step":
                x = x.mean(1, keepdim=True)
            elif act == "step kept":
                self.kept.append(x)
                x = x * 2
            elif act == "step aside":
                aside, x = x, x.sin()
                self.kept.append(aside.detach() * x)
                del aside
            elif act == "steps":
                x = x.cos() * 2
            elif act == "mean":
                x = x.mean(1, keepdim=True) + x
            elif act == "skip":
                x = x + before * 0.5
            elif act == "keep":
                self.kept.append(x)
            elif act == "keep before":
                self.kept.append(before)
            elif act == "aside":
                self.kept.append(x.sin())
            elif act == "write":
                x = x.clone().add_(before)
            elif act == "weight":
                x = x @ self.blocks[(place + 1) % NUM_BLOCKS].line.weight
            elif act == "again":
                x = block(x)
            elif act == "other":
                x = self.blocks[(place + 3) % NUM_BLOCKS](x)
            elif act == "hook":
                x.register_hook(lambda grad: grad + 1)
            elif act == "frozen":
                with torch.no_grad():
                    x = block(x) + x
            elif act == "stop":
                self.kept.append(x)
                raise Stop
            del before
        return self.head(x)


ACTS = [
    *("mean", "skip", "keep", "keep before", "aside", "write", "weight", "again", "other"),
    *("hook", "frozen", "stop", "step", "step kept", "step aside", "steps"),
]


def gradients(model: Acts, passes: int = 1, *, clear: bool = True) -> list[Tensor]:
    """Of all weights, with the tensors that were kept in the loss, and a penalty on a weight."""
    if clear:
        model.zero_grad()
    like = model.head.weight
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(passes):
        loss = model.blocks[2].line.weight.square().sum()
        try:
            loss = loss + model(x.to(like)).square().mean()
        except Stop:
            pass
        (loss + sum(kept.sum() * 0.25 for kept in model.kept)).backward()
    model.kept = []
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def near(ours: list[Tensor], exact: list[Tensor]) -> bool:
    """Whether they differ by no more than float32 rounds in some 60 operations."""
    bound = 256 * torch.finfo(torch.float32).eps
    pairs = zip(ours, exact, strict=True)
    return all((a - b).abs().max() <= bound * b.abs().max().clamp(min=1e-3) for a, b in pairs)


def settled(
    acts: dict[int, str], exponents: list[int] = EXPONENTS, kind: type[Line] = Line
) -> tuple[Acts, BlockScales]:
    """A model after passes that measured, with scales."""
    torch.manual_seed(0)
    model = Acts(acts, kind)
    blocks = BlockScales(model)
    gradients(model)
    blocks._num_updates = NUM_EARLY
    blocks.update()
    plant(blocks, exponents)
    assert not blocks._hooks.measures
    return model, blocks


def exact_of(model: Acts, passes: int = 1) -> list[Tensor]:
    """The gradients in float64, without scales."""
    reference = Acts(model.acts, type(model.blocks[0])).double()
    reference.load_state_dict(model.state_dict())
    return gradients(reference, passes)


def inner(blocks: BlockScales) -> set[int]:
    return blocks._hooks.runs._inner


def callers(model: nn.Module) -> int:
    """How many modules are not called by torch."""
    return sum("_compiled_call_impl" in module.__dict__ for module in model.modules())


def test_blocks_of_a_run_have_no_hooks_and_no_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks = settled({})
    assert inner(blocks) == set(range(NUM_BLOCKS - 2))
    for name in ("_enter", "_leave"):
        monkeypatch.setattr(BlockHooks, name, lambda *_: pytest.fail("a hook was called"))
    changes: list[float] = []
    made = runs.Change
    monkeypatch.setattr(
        runs, "Change", lambda nr, factor, live: changes.append(factor) or made(nr, factor, live)
    )
    out = model(torch.randn(2, 3, WIDTH))
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        assert not hasattr(node, "route")
        waiting += [near for near, _ in node.next_functions if near is not None]
    assert changes == [2.0**6, 2.0**6]  # from 6 to 12, and from 0 to 6
    assert callers(model) == 0


@given(
    first=st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.sampled_from(ACTS), max_size=2),
    then=st.dictionaries(st.integers(0, NUM_BLOCKS - 1), st.sampled_from(ACTS), max_size=3),
    exponents=st.lists(st.sampled_from([-6, 0, 6, 12]), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
)
@settings(max_examples=25)
def test_gradients_are_right_whatever_the_next_pass_is(
    first: dict[int, str], then: dict[int, str], exponents: list[int]
) -> None:
    model, blocks = settled(first, exponents)
    for acts, passes in ((first, 1), (then, 2), (then, 1), (first, 2)):
        model.acts = acts
        assert near(gradients(model, passes), exact_of(model, passes))
        blocks.update()
        assert callers(model) == 0
    assert not blocks._hooks.measures


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", [Line, Times])
def test_gradients_of_a_pass_with_another_graph_are_right(act: str, kind: type[Line]) -> None:
    for place in (1, 4):
        model, _ = settled({}, kind=kind)
        model.acts = {place: act}
        assert near(gradients(model), exact_of(model))


def test_no_gradient_is_carried_past_a_hook() -> None:
    model, _ = settled({}, [0, 0, 0, -1, 0, 0, 0])
    model.acts = {0: "hook", 2: "steps"}
    for _ in range(2):
        assert near(gradients(model), exact_of(model))


def test_block_may_follow_one_without_a_border_that_has_a_checkpoint() -> None:
    model, _ = settled({0: "mean"}, [12, 0, 0, 0, 0, 0, 0], kind=Recomputed)
    model.acts = {0: "mean", 4: "other"}  # block 0 after block 4
    for _ in range(2):
        assert near(gradients(model), exact_of(model))


@pytest.mark.parametrize("act", ["skip", "keep", "keep before", "aside", "write", "step kept"])
def test_comparison_sees_a_use_that_is_not_noticed(act: str) -> None:
    model, blocks = settled({})
    model.acts = {1: act}
    blocks._hooks.runs._share = lambda maker: None
    assert not near(gradients(model), exact_of(model))


def test_comparison_sees_scales_that_hold_before_a_pass_has_ended() -> None:
    model, blocks = settled({})
    model.acts = {1: "stop"}
    begin, hooks = blocks._hooks.runs.begin, blocks._hooks
    hooks.runs.begin = lambda: (begin(), setattr(hooks.terms, "holds", True))
    assert not near(gradients(model), exact_of(model))


@pytest.mark.parametrize("act", [a for a in ACTS if a not in ("stop", "frozen", "weight", "step")])
def test_pass_with_another_graph_is_unscaled_once(act: str) -> None:
    model, blocks = settled({})
    model.acts = {2: act}
    holds = []
    for _ in range(3):
        gradients(model)
        holds.append(blocks._hooks.terms.holds)
        blocks.update()
    assert holds == [False, True, True]
    assert 0 in inner(blocks)  # others are called as before


@pytest.mark.parametrize(
    ("num_last", "want"),
    [(7, []), (3, []), (2, []), (1, [5]), (0, [5, 6])],
)
def test_last_run_has_no_borders_if_its_scale_is_one(
    num_last: int, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, blocks = settled({}, [*[6] * (NUM_BLOCKS - num_last), *[0] * num_last])
    departed: list[int] = []
    depart = BlockHooks.depart
    monkeypatch.setattr(
        BlockHooks, "depart", lambda self, *args: departed.append(args[0]) or depart(self, *args)
    )
    for _ in range(3):
        assert near(gradients(model), exact_of(model))
        assert blocks._hooks.terms.holds
        blocks.update()
    assert departed == want * 3


@pytest.mark.parametrize("first", [{}, {2: "step"}])
def test_one_operation_between_blocks_belongs_to_their_run(
    first: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, blocks = settled(first)
    assert inner(blocks) == set(range(NUM_BLOCKS - 2))
    monkeypatch.setattr(BlockHooks, "depart", lambda *_: pytest.fail("there is a border"))
    model.acts = {2: "step"}
    for _ in range(2):
        assert near(gradients(model), exact_of(model))
        assert blocks._hooks.terms.holds
        blocks.update()


def test_every_way_that_gradients_come_in() -> None:
    model, _ = settled({})
    exact = exact_of(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    assert near([g - 0.5 for g in gradients(model, clear=False)], exact)
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = model(x.float()).square().mean() + model.blocks[2].line.weight.square().sum()
    assert near(list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)), exact)
    model.zero_grad()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert near([param.grad for param in model.parameters()], [2 * grad for grad in exact])
    assert near(list(torch.autograd.grad(loss, [model.blocks[1].line.weight])), [exact[2]])


def test_hooks_of_weights_are_called_with_ordinary_gradients() -> None:
    model, _ = settled({})
    exact, seen = exact_of(model), {}
    for place, param in enumerate(model.parameters()):
        if place % 2:
            param.register_hook(lambda grad, place=place: seen.update({place: grad.clone()}))
        else:
            param.register_post_accumulate_grad_hook(
                lambda param, place=place: seen.update({place: param.grad.clone()})
            )
    gradients(model)
    assert near([seen[place] for place in range(len(exact))], exact)


def test_weights_that_blocks_share_are_right() -> None:
    model, blocks = settled({})
    model.blocks[1].line.weight = model.blocks[4].line.weight
    reference = copy.deepcopy(model).double()
    reference.blocks[1].line.weight = reference.blocks[4].line.weight
    for hooks in (module._forward_hooks for module in reference.modules()):
        hooks.clear()
    for hooks in (module._forward_pre_hooks for module in reference.modules()):
        hooks.clear()
    assert near(gradients(model), gradients(reference))
    assert blocks._hooks.terms.holds


@pytest.mark.parametrize("act", ["aside", "keep", "skip", "mean"])
@pytest.mark.parametrize("exponents", [EXPONENTS, [0, 0, 0, 6, 6, 0, 0]], ids=str)
def test_input_that_a_block_returns_may_be_used_before(act: str, exponents: list[int]) -> None:
    model, blocks = settled({1: act}, exponents, kind=Dropped)
    model.blocks[2].dropped = True
    reference = Acts(model.acts, Dropped).double()
    reference.load_state_dict(model.state_dict())
    reference.blocks[2].dropped = True
    for _ in range(2):
        assert near(gradients(model), gradients(reference))
    assert blocks._hooks.terms.holds


def test_block_gets_a_hook_later() -> None:
    model, blocks = settled({})
    kept: list[Any] = []
    model.blocks[1].register_forward_hook(lambda module, args, output: kept.append(output))
    x = torch.randn(2, 3, WIDTH)
    model.zero_grad()
    (model(x).sum() + kept[0].sum()).backward()
    ours = [param.grad for param in model.parameters()]
    reference = Acts({1: "keep"}).double()
    reference.load_state_dict(model.state_dict())
    (reference(x.double()).sum() + reference.kept[0].sum()).backward()
    assert near(ours, [param.grad for param in reference.parameters()])
    assert len(kept) == 1
    assert blocks.exponents["blocks.0"] == EXPONENTS[0]
