"""Block scales on a CUDA device: without waiting for it, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from block_models import Pooled, positions
from gradscale.torch.blocks import BlockScales

pytestmark = pytest.mark.gpu
NUM_EARLY = 16


def step(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
    (nn.functional.cross_entropy(out.float(), labels) * 2.0**8).backward()


def net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, labels = positions(0, 8)
    return Pooled().cuda(), x.cuda(), labels.cuda()


def exact(model: nn.Module, x: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradients in float64."""
    other = Pooled().cuda().double()
    other.load_state_dict(model.state_dict())
    (nn.functional.cross_entropy(other(x.double()), labels) * 2.0**8).backward()
    return [param.grad for param in other.parameters()]


def near(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    bound = 48 * torch.finfo(torch.float16).eps
    return all((a - b).norm() <= bound * b.norm() for a, b in zip(ours, theirs, strict=True))


def lowered(blocks: BlockScales) -> dict[str, int]:
    """The exponents, all of which are lower now than they should be."""
    state = blocks.state_dict()
    state["exponents"] = {name: each - 12 for name, each in state["exponents"].items()}
    blocks.load_state_dict(state)
    return blocks.exponents


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_scales_move_without_waiting_for_the_device() -> None:
    model, x, labels = net()
    blocks = BlockScales(model, every=3)
    truth = exact(model, x, labels)
    for number in range(3 * NUM_EARLY):
        torch.cuda.set_sync_debug_mode("error" if number >= NUM_EARLY else "default")
        try:
            model.zero_grad()
            step(model, x, labels)
            blocks.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if number == 2 * NUM_EARLY:  # they come back
            moved = lowered(blocks)
    assert near([param.grad for param in model.parameters()], truth)
    assert blocks.exponents != moved
    assert blocks.exponents == blocks.state_dict()["exponents"]


@pytest.mark.parametrize("with_update", [True, False])
def test_scales_move_in_a_cuda_graph(with_update: bool) -> None:
    model, x, labels = net()
    blocks = BlockScales(model)
    truth = exact(model, x, labels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model.zero_grad()
            step(model, x, labels)
            blocks.update()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    before = lowered(blocks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, x, labels)
        if with_update:
            blocks.update()
    for _ in range(8):
        for param in model.parameters():
            param.grad.zero_()
        graph.replay()
        if not with_update:
            blocks.update()
    assert near([param.grad for param in model.parameters()], truth)
    assert blocks.exponents != before
