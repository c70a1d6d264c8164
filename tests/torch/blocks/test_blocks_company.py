"""Block scales together with torch.compile, checkpoints, DDP, FSDP2 and the scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import gradscale as gs
import torch_has
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import GradScaler
from gradscale.torch.blocks import BlockScales
from gradscale.torch.features import HAS_GRAD_DTYPE
from gradscale.torch.optim import AdamW
from ranks import on_ranks, run_check
from sharded_names import MixedPrecisionPolicy, fully_shard
from tensors import same

torch.set_num_threads(1)
WIDTH = 8


class Residual(nn.Module):
    """`x` and what two layers add to it, one of them checkpointed if asked."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return x + self.narrow(torch.tanh(self.wide(self.norm(x))))
        return x + self.narrow(checkpoint(self.inner, x, use_reentrant=self.reentrant))

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(self.norm(x)))


class Checkpointed(nn.Module):
    """Blocks that are computed once more in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def residuals() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(4)))


def plain() -> nn.Module:
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plant(blocks: BlockScales, extra: int = 0) -> None:
    """Gives the blocks very different scales."""
    state = blocks.state_dict()
    for place, name in enumerate(blocks.names):
        state["exponents"][name] = (7 * place) % 23 - 11 + extra
    blocks.load_state_dict(state)


def gradients(
    model: nn.Module, call: Callable[[Tensor], Tensor] | None = None, seed: int = 1, passes: int = 1
) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    for _ in range(passes):
        ((call or model)(x).square().mean() * 64).backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def near(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether they differ by no more than a few roundings of float16."""
    pairs = zip(ours, theirs, strict=True)
    return all((a - b).norm() <= 4 * torch.finfo(torch.float16).eps * b.norm() for a, b in pairs)


# torch.compile


def compiles(test: Any) -> Any:
    """A test that compiles. What torch's compiler (2.13) does itself, torch warns of."""
    for mark in (
        pytest.mark.usefixtures("_fresh_compiler"),
        pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
        pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    ):
        test = mark(test)
    return test


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch_has.replaced_weights_in_graphs()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@compiles
@pytest.mark.parametrize("make", [plain, residuals], ids=["plain", "residuals"])
def test_scales_come_out_again_compiled(make: Callable[[], nn.Module]) -> None:
    graphs: list[int] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    expected = gradients(build(make))
    model = build(make)
    blocks = BlockScales(model, every=2)
    call = torch.compile(model, backend=backend, fullgraph=True)
    assert same(gradients(model, call), expected)
    plant(blocks)
    for _ in range(3):
        assert same(gradients(model, call), expected)
        assert blocks._hooks.meters.read()[:3].ne(0).all()
        blocks.update()
    exponents = blocks.exponents
    for _ in range(16):
        blocks.update()
    gradients(model, call)
    assert len(graphs) == 1  # an update is no reason to compile again
    other = build(make)
    eager = BlockScales(other, every=2)
    gradients(other)
    eager.update()
    plant(eager)
    for _ in range(3):
        gradients(other)
        eager.update()
    assert eager.exponents == exponents


@compiles
def test_inductor_leaves_the_scales_out_too() -> None:
    call = torch.compile(model := build(plain), fullgraph=True)
    expected = gradients(model, call)
    torch._dynamo.reset()
    model = build(plain)
    blocks = BlockScales(model)
    plant(blocks)
    call = torch.compile(model, fullgraph=True)
    assert same(gradients(model, call), expected)
    assert blocks._hooks.meters.borders.ne(0).any()


@compiles
@pytest.mark.parametrize("way", ["before", "after", "in place"])
def test_blocks_can_be_compiled_one_by_one(way: str) -> None:
    expected = gradients(build(residuals))
    model = build(residuals)
    blocks = None if way == "before" else BlockScales(model)
    if way == "in place":
        for block in model:
            block.compile(backend="aot_eager")
    else:
        model = nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in model))
    blocks = blocks or BlockScales(model)
    plant(blocks)
    for _ in range(2):
        assert same(gradients(model), expected)
        assert blocks._hooks.meters.borders.ne(0).all()
        blocks.update()


@compiles
def test_scales_come_out_of_a_compiled_model_with_operations_between_blocks() -> None:
    expected = gradients(build(Ends))
    model = build(Ends)
    blocks = BlockScales(model)
    compiled = torch.compile(model, backend="aot_eager")

    def call(x: Tensor) -> Tensor:
        return compiled(x)

    for _ in range(2):
        plant(blocks)
        bound = 16 * torch.finfo(torch.float32).eps
        pairs = zip(gradients(model, call), expected, strict=True)
        assert all((a - b).norm() <= bound * b.norm() for a, b in pairs)
        for _ in range(17):
            blocks.update()


# Checkpoints


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_scales_come_out_of_checkpointed_blocks(reentrant: bool, measures: bool) -> None:
    def make() -> nn.Module:
        return Checkpointed(reentrant)

    expected = gradients(build(make), passes=2)
    model = build(make)
    blocks = BlockScales(model)
    if not measures:
        for _ in range(17):
            blocks.update()
    plant(blocks)
    assert same(gradients(model, passes=2), expected)
    if not measures:
        return
    assert blocks._hooks.meters.borders[0].ne(0).all()
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())


def test_scales_come_out_of_blocks_that_checkpoint_a_part() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Residual(reentrant=False) for _ in range(3)))

    expected = gradients(build(make))
    model = build(make)
    plant(BlockScales(model))
    assert same(gradients(model), expected)


def test_block_that_checkpoints_a_part_reentrantly_is_refused() -> None:
    model = nn.Sequential(*(Residual(reentrant=True) for _ in range(3)))
    BlockScales(model)
    with pytest.raises(SettingError, match="Block '2' checkpoints a part of itself"):
        gradients(model)


# The scaler


def test_training_with_the_scaler_is_the_same_with_and_without() -> None:
    losses = []
    for scaled in (False, True):
        model = build(residuals)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = GradScaler("cpu", policy=gs.Dynamic(init_scale=2.0**-10, growth_interval=3))
        blocks = BlockScales(model) if scaled else None
        losses.append([])
        for step in range(12):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            scaler.backward(loss)
            assert scaler.apply(optimizer, clip_norm=1.0).applied
            if blocks is not None:
                blocks.update()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1]
    assert any(blocks.exponents.values())  # they did move


def test_loss_with_a_scale_of_its_own_goes_with_blocks() -> None:
    model = build(residuals)
    blocks = BlockScales(model)
    plant(blocks)
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = build(residuals)
    before = [param.detach().clone() for param in model.parameters()]
    x = torch.randn(4, WIDTH)
    scaler.backward(model(x).square().mean())
    scaler.backward(model(x).abs().mean(), loss_id=1)
    assert scaler.apply(optimizer, zero_grad=False).applied
    (other(x).square().mean()).backward()
    (other(x).abs().mean()).backward()
    for param, theirs, old in zip(model.parameters(), other.parameters(), before, strict=True):
        assert torch.equal(param, old - theirs.grad)
    blocks.update()


# Two ranks


def sharded(kind: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A model, and how to call it."""
    model = build(plain if kind == "ddp" else residuals)
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # also on a machine with a GPU
    policy = MixedPrecisionPolicy()
    if kind == "half":
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for block in model:
        if kind == "parts":
            fully_shard(block.wide, mesh=mesh)
            fully_shard(block.narrow, mesh=mesh)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy), model


def whole(grads: list[Tensor]) -> list[Tensor]:
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]


def compare(kind: str) -> None:
    """Raises if gradients are not those that come out without scales."""
    rank = dist.get_rank()
    model, call = sharded(kind)
    expected = whole(gradients(model, call, seed=rank, passes=2))
    alike = near if kind == "half" else same
    model, call = sharded(kind)
    blocks = BlockScales(model)
    plant(blocks, extra=rank)  # ranks need not agree
    assert alike(whole(gradients(model, call, seed=rank, passes=2)), expected), kind
    assert blocks._hooks.meters.borders[0].ne(0).all(), kind
    blocks.update()
    assert alike(whole(gradients(model, call, seed=rank, passes=2)), expected), kind


def check_ddp() -> None:
    compare("ddp")


def check_blocks() -> None:
    compare("blocks")


def check_parts() -> None:
    compare("parts")


def check_half() -> None:
    compare("half")


class Ends(nn.Module):
    """Weights before the first block, between blocks and after the last, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.place = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.tokens(torch.arange(4)) + x)
        for block in self.blocks:
            x = block(x * self.place)
            x = x.mean(0, keepdim=True) + x
        return x @ self.tokens.weight.T


def ends(kind: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A model with weights outside of blocks, and how to call it."""
    model = build(Ends)
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if kind in ("half", "whole"):
        nn.init.normal_(model.tokens.weight, std=0.1)  # so that nothing is beyond float16
        nn.init.normal_(model.place, std=0.3)
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    apart = {"parts": (*model.blocks, model.first), "whole": ()}
    for module in apart.get(kind, model.blocks):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy), model


def check_gaps() -> None:
    """Raises if gradients of a model with weights between blocks are wrong."""
    rank = dist.get_rank()
    for kind in ("ddp", "blocks", "parts", *(("half", "whole") if HAS_GRAD_DTYPE else ())):
        model, call = ends(kind)
        expected = whole(gradients(model, call, seed=rank, passes=2))
        model, call = ends(kind)
        blocks = BlockScales(model)
        for _ in range(2):  # with borders everywhere, and only where scales change
            plant(blocks, extra=rank)
            ours = whole(gradients(model, call, seed=rank, passes=2))
            exact = zip(ours, expected, strict=True)
            half = kind in ("half", "whole")
            bound = 16 * torch.finfo(torch.float16 if half else torch.float32).eps
            assert all((a - b).norm() <= bound * b.norm() for a, b in exact), kind
            for _ in range(17):
                blocks.update()


def check_group() -> None:
    """Raises if ranks of a group do not agree."""
    rank = dist.get_rank()
    model, call = sharded("blocks")
    blocks = BlockScales(model, group=dist.group.WORLD)
    gradients(model, call, seed=rank)
    if rank:
        blocks._hooks.meters.borders[:, 1] *= 2.0**20
        blocks._hooks.meters.weights[-1] = float("nan")
    blocks.update()
    numbers: list[Any] = [None, None]
    dist.all_gather_object(numbers, blocks.state_dict())
    assert numbers[0] == numbers[1]
    assert any(numbers[0]["resting"].values())


def check_order() -> None:
    """Raises if a model that is sharded too late is not refused."""
    model = build(residuals)
    BlockScales(model)
    for block in model:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(CallOrderError, match=r"Call fully_shard\(\) first"):
        gradients(model)


def test_float16_weights_in_ddp_are_refused(one_rank: Any) -> None:
    torch_has.grad_dtype()
    model = build(residuals).half()
    call = nn.parallel.DistributedDataParallel(model)
    BlockScales(model)
    with pytest.raises(SettingError, match="DDP supports only float16 gradients"):
        call(torch.ones(1, WIDTH).half())


@pytest.mark.parametrize(("check", "world"), on_ranks(2, "ddp blocks parts half gaps group order"))
def test_two_ranks_get_the_gradients_they_get_without(
    check: str, world: int, tmp_path: Path
) -> None:
    run_check(__file__, check, world, tmp_path)
