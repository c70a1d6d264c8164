"""Scales that differ from rank to rank are noticed, with real processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import optim

from gradscale.errors import StateError
from gradscale.torch import GradScaler, drift, telling
from ranks import be_a_rank, everyone, run_ranks
from shared_models import batch, loss_of, net


def check_drift(odd: int = 1) -> None:
    """Raises if a scale that differs goes unnoticed, on any rank."""
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

        steps(drift.EVERY + 6)
        if rank == odd:
            scaler.update(2.0**5)
        if repair:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                steps(2 * drift.EVERY + 2)
            texts = everyone([str(one.message) for one in told])
            assert all(any("differed from that of rank" in text for text in each) for each in texts)
            assert any(str(odd) in text for text in texts[odd])
            assert len(set(everyone(scaler._scale.item()))) == 1
        else:
            with pytest.raises(StateError, match="differs from that of rank") as raised:
                steps(3 * drift.EVERY)
            assert str(odd) in everyone(str(raised.value))[odd]


def check_rounds() -> None:
    """Raises if ranks that gather in two rounds do not all hear of it."""
    telling.LARGE, drift.EVERY = 3, 8
    for odd in (1, 2, 3):
        check_drift(odd)


@pytest.mark.parametrize(("check", "world"), [("drift", 2), ("rounds", 4)])
def test_scales_that_differ_are_noticed(check: str, world: int, tmp_path: Path) -> None:
    run_ranks(__file__, check, world, tmp_path)


if __name__ == "__main__":
    be_a_rank(globals())
