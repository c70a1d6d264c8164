"""Scales that differ from rank to rank are noticed, with real processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from gradscale.errors import StateError
from gradscale.torch import GradScaler
from gradscale.torch.distributed import consensus, drift
from ranks import everyone, run_check
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
    """Raises if ranks that gather in two rounds do not all notice it."""
    consensus.LARGE, drift.EVERY = 3, 8
    for odd in (1, 2, 3):
        check_drift(odd)


def check_parts() -> None:
    """Raises if two binades, or the scale of a loss of its own, make no difference."""
    for what in (4.0, 16.0, "loss"):
        scaler = GradScaler("cpu", init_scale=2.0**8, groups=dist.group.WORLD)

        def steps(what: Any = what, scaler: Any = scaler) -> None:
            model = nn.Linear(2, 2)
            optimizer = optim.SGD(model.parameters(), lr=0.0)
            for step in range(130):
                scaler.backward(model(torch.ones(1, 2)).sum())
                scaler.backward(model(torch.ones(1, 2)).sum(), loss_id="other")
                if step == 0 and dist.get_rank() == 1:
                    state = scaler._state
                    if what == "loss":
                        own = state.losses["other"]
                        state.losses["other"] = own._replace(scale=own.scale * 2)
                    else:
                        state.write(scale=state.live.scale * what)
                scaler.apply(optimizer)

        with pytest.raises(StateError, match=r"ranks \[1\] differs"):
            steps()


@pytest.mark.parametrize(("check", "world"), [("drift", 2), ("parts", 2), ("rounds", 4)])
def test_scales_that_differ_are_noticed(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
