"""What ranks must agree on beside the matrix of test_agree.py, with real processes."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradscale as gs
import shared_models
from gradscale.errors import SettingError
from gradscale.torch import GradScaler
from gradscale.torch.distributed import consensus
from gradscale.torch.distributed.groups import Groups, Shards
from ranks import everyone, on_ranks, run_check
from sharded_names import fully_shard
from shared_models import OPTIMIZERS, WIDTH, batch, loss_of, net


def check_stages() -> None:
    """Raises if stages of a pipeline, which know nothing of one another, do not agree."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    scaler = GradScaler("cpu", init_scale=2.0**8, groups=Shards(dist.group.WORLD))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(4):
        loss = model(torch.ones(2, 4)).square().sum() * (math.nan if step == 3 and rank == 0 else 1)
        scaler.backward(loss)
        scale = scaler.get_scale()
        norms.append(sum(p.grad.div(scale).norm() ** 2 for p in model.parameters()).item())
        if step == 1 and rank == 1:
            model.bias.grad.fill_(math.inf)
        outcome = scaler.apply(optimizer)
        told = everyone((bool(outcome.applied), scaler.get_scale(), float(outcome.grad_norm)))
        assert len({each[:2] for each in told}) == 1
        assert told[0][0] == (step in (0, 2))
        if step in (0, 2):
            whole = math.sqrt(sum(everyone(norms[-1])))
            assert all(math.isclose(each[2], whole, rel_tol=1e-6) for each in told)
        if step == 1:
            assert float(outcome.bad_rank) == 1
            assert scaler.get_scale() == 2.0**7
        if step == 3:
            assert not outcome.loss_finite  # of one rank, and so of all
            assert scaler.get_scale() == 2.0**7


def check_together() -> None:
    """Raises if two optimizers, of which one is of sharded parameters, do not decide together."""
    rank = dist.get_rank()
    plain = nn.Linear(WIDTH, WIDTH)
    shards = nn.Linear(WIDTH, WIDTH)
    fully_shard(shards, mesh=init_device_mesh("cpu", (2,)))
    both = [optim.SGD(each.parameters(), lr=0.1) for each in (plain, shards)]
    scaler = GradScaler("cpu", init_scale=2.0**8)
    for step in range(3):
        scaler.backward((plain(batch(0)) + shards(batch(0))).square().mean())
        if step == 1 and rank == 1:
            plain.bias.grad.fill_(math.inf)  # of which the shards show nothing
        outcome = scaler.apply(both)
        told = everyone((bool(outcome.applied), scaler.get_scale()))
        assert told[0] == told[1] == (step != 1, 2.0**8 if step < 1 else 2.0**7)


def check_uneven() -> None:
    """Raises if a rank that has no more data, and scales no loss, does not go along."""
    rank = dist.get_rank()
    model = net()
    scaler = GradScaler(
        "cpu", init_scale=2.0**8, groups=Shards(dist.group.WORLD), growth_interval=2
    )
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if rank == 0 or step < 3:
            scaler.backward(loss_of(model, batch(step)))
        outcome = scaler.apply(optimizer)
        assert outcome.applied
        assert len(set(everyone(scaler.get_scale()))) == 1
    assert scaler.get_scale() == 2.0**11


def check_asks() -> None:
    """Raises if nonsense is taken for groups, or ranks without groups warn or spare the scale."""
    world = dist.group.WORLD
    with pytest.raises(SettingError, match=r"contains a process group twice.*Shards\(group, of="):
        GradScaler("cpu", groups=[world, Shards(world)])
    with pytest.raises(SettingError, match=r"Shards\(of=\.\.\.\) must be tensors, got str"):
        GradScaler("cpu", groups=Shards(world, of=["weight"]))
    first = dist.new_group([0])  # of which the other rank gets a number
    assert GradScaler("cpu", groups=first)._pipeline.consensus.groups.among([]) == []
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.backward(loss_of(model, batch(0)) * (math.nan if dist.get_rank() else 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # in plain DDP, all ranks have the same gradients
        scaler.apply(optimizer)
        # One rank's loss is not known to the others, so it spares the scale of none.
        assert everyone(scaler.get_scale()) == [2.0**16, 2.0**15]
        quiet = GradScaler("cpu", groups=None)
        quiet.backward(loss_of(model, batch(2)) * (math.nan if dist.get_rank() else 1))
        quiet.apply(optimizer)
    assert everyone(quiet.get_scale()) == [2.0**16, 2.0**16]  # every rank goes by its own loss


def check_same() -> None:
    """Raises if ranks that see the same batch are not, to the bit, what one process is."""
    # Half a bias must fill vector registers: torch's fused optimizers on the CPU round what is left
    # over in another way, and how much is left over differs between a shard and the whole.
    shared_models.WIDTH = 32  # of this process, which ends with the check
    for make_setup in (shared_models.ddp, shared_models.fsdp2, shared_models.fsdp1):
        for make in OPTIMIZERS.values():
            for way in ("apply", "step"):
                setup, model = make_setup()._replace(shares=1), net()
                scaler, lone = GradScaler("cpu", init_scale=2.0**8), GradScaler("cpu", groups=None)
                if setup.named is not None:
                    scaler.name(setup.named)
                both = [(scaler, make(setup.params)), (lone, make(model.parameters()))]
                for step in range(4):
                    setup.backward(scaler, batch(step))
                    lone.backward(loss_of(model, batch(step)))
                    for each, optimizer in both:
                        if way == "apply":
                            each.apply(optimizer)
                        else:
                            each.step(optimizer)
                            each.update()
                            optimizer.zero_grad()
                for param, other in zip(setup.weights(), model.parameters(), strict=True):
                    assert torch.equal(param, other)


def check_sparse() -> None:
    """Raises if sparse gradients, with rows that one rank alone has, are not agreed on."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    table, twin = (nn.Embedding(6, 4, sparse=True) for _ in range(2))
    twin.load_state_dict(table.state_dict())
    model = DistributedDataParallel(table)
    optimizer, alone = (optim.SGD(each.parameters(), lr=0.5) for each in (table, twin))
    scaler = GradScaler("cpu", init_scale=2.0**8)
    scaler.name(model)
    for step in range(3):
        rows = torch.tensor([[0, 0, 1, step], [2, 3, 3, step]])
        scaler.backward(model(rows[rank]).square().sum())
        if step == 1 and rank == 1:
            table.weight.grad._values()[0, 0] = math.inf
        outcome = scaler.apply(optimizer)
        assert (
            everyone((bool(outcome.applied), scaler.get_scale()))
            == [(step != 1, 2.0**8 if step < 1 else 2.0**7)] * 2
        )
        if step != 1:
            (twin(rows).square().sum() / 2).backward()  # the mean over ranks
            norm = twin.weight.grad.coalesce()._values().norm()
            alone.step()
            alone.zero_grad()
            # Sums of up to 4 rows of 4 numbers, in another order: 16 roundings.
            assert math.isclose(outcome.grad_norm, norm, rel_tol=16 * 2**-24)
    assert (table.weight - twin.weight).abs().max() <= 16 * 2**-24 * twin.weight.abs().max()


def check_experts() -> None:
    """Raises if experts, one of which sees no tokens, do not decide with the dense layers."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    dense = nn.Linear(4, 4)
    experts = [nn.Linear(4, 4) for _ in range(2)]
    mine = experts[rank]
    group = dist.group.WORLD
    scaler = GradScaler(
        "cpu", init_scale=2.0**8, groups=Shards(group, of=mine.parameters()), growth_interval=100
    )
    optimizer = optim.SGD([*dense.parameters(), *mine.parameters()], lr=0.1)
    for step in range(4):
        tokens = torch.ones(2, 4) * (step + 1)
        hidden = dense(tokens)
        idle = step == 1 and rank == 1  # nobody is sent to the second expert
        scaler.backward((hidden if idle else mine(hidden)).square().mean())
        for param in dense.parameters():
            dist.all_reduce(param.grad)
        if step == 2 and rank == 1:
            mine.bias.grad.fill_(math.nan)
        scale = scaler.get_scale()
        squares = [p.grad.div(scale).double().square().sum() for p in mine.parameters() if not idle]
        shared = [p.grad.div(scale).double().square().sum() for p in dense.parameters()]
        whole = math.sqrt(sum(everyone(float(sum(squares)))) + float(sum(shared)))
        outcome = scaler.apply(optimizer)
        told = everyone((bool(outcome.applied), scaler.get_scale(), float(outcome.grad_norm)))
        assert told[0] == told[1] or step == 2  # where the norm is NaN
        assert told[0][:2] == told[1][:2] == (step != 2, 2.0**8 if step < 2 else 2.0**7)
        if step != 2:
            # Two sums of 40 squares in float32, whose roots have half their errors.
            assert math.isclose(told[0][2], whole, rel_tol=40 * 2**-24)


def check_frozen() -> None:
    """Raises if shards that are frozen, or that one rank has nothing of, are in the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each[0].weight.requires_grad_(False)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert everyone(model[1].bias.to_local().numel()) == [1, 0]
    for kind in ("fused", "foreach", "ours"):
        optimizer, alone = (OPTIMIZERS[kind](each.parameters()) for each in (model, twin))
        scaler, lone = GradScaler("cpu", init_scale=2.0**8), GradScaler("cpu", groups=None)
        for step in range(3):
            scaler.backward(model(batch(step)).square().mean())
            lone.backward(twin(batch(step)).square().mean())
            if step == 1:
                if dist.get_rank() == 0:
                    model[1].bias.grad.to_local().fill_(math.inf)  # what rank 1 has nothing of
                twin[1].bias.grad.fill_(math.inf)
            outcome, other = scaler.apply(optimizer), lone.apply(alone)
            assert bool(outcome.applied) == bool(other.applied) == (step != 1)
            # 17 squares in another order.
            same = math.isclose(outcome.grad_norm, other.grad_norm, rel_tol=17 * 2**-24)
            assert same or step == 1
        for param, other_param in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), other_param)


def check_rounds() -> None:
    """Raises if a group that gathers in two rounds knows less than one that gathers in one."""
    rank = dist.get_rank()
    told = []
    for limit in (consensus.LARGE, 3):
        consensus.LARGE = limit
        torch.manual_seed(rank)
        model = nn.Linear(4, 4)
        scaler = GradScaler("cpu", init_scale=2.0**8, groups=Shards(dist.group.WORLD))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for step in range(9):
            scaler.backward(model(torch.ones(2, 4)).square().sum())
            if step and (step - 1) // 2 == rank:
                model.bias.grad.fill_(math.inf)
            outcome = scaler.apply(optimizer)
            assert outcome.bad_rank == (math.inf if step == 0 else (step - 1) // 2)
            seen.append((bool(outcome.applied), scaler.get_scale(), float(outcome.grad_norm)))
        told.append(seen)
    for one, two in zip(*told, strict=True):
        assert one[:2] == two[:2]
        # Four numbers, added up in another order.
        assert math.isclose(one[2], two[2], rel_tol=4 * 2**-24) or not one[0]
    row, column = consensus._squares[dist.group.WORLD]
    assert dist.get_process_group_ranks(row()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(column()) == [rank % 2, rank % 2 + 2]


def check_soak(steps: int = 10_000) -> None:
    """Raises if ranks differ in one of the steps, with faults on any of them at any time."""
    rank = dist.get_rank()
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.5)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    policy = gs.Dynamic(init_scale=2.0**10, growth_interval=20)
    scaler = GradScaler("cpu", policy=policy, groups=dist.group.WORLD, on_stuck="ignore")
    dice = torch.Generator().manual_seed(rank)
    faults = torch.randint(400, (steps,), generator=dice)
    x = torch.ones(2, 4)
    seen = torch.zeros(steps, 2)
    for step in range(steps):
        fault = int(faults[step])
        if fault != 3:  # 3: no loss at all
            scaler.backward(model(x).square().mean() * (math.nan if fault == 2 else 1.0))
        if fault in (0, 1):
            model.bias.grad.fill_(math.inf if fault else math.nan)
        elif fault == 4:
            model.zero_grad()
        outcome = scaler.apply(optimizer)
        seen[step, 0], seen[step, 1] = float(outcome.applied), float(outcome.scale)
    everywhere = [torch.empty_like(seen) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, seen)
    assert all(torch.equal(each, everywhere[0]) for each in everywhere)
    bad = [torch.empty_like(faults) for _ in everywhere]
    dist.all_gather(bad, faults)
    spoilt = torch.stack(bad).le(2).any(0)
    assert torch.equal(seen[:, 0] == 0, spoilt)
    assert steps // 100 < int(spoilt.sum()) < steps // 10
    assert seen[:, 1].unique().numel() > 5  # the scale went up and down


def check_short_soak() -> None:
    check_soak(500)


def check_calibrate() -> None:
    """Raises if ranks find different first scales, or one fails alone."""
    rank = dist.get_rank()
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", policy=gs.Headroom(), groups=dist.group.WORLD)
    scale = scaler.calibrate(lambda: loss_of(model, batch(0)) * 100.0**rank, optimizer, model)
    assert len(set(everyone(scale))) == 1
    with pytest.raises(gs.StuckError, match="found a loss of"):
        scaler.calibrate(lambda: loss_of(model, batch(0)) * (math.nan if rank else 1), optimizer)


def check_closure() -> None:
    """Raises if a step with a closure is undone on one rank alone."""
    rank = dist.get_rank()
    model = net()
    optimizer = optim.LBFGS(model.parameters(), max_iter=3)
    scaler = GradScaler("cpu", init_scale=2.0**8, groups=dist.group.WORLD)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(0))
            scaler.backward(loss)
            if step == 1 and rank == 1:
                model.wide.bias.grad.fill_(math.inf)
            return loss

        outcome = scaler.apply(optimizer, closure=closure)
        told = everyone((bool(outcome.applied), scaler.get_scale(), model.wide.bias.tolist()))
        assert told[0] == told[1], (step, told)
        assert told[0][0] == (step != 1)


@pytest.mark.parametrize(
    ("check", "world"),
    on_ranks(2, "stages together uneven asks closure same sparse experts frozen calibrate"),
)
def test_two_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)


def test_large_groups_gather_in_two_rounds(tmp_path: Path) -> None:
    run_check(__file__, "rounds", 4, tmp_path)
    assert [consensus._side(size) for size in (1, 2, 12, 257, 1024, 100_000)] == [
        1,
        1,
        3,
        1,
        32,
        250,
    ]


@pytest.mark.parametrize("check", ["short_soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_four_ranks_agree_in_thousands_of_steps(check: str, tmp_path: Path) -> None:
    run_check(__file__, check, 4, tmp_path)


def test_one_rank_asks_nobody() -> None:
    assert Groups("auto").among([]) == []
    with pytest.raises(SettingError, match="must be \"auto\", None or process groups, got 'all'"):
        GradScaler("cpu", groups="all")
    with pytest.raises(SettingError, match=r"must be process groups, DeviceMeshes.*got int"):
        GradScaler("cpu", groups=3)
    with pytest.raises(SettingError, match='on_drift must be "raise" or "repair"'):
        GradScaler("cpu", on_drift="ignore")
    for scaler in (GradScaler("cpu"), GradScaler("cpu", groups=None, on_drift="repair")):
        for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            one, other = (each._pipeline.consensus for each in (scaler, copied))
            assert one.groups._silent == other.groups._silent
            assert one.drift._repairs == other.drift._repairs
