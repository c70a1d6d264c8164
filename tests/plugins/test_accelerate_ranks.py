"""Accelerate with our scaler on two ranks: they decide together, and resume to the bit."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn

from accelerate_runs import BAD, STEPS, Run, batches, same
from ranks import everyone, on_ranks, run_check


def accelerate_on_ranks() -> None:
    """Has Accelerate find the ranks that there are."""
    names = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for several, value in zip(names, (dist.get_rank(), dist.get_world_size()), strict=True):
        os.environ.update(dict.fromkeys(several, str(value)))


def check_ddp() -> None:
    """Raises if ranks part, or if the group is not known: then a NaN loss would lower the scale."""
    accelerate_on_ranks()
    rank = dist.get_rank()
    for kind, late, accumulate in (("fused", False, 1), ("foreach", True, 2)):
        run = Run(kind, late=late, accumulate=accumulate)
        assert run.accelerator.distributed_type == DistributedType.MULTI_CPU
        assert isinstance(run.model, nn.parallel.DistributedDataParallel)
        scales = []
        for number, batch in enumerate(batches()):
            mine = batch + rank
            factor = BAD if number == BAD and rank == 1 else 0  # overflows on one rank alone
            if number == STEPS - 1 and rank == 0:
                mine = mine * float("nan")
            run.step(factor, mine, "norm")
            told = everyone([run.scaler.get_scale(), len(run.skipped), run.state()])
            assert same(told[0], told[1])
            scales.append(run.scaler.get_scale())
        assert len(run.skipped) == 2
        assert run.scheduler.scheduler.last_epoch == 2 * (STEPS // accumulate - 2)
        assert scales[-1] == scales[-2]
        assert run.scaler.outcome().verdict() == "loss not finite"


def check_fsdp2() -> None:
    """Raises if ranks with shards part, or if they do not resume to the bit."""
    accelerate_on_ranks()
    rank = dist.get_rank()
    (folder,) = everyone(tempfile.mkdtemp() if rank == 0 else "")[:1]

    def go_on(run: Run, numbers: range) -> None:
        for number in numbers:
            if number == BAD + 1 and run is whole:
                run.accelerator.save_state(folder)
            run.step(BAD if number == BAD and rank == 1 else 0, batches()[number] + rank, "norm")
            assert len(set(everyone((run.scaler.get_scale(), len(run.skipped))))) == 1

    whole = Run(sharded=True)
    go_on(whole, range(STEPS))
    assert len(whole.skipped) == 1
    assert whole.scheduler.scheduler.last_epoch == 2 * (STEPS - 1)
    for late in (False, True):
        resumed = Run(sharded=True, late=late)
        resumed.accelerator.load_state(folder)
        go_on(resumed, range(BAD + 1, STEPS))
        assert resumed.scaler.state_dict() == whole.scaler.state_dict()
        pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
        assert all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("check", "world"), on_ranks(2, "ddp fsdp2"))
def test_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
