"""What ranks must agree on beside the matrix of test_agree.py, with real processes."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradscale as gs
import ranks
from gradscale.errors import SettingError, StateError
from gradscale.torch import GradScaler
from gradscale.torch.agree import Agreement, Shards
from ranks import WIDTH, batch, everyone, fsdp2, loss_of, net, run_ranks


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
            plain.bias.grad.fill_(math.inf)  # of which the shards tell nothing
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing tells who shares the plain ones
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


def check_drift() -> None:
    """Raises if a scale that differs goes unnoticed."""
    rank = dist.get_rank()
    for repair in (False, True):
        model = net()
        how = "repair" if repair else "raise"
        scaler = GradScaler("cpu", groups=dist.group.WORLD, on_drift=how)
        optimizer = optim.SGD(model.parameters(), lr=0.0)

        def steps(
            count: int, scaler: Any = scaler, model: Any = model, opt: Any = optimizer
        ) -> None:
            for step in range(count):
                scaler.backward(loss_of(model, batch(step)))
                scaler.apply(opt)

        steps(70)
        if rank == 1:
            scaler.update(2.0**5)
        if repair:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                steps(130)
            assert any("ranks [1] differed from that of rank 0" in str(w.message) for w in told)
            assert len(set(everyone(scaler._scale.item()))) == 1
        else:
            with pytest.raises(StateError, match=r"ranks \[1\] differs from that of rank 0"):
                steps(200)


def check_asks() -> None:
    """Raises if nobody is asked who must agree."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    scaler.backward(loss_of(model, batch(0)) * (math.nan if dist.get_rank() else 1))
    with pytest.warns(UserWarning, match=r"There are 2 ranks.*GradScaler\(groups=\.\.\.\)"):
        scaler.apply(optimizer)
    # One rank's loss is not known to the others, so it spares the scale of none.
    assert everyone(scaler.get_scale()) == [2.0**16, 2.0**15]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.backward(loss_of(model, batch(1)))
        scaler.apply(optimizer)  # once is enough
        quiet = GradScaler("cpu", groups=None)
        quiet.backward(loss_of(model, batch(2)))
        quiet.apply(optimizer)


def check_wire() -> None:
    """Raises if a step takes more than one collective."""
    from torch.distributed import distributed_c10d

    calls: list[str] = []
    for name in ("all_gather_single", "all_gather_into_tensor", "all_reduce", "broadcast"):
        plain = getattr(dist, name, None)
        if plain is None:
            continue

        def counted(*args: Any, _name: str = name, _plain: Any = plain, **kwargs: Any) -> Any:
            calls.append(_name)
            return _plain(*args, **kwargs)

        setattr(dist, name, counted)
        assert distributed_c10d is not None
    parts = fsdp2(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optim.AdamW(parts.params, fused=True)
    scaler = GradScaler("cpu")
    for step in range(3):
        scaler.backward(loss_of(parts.call, batch(step)))
        scaler.backward(loss_of(parts.call, batch(step)) * 0.1, loss_id="other")
        calls.clear()
        assert scaler.apply(optimizer, clip_norm=1.0).applied
        assert len(calls) == 1, calls


def check_soak() -> None:
    """Raises if ranks differ in one of 10,000 steps, with faults on any of them at any time."""
    rank, steps = dist.get_rank(), 10_000
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
    assert 100 < int(spoilt.sum()) < 1000
    assert seen[:, 1].unique().numel() > 5  # the scale went up and down


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
        assert told[0] == told[1]
        assert told[0][0] == (step != 1)


@pytest.mark.parametrize(
    "check",
    ["stages", "together", "uneven", "drift", "asks", "wire", "calibrate", "closure"],
)
def test_two_ranks(check: str, tmp_path: Path) -> None:
    run_ranks(__file__, check, 2, tmp_path)


def test_four_ranks_agree_in_ten_thousand_steps(tmp_path: Path) -> None:
    run_ranks(__file__, "soak", 4, tmp_path)


def test_one_rank_asks_nobody() -> None:
    assert Agreement("auto").among([]) == []
    with pytest.raises(SettingError, match="must be \"auto\", None or process groups, got 'all'"):
        GradScaler("cpu", groups="all")
    with pytest.raises(SettingError, match=r"takes process groups, DeviceMeshes.*got int"):
        GradScaler("cpu", groups=3)
    with pytest.raises(SettingError, match='on_drift must be "raise" or "repair"'):
        GradScaler("cpu", on_drift="ignore")
    for scaler in (GradScaler("cpu"), GradScaler("cpu", groups=None, on_drift="repair")):
        for copied in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert copied._agreement._silent == scaler._agreement._silent
            assert copied._drift._repairs == scaler._drift._repairs


if __name__ == "__main__":
    ranks.main(globals())
