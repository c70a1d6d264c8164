"""Where ranks could decide differently, wait, or count twice: each was found by looking for it."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import gradscale as gs
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import GradScaler, ShardedGradScaler
from gradscale.torch.distributed.groups import Shards
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.optim import SGD, AdamW, Lion
from ranks import everyone, on_ranks, run_check
from sharded_names import fully_shard
from shared_models import batch, ddp, fsdp2, loss_of, net

BEFORE = ShardedGradScaler("cpu", init_scale=2.0**8)
"""Made before there are ranks."""


def scaler_of_all(**settings: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**8, groups=dist.group.WORLD, **settings)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def compare_norms(model: nn.Module, twin: nn.Module, scaler: GradScaler) -> None:
    """Raises if the norm is not that of one process."""
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    scaler.backward(model(batch(0)).square().mean())
    norm = scaler.apply(optimizer).grad_norm
    twin(batch(0)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), math.inf)
    # Sums of 128 squares, and of the batch's 8 rows, in another order.
    assert math.isclose(norm, expected, rel_tol=136 * 2**-24), (norm, expected)


def check_meshes() -> None:
    """Raises if layers on different meshes, or groups that share ranks, count twice in the norm."""
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for groups in ("auto", dist.group.WORLD, dist.new_group([0, 1, 2, 3])):
        model = layers()
        twin = copy.deepcopy(model)
        fully_shard(model[0], mesh=flat)
        fully_shard(model[1], mesh=square)
        compare_norms(model, twin, GradScaler("cpu", init_scale=2.0**8, groups=groups))
    model = layers()
    both = [dist.group.WORLD, dist.new_group([0, 1, 2, 3])]
    compare_norms(model, copy.deepcopy(model), GradScaler("cpu", groups=both))
    pairs = [dist.new_group(each) for each in ([0, 1], [2, 3])]
    scaler = GradScaler("cpu", groups=[dist.group.WORLD, *map(Shards, pairs)])
    with pytest.raises(
        SettingError,
        match=r"have shards, but a group that contains all of them was passed as one with copies",
    ):
        scaler._pipeline.consensus.groups.among([])
    # Of every rank: two groups of three.
    ranks = [dist.new_group(each) for each in ([0, 1, 2], [1, 2, 3])]
    if dist.get_rank() in (1, 2):
        scaler = GradScaler("cpu", groups=ranks)
        with pytest.raises(
            SettingError,
            match=r"share the ranks \[1, 2\], so gradients would be counted twice in norms",
        ):
            scaler._pipeline.consensus.groups.among([])


def check_apart() -> None:
    """Raises if one scale is moved by optimizers of which different ranks know."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    one, other = layers()
    fully_shard(one, mesh=mesh["columns"])
    fully_shard(other, mesh=init_device_mesh("cpu", (4,)))
    both = [optim.SGD(each.parameters(), lr=0.0) for each in (one, other)]
    for policy in (gs.Dynamic(init_scale=2.0**8), gs.Headroom(init_scale=2.0**8)):
        scaler = GradScaler("cpu", policy=policy)
        for step in range(2):
            scaler.backward(other(one(batch(0))).square().mean())
            if step == 0 and dist.get_rank() == 0:
                one.weight.grad.to_local().fill_(math.inf)
            for each in both:
                scaler.step(each)
            scaler.update()
            for each in both:
                each.zero_grad()
            assert len(set(everyone(scaler.get_scale()))) == 1


def check_unsharded() -> None:
    """Raises if what FSDP1 has not sharded counts as often as there are ranks."""
    how: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for kind in ("ignored", "not sharded"):
        model = layers()
        twin = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and says so
            if kind == "ignored":
                wrapped = FullyShardedDataParallel(model, ignored_modules=[model[1]], **how)
            else:
                still = ShardingStrategy.NO_SHARD
                model[1] = FullyShardedDataParallel(model[1], sharding_strategy=still, **how)
                wrapped = FullyShardedDataParallel(model, **how)
        scaler = GradScaler("cpu", init_scale=2.0**8)
        scaler.name(wrapped)
        compare_norms(wrapped, twin, scaler)


def check_sizes() -> None:
    """Raises if a policy is told other sizes by ranks than by one process."""
    for policy in (gs.Headroom, gs.LogMax):
        for way in ("apply", "value", "unscale", "clip"):
            scales = []
            for groups in (None, dist.group.WORLD):
                model = net()
                optimizer = optim.SGD(model.parameters(), lr=0.0)
                scaler = GradScaler("cpu", policy=policy(), groups=groups)
                for _ in range(6):
                    scaler.backward(loss_of(model, batch(0)))
                    if way == "unscale":
                        scaler.unscale_(optimizer)
                    if way == "clip":
                        scaler.clip_grad_norm_(optimizer, 1e-3)
                    value = 100.0 if way == "value" else None
                    amax = scaler.apply(optimizer, clip_value=value).amax
                scales.append((scaler.get_scale(), float(amax)))
            assert scales[0] == scales[1], (policy, way, scales)


def check_bad_rank() -> None:
    """Raises if the rank to blame is another after a second look."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for way in ("step", "clip", "apply"):
        scaler = scaler_of_all()
        scaler.backward(loss_of(model, batch(0)))
        if dist.get_rank() == 1:
            model.wide.bias.grad.fill_(math.inf)
        if way == "clip":
            scaler.clip_grad_norm_(optimizer, 1.0)
        if way == "apply":
            scaler.apply(optimizer, clip_norm=1.0, clip_value=1.0)
        else:
            scaler.step(optimizer)
        assert scaler.outcome().bad_rank == 1, way
        optimizer.zero_grad()


def check_idle() -> None:
    """Raises if a scale grows by steps for which nobody has gradients."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of_all(growth_interval=1)
    for step in range(4):
        if step == 0:
            scaler.backward(loss_of(model, batch(0)))
        assert bool(scaler.apply(optimizer).applied) == (step == 0)
    assert scaler.get_scale() == 2.0**9


def check_some() -> None:
    """Raises if a rank without gradients, or without a loss for them, is not let go along."""
    rank, model = dist.get_rank(), net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler_of_all()
    for step in range(2):
        if step == 0 or rank == 0:
            scaler.backward(loss_of(model, batch(step)))
        scaler.unscale_(optimizer)
        scaler.update()  # without a step
        optimizer.zero_grad()
    for step in range(3):
        if rank == 0 or step == 0:
            scaler.backward(loss_of(model, batch(step)))
        for param in model.parameters():  # as one may do it without DDP
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad)
        assert scaler.apply(optimizer).applied
    assert len(set(everyone(scaler.get_scale()))) == 1


def check_closure() -> None:
    """Raises if ranks part where one has bad gradients before a step with a closure."""
    for bad in (0, 1):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = scaler_of_all()

        def closure(optimizer: Any = optimizer, scaler: Any = scaler, model: Any = model) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(0))
            scaler.backward(loss)
            return loss

        scaler.backward(loss_of(model, batch(0)))
        if dist.get_rank() == bad:
            model.wide.bias.grad.fill_(math.inf)
        scaler.step(optimizer, closure)
        scaler.update()
        assert (
            everyone((bool(scaler.outcome().applied), scaler.get_scale())) == [(False, 2.0**7)] * 2
        )


def check_stages() -> None:
    """Raises if a stage without a loss divides by another scale than was multiplied by."""
    rank, world = dist.get_rank(), Shards(dist.group.WORLD)
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [optim.SGD([param], lr=0.0) for param in params]
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=1, groups=world)

    def backward(param: nn.Parameter) -> None:
        if rank == 0:
            grad = torch.empty(2)
            dist.recv(grad, 1)
            param.backward(grad)
        else:
            received = torch.ones(2, requires_grad=True)
            scaler.scale((received * param).sum()).backward()
            dist.send(received.grad, 0)

    def take(which: int) -> None:
        scaler.unscale_(optimizers[which])
        assert params[which].grad.tolist() == [1.0, 1.0]
        scaler.step(optimizers[which])
        scaler.update()
        optimizers[which].zero_grad()

    for step in range(4):
        backward(params[step % 2])
        take(step % 2)
    for keep in (True, False):
        for param in params:
            backward(param)
        take(1)
        if not keep:
            optimizers[0].zero_grad()
            backward(params[0])
        take(0)  # gradients of the iteration before, or new ones
    # A second update() for the same passes does not count.
    assert everyone(scaler.get_scale()) == [2.0**15] * 2
    with pytest.raises(SettingError, match=r"ranks without a loss do not.*loss\.float\(\)"):
        scaler.scale(params[0].half().sum())


def check_unreduced() -> None:
    """Raises if gradients that nobody reduces are set aside."""
    for setup in (ddp(), fsdp2()):
        model: Any = setup.call
        for how in ({"droppable": True}, {"loss_id": "other"}):
            scaler = GradScaler("cpu")
            scaler.name(model)
            waits = hasattr(model, "set_requires_gradient_sync")
            with nullcontext() if waits else model.no_sync():
                if waits:
                    model.set_requires_gradient_sync(False)
                with pytest.raises(
                    CallOrderError, match=r"must be reduced in every backward pass .*no_sync"
                ):
                    scaler.backward(loss_of(model, batch(0)), **how)
                scaler.backward(loss_of(model, batch(0)))
                if waits:
                    model.set_requires_gradient_sync(True)
            with pytest.raises(
                CallOrderError, match=r"must be reduced in every backward pass .*no_sync"
            ):
                scaler.backward(loss_of(model, batch(0)), **how)
            scaler.backward(loss_of(model, batch(0)))
            optimizer = optim.SGD(setup.params, lr=0.0)
            assert scaler.apply(optimizer).applied


def check_before() -> None:
    """Raises if a scaler that is older than the ranks decides alone."""
    param = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([param], lr=0.1)
    BEFORE.scale(param.sum()).backward()
    if dist.get_rank() == 1:
        param.grad.fill_(math.inf)
    BEFORE.step(optimizer)
    BEFORE.update()
    assert BEFORE.get_scale() == 2.0**7
    assert torch.equal(param, torch.ones(2))
    with pytest.warns(UserWarning, match="The loss is float16"):  # and all ranks have one
        BEFORE.scale(param.half().sum())


def check_masters() -> None:
    """Raises if masters of shards are not those of one process."""
    for make in (AdamW, SGD, Lion):
        for dtype in (torch.float16, torch.bfloat16):
            for master in ("float32", "split"):
                weights = []
                for sharded in (True, False):
                    model = layers().to(dtype)
                    if sharded:
                        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
                    optimizer: Any = make(model.parameters(), lr=0.01, master=master)
                    for step in range(3):
                        for place, param in enumerate(model.parameters()):
                            made = torch.Generator().manual_seed(10 * step + place)
                            grad = torch.randn(8, 8, generator=made).to(dtype)
                            here = grad.chunk(2)[dist.get_rank()]
                            if sharded:
                                param.grad = param.detach().clone()
                                param.grad.to_local().copy_(here)
                            else:
                                param.grad = grad
                        optimizer.step()
                    weights.append(
                        [p.full_tensor() if sharded else p.detach() for p in model.parameters()]
                    )
                for one, other in zip(*weights, strict=True):
                    assert torch.equal(one, other), (make, dtype, master)


def check_paths() -> None:
    """Raises if ranks of which one goes the long way learn of penalties or drift otherwise."""
    from gradscale.torch.distributed import drift

    warnings.simplefilter("ignore", RuntimeWarning)  # of overflows in the interpreter
    rank = dist.get_rank()
    drift.EVERY = 2
    with kernels.use("triton"):
        for policy in (gs.Dynamic(init_scale=2.0**8), gs.Headroom(init_scale=2.0**8)):
            model = layers()  # small: the interpreter takes its time for every tensor
            optimizer = AdamW(model.parameters(), lr=0.1)
            scaler = GradScaler("cpu", policy=policy, groups=dist.group.WORLD)
            for step in range(3):
                x = batch(step).requires_grad_()
                if rank == 0:
                    scaler.grad(loss_of(model, x) * (math.inf if step == 1 else 1.0), [x])
                scaler.backward(loss_of(model, x))
                scaler.apply(optimizer)
                assert len(set(everyone(scaler.get_scale()))) == 1, step
        stage = nn.Parameter(torch.ones(4))
        optimizer = AdamW([stage], lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**8, groups=Shards(dist.group.WORLD))
        for factor in (1.0, math.nan, math.inf):
            if rank == 0:  # a stage without a loss
                stage.grad = torch.full((4,), factor)
            else:
                scaler.backward(stage.sum() * factor)
            outcome = scaler.apply(optimizer)
            assert everyone(bool(outcome.loss_finite)) == [factor == 1.0] * 2
            assert everyone(scaler.get_scale()) == [2.0**8] * 2  # no scale is to blame
        optimizer = AdamW(model.parameters(), lr=0.1)
        scaler = scaler_of_all(on_drift="repair")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it repairs
            for step in range(4):
                dist.all_reduce(torch.ones(3))  # what DDP would do in its backward pass
                if rank == 0 or step != 2:
                    scaler.backward(loss_of(model, batch(step)))
                if step == 0 and rank == 1:
                    scaler._state.write(scale=scaler.get_scale() / 2)
                scaler.apply(optimizer)
        assert len(set(everyone(scaler.get_scale()))) == 1


@pytest.mark.parametrize(
    ("check", "world"),
    on_ranks(2, "before unsharded sizes bad_rank idle some closure stages unreduced masters")
    + on_ranks(4, "meshes apart"),
)
def test_ranks_stay_together(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)


def test_both_paths_learn_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion="3.4")
    run_check(__file__, "paths", 2, tmp_path, TRITON_INTERPRET="1")
