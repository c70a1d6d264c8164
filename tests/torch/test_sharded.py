"""torch's name for a scaler of sharded parameters; tests/torch/test_agree.py runs it on ranks."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Torchs

from gradscale.torch import GradScaler, ShardedGradScaler
from gradscale.torch.agree import Shards


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


def test_it_stays_what_it_is() -> None:
    scaler = ShardedGradScaler("cpu")
    copied = pickle.loads(pickle.dumps(scaler))
    assert copied._agreement._later == scaler._agreement._later == Shards("world")
    with pytest.warns(UserWarning, match="The loss is float16"):  # and all ranks have one
        scaler.scale(torch.ones((), dtype=torch.float16))
