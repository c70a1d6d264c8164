"""A scheduler that follows applied steps, with results that come late as they do from a GPU."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from gradscale.plugins.scheduler import FollowingScheduler
from gradscale.torch import GradScaler
from gradscale.torch.telemetry.outcome import StepOutcome


class Run:
    """A scheduler, the one that follows its steps, and the scaler that takes them."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(()))
        self.optimizer = SGD([self.weight], lr=1.0)
        self.inner = StepLR(self.optimizer, 1, 0.5)
        self.scaler = GradScaler("cpu")
        self.ours: Any = FollowingScheduler(self.inner, self.scaler)

    def take(self, applied: bool) -> None:
        """A step that is applied, or not."""
        self.scaler.backward(self.weight * (1.0 if applied else torch.inf))
        assert bool(self.scaler.apply(self.optimizer).applied) is applied
        self.ours.count_step()


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether outcomes seem to be on the device still when the scheduler is called."""
    if request.param:
        monkeypatch.setattr(StepOutcome, "ready", lambda outcome: False)
    return bool(request.param)


def test_scheduler_moves_before_the_next_step_if_one_was_applied(late: bool) -> None:
    run, moves = Run(), []
    rates: list[float] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: rates.append(run.optimizer.param_groups[0]["lr"])
    )
    for applied in (True, False, False, True, True, False):
        run.take(applied)
        run.ours.step()
        moves.append(run.inner.last_epoch)
    expected = [1, 1, 1, 2, 3, 3]
    if late:  # a call is put off until the next step begins
        expected = [0, 1, 1, 1, 2, 3]
    assert moves == expected
    assert rates == [1.0, 0.5, 0.25]  # late or not, in time for the step
    assert run.ours.last_epoch == 3


@pytest.mark.parametrize("applied", [True, False])
def test_reading_makes_a_call_that_was_put_off(late: bool, applied: bool) -> None:
    run = Run()
    run.take(True)
    run.ours.step()
    run.take(applied)
    run.ours.step()
    assert run.ours.last_epoch == run.inner.last_epoch == 1 + applied
    assert run.ours.state_dict()["last_epoch"] == 1 + applied
    run.ours.step()  # without a step since: as the user wants it
    assert run.ours.last_epoch == 2 + applied
    run.take(applied)
    run.ours.step()
    run.ours.step()
    assert run.ours.last_epoch == 3 + 2 * applied


def test_one_applied_step_of_several_is_enough(late: bool) -> None:
    run = Run()
    for applied in (False, True, False):
        run.take(applied)
    run.ours.step()
    assert run.inner.last_epoch == 1  # known already, also where the last result is late
    for applied in (False, False):
        run.take(applied)
    run.ours.step()
    assert run.ours.last_epoch == 1


def test_step_from_before_a_call_does_not_count_for_the_next(late: bool) -> None:
    run = Run()
    for applied in (True, True):
        run.take(applied)
    run.ours.step()
    assert run.inner.last_epoch == 1
    run.take(False)  # only now the second one is known to be applied, where results are late
    run.ours.step()
    assert run.ours.last_epoch == 1


def test_it_passes_for_the_scheduler() -> None:
    run = Run()
    assert isinstance(run.ours, LRScheduler)
    assert not isinstance(run.ours, ReduceLROnPlateau)
    assert run.ours.get_last_lr() == [1.0]
    assert copy.copy(run.ours).get_last_lr() == [1.0]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        run.ours.nothing  # noqa: B018


def test_scaler_does_not_keep_a_run_alive(late: bool) -> None:
    run = Run()
    run.take(True)
    run.ours.step()
    scaler, optimizer = run.scaler, weakref.ref(run.optimizer)
    del run
    gc.collect()
    assert optimizer() is None
    other = Run()
    scaler.backward(other.weight)
    scaler.apply(other.optimizer)  # calls nothing of the run that is gone
    scaler.flush()
    assert other.inner.last_epoch == 0
