"""torch's name for a scaler of sharded parameters; test_agree.py runs it on ranks."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs

from gradscale.torch import GradScaler, ShardedGradScaler
from gradscale.torch.distributed.groups import Shards


def test_it_takes_torchs_arguments_in_torchs_order() -> None:
    given: list[Any] = ["cpu", 2.0**7, 0.25, 4.0, 11, True]
    names = list(inspect.signature(Torchs.__init__).parameters)[1 : len(given) + 2]
    assert names[-1] == "process_group"
    scaler = ShardedGradScaler(*given, None)
    assert isinstance(scaler, GradScaler)
    known = dict(zip(names, given, strict=False))
    assert scaler.get_scale() == known["init_scale"]
    assert scaler.get_growth_factor() == known["growth_factor"]
    assert scaler.get_backoff_factor() == known["backoff_factor"]
    assert scaler.get_growth_interval() == known["growth_interval"]


def test_one_rank_is_on_its_own() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu")
    scaler.backward(model(torch.ones(1, 2)).sum())
    assert scaler.apply(optimizer).applied


class OneRank:
    """All that torch's own tests have for a process group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("bad", [False, True])
def test_a_group_is_anything_with_a_rank_and_a_size(bad: bool) -> None:
    group = OneRank()
    scaler = ShardedGradScaler("cpu", init_scale=2.0, process_group=group)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    if bad:
        param.grad = torch.full((1,), torch.inf)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (param.item(), scaler.get_scale()) == ((1.0, 1.0) if bad else (0.0, 2.0))


def test_it_stays_what_it_is() -> None:
    scaler = ShardedGradScaler("cpu")
    copied = pickle.loads(pickle.dumps(scaler))
    groups = [each._pipeline.consensus.groups for each in (scaler, copied)]
    assert [each._later for each in groups] == [Shards("world")] * 2
    assert [each.has_losses for each in groups] == [True, True]
    with pytest.warns(UserWarning, match="The loss is float16"):  # and all ranks have one
        scaler.scale(torch.ones((), dtype=torch.float16))
