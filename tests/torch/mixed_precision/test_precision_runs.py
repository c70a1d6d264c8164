"""MixedPrecision: accumulation, and steps that are tried again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscale as gs
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision import MODES
from precision_runs import (
    OPTIMIZERS,
    built,
    data,
    every_mode,
    every_optimizer,
    loss_of,
    picture,
)
from tensors import same

torch.set_num_threads(1)


# Accumulation.


@every_mode
def test_accumulated_passes_are_a_mean(mode: str) -> None:
    runs = []
    for by_hand in (True, False):
        model, mp = built(mode, OPTIMIZERS["SGD"])
        model.drop.p = 0.0
        parts = [data(8, seed) for seed in range(4)]
        if by_hand:
            for part in parts:
                with mp.autocast():
                    loss = loss_of(model, part)
                mp.backward(loss / 4)
        else:
            with mp.accumulate(4):
                for part in parts:
                    with mp.autocast():
                        loss = loss_of(model, part)
                    mp.backward(loss)
        mp.step()
        runs.append(picture(mp))
    assert same(*runs)


def test_accumulation_counts() -> None:
    model, mp = built("fp16")

    def one() -> None:
        mp.backward(loss_of(model, data()))

    with (
        pytest.raises(CallOrderError, match=r"accumulate\(3\) had only 1 backward"),
        mp.accumulate(3),
    ):
        one()
    mp.zero_grad()
    with mp.accumulate(1):
        one()
        with pytest.raises(CallOrderError, match="backward passes already"):
            one()
        with pytest.raises(CallOrderError, match="after the block"):
            mp.step()
    mp.zero_grad()
    with (
        pytest.raises(CallOrderError, match="was called inside"),
        mp.accumulate(1),
        mp.accumulate(1),
    ):
        pass
    with pytest.raises(SettingError, match="got 0"), mp.accumulate(0):
        pass
    with (
        pytest.raises(SettingError, match="window, micro, got 'all'"),
        mp.accumulate(1, drop="all"),
    ):
        pass
    with pytest.raises(ZeroDivisionError), mp.accumulate(2):  # not hidden by the count
        raise ZeroDivisionError
    one()
    assert mp.step().applied


def micro_batches(model: Any, mp: MixedPrecision, bad: set[int], drop: str) -> Any:
    """A step of four, some of which have gradients that are not finite."""
    harm = [1.0]
    handle = model.wide.weight.register_hook(lambda grad: grad * harm[0])
    model.eval()
    with mp.accumulate(4, drop=drop):
        for place in range(4):
            harm[0] = math.inf if place in bad else 1.0
            with mp.autocast():
                loss = loss_of(model, data(8, place))
            mp.backward(loss)
    handle.remove()
    return mp.step()


@every_mode
def test_a_bad_micro_batch_costs_the_window_unless_told_otherwise(mode: str) -> None:
    model, mp = built(mode, OPTIMIZERS["SGD"])
    before = [param.detach().clone() for param in model.parameters()]
    outcome = micro_batches(model, mp, {2}, "window")
    assert not outcome.applied
    assert outcome.dropped is None
    assert same([param.detach() for param in model.parameters()], before)


@every_optimizer
@every_mode
def test_a_bad_micro_batch_can_be_left_out(mode: str, make: Any) -> None:
    half = MODES[mode].passes == "float16"
    policy = gs.Dynamic(init_scale=2.0**12) if half else None
    runs = []
    for drop in (True, False):
        model, mp = built(mode, make, policy=policy)
        if drop:
            outcome = micro_batches(model, mp, {0, 2}, "micro")
            assert int(outcome.dropped) == 2
            assert mp.scaler.get_scale() == (2.0**11 if half else 1.0)  # too high for them
        else:
            model.eval()
            for place in (1, 3):
                with mp.autocast():
                    loss = loss_of(model, data(8, place))
                mp.backward(loss / 2)
            outcome = mp.step()
            assert outcome.dropped is None
        assert outcome.applied
        runs.append(picture(mp))
    # Two of four: what is left weighs twice, and that is exact.
    assert same(*runs)


@pytest.mark.parametrize("mode", ["fp16-master", "fp16-pure"])
def test_a_window_of_which_nothing_is_left_is_computed_again(mode: str) -> None:
    # Beyond 65504 in every micro-batch at the first scale, and in their sum at half of it.
    model = torch.nn.Linear(1, 1, bias=False)
    policy = gs.Dynamic(init_scale=2.0**15)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mp = MixedPrecision(model, optimizer, mode, policy=policy)
    before = mp.float32_model_state()["weight"]
    losses = lambda: (model(torch.full((1, 1), 6.0)).sum() for _ in range(2))  # noqa: E731
    outcome = mp.run(losses, accumulate=2, drop="micro")
    assert outcome.applied
    assert [int(each.dropped) for each in outcome.earlier] == [2, 0]
    assert torch.equal(before - mp.float32_model_state()["weight"], torch.full((1, 1), 6.0))


@pytest.mark.parametrize("mode", ["fp16", "fp16-master"])
def test_good_micro_batches_are_what_they_are_without(mode: str) -> None:
    runs = []
    for drop in ("window", "micro"):
        model, mp = built(mode)
        outcome = micro_batches(model, mp, set(), drop)
        assert outcome.applied
        runs.append(picture(mp))
    assert int(outcome.dropped) == 0
    assert same(*runs)


def test_either_all_passes_are_droppable_or_none() -> None:
    model, mp = built("fp16")
    mp.backward(loss_of(model, data()), droppable=True)
    mp.backward(loss_of(model, data()))
    with pytest.raises(CallOrderError, match="1 of 2 losses had droppable=True"):
        mp.step()
    mp.zero_grad()
    with pytest.raises(SettingError, match="cannot be combined with loss_id, got loss_id=1"):
        mp.backward(loss_of(model, data()), droppable=True, loss_id=1)


def test_the_old_word_for_droppable_warns() -> None:
    model, mp = built("fp16")
    with pytest.warns(DeprecationWarning, match="is deprecated. Use droppable="):
        mp.backward(loss_of(model, data()), spare=True)
    assert int(mp.step().dropped) == 0


def test_micro_batches_of_a_sparse_half_table() -> None:
    model = nn.Embedding(6, 3, sparse=True)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    policy = gs.Static(init_scale=4.0)
    mp = MixedPrecision(model, optimizer, "fp16-master", policy=policy)
    harm = [1.0, math.inf, 1.0]
    with mp.accumulate(3, drop="micro"):
        for place, factor in enumerate(harm):
            rows = torch.tensor([place, place, 5])
            mp.backward(model(rows).sum() * factor)
    outcome = mp.step()
    assert outcome.applied
    assert int(outcome.dropped) == 1
    # A third each; two of three passes were kept, so they weigh a half each.
    moved = 1.0 - model.weight.detach().float().mean(1)
    expected = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0, 0.5])
    assert moved == pytest.approx(expected, rel=2.0**-10)


def test_all_micro_batches_bad_is_a_skip() -> None:
    model, mp = built("fp16", policy=gs.Dynamic())
    model.wide.weight.register_hook(lambda grad: grad * math.inf)
    before = [param.detach().clone() for param in model.parameters()]
    with mp.accumulate(2, drop="micro"):
        for _ in range(2):
            mp.backward(loss_of(model, data()))
    outcome = mp.step()
    assert not outcome.applied
    assert int(outcome.dropped) == 2
    assert mp.scaler.get_scale() == 2.0**15
    assert same([param.detach() for param in model.parameters()], before)


# Retries.


def overflowing(model: Any, mp: MixedPrecision, above: float) -> Callable[[], Tensor]:
    """A loss whose gradient overflows while the scale is above a number."""
    handles = getattr(model, "_planted", None)
    if handles is None:
        model._planted = model.narrow.weight.register_hook(
            lambda grad: grad * math.inf if mp.scaler.get_scale() > above else grad
        )
    return lambda: loss_of(model, data())


@every_optimizer
@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])
def test_a_retry_is_the_step_that_the_right_scale_takes(mode: str, make: Any) -> None:
    runs, masks, after = [], [], []
    for start in (2.0**14, 2.0**12):
        model, mp = built(mode, make, policy=gs.Dynamic(init_scale=start))
        torch.manual_seed(7)
        random.seed(7)
        closure = overflowing(model, mp, above=2.0**12)
        outcome = mp.run(closure, clip_norm=1.0)
        tries = 3 if start > 2.0**12 else 1
        assert outcome.applied
        assert len(outcome.earlier) == mp.retries == tries - 1
        assert [float(one.scale) for one in outcome.earlier] == [2.0**14, 2.0**13][: tries - 1]
        assert all(one.verdict() == "scale too high" for one in outcome.earlier)
        assert len(model.masks) == tries
        assert all(torch.equal(mask, model.masks[0]) for mask in model.masks)
        assert 0.2 < model.masks[0].float().mean() < 0.6
        assert model.norm.num_batches_tracked == 1
        masks.append(model.masks[0])
        runs.append(picture(mp))
        after.append([torch.rand(()), torch.tensor(random.random())])
    assert same(*runs)
    assert torch.equal(*masks)
    assert same(*after)


def test_without_the_snapshot_put_back_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradscale.torch.step.snapshot.Snapshot.restore", lambda self: None)
    model, mp = built("fp16", policy=gs.Dynamic(init_scale=2.0**14))
    mp.run(overflowing(model, mp, above=2.0**13))
    assert not torch.equal(*model.masks)
    assert model.norm.num_batches_tracked == 2


def test_retries_are_bounded() -> None:
    for retries in (0, 1, 4):
        model, mp = built("fp16", policy=gs.Dynamic(init_scale=2.0**10), on_stuck="ignore")
        before = [param.detach().clone() for param in model.parameters()]
        outcome = mp.run(overflowing(model, mp, above=0.0), retries=retries)
        assert not outcome.applied
        assert len(outcome.earlier) == retries == mp.retries
        assert mp.scaler.get_scale() == 2.0 ** (9 - retries)
        assert model.norm.num_batches_tracked == 1
        assert same([param.detach() for param in model.parameters()], before)
    with pytest.raises(SettingError, match="retries must be a whole number >= 0, got -1"):
        mp.run(lambda: loss_of(model, data()), retries=-1)


def test_what_no_scale_can_help_is_not_tried_again() -> None:
    model, mp = built("fp16")
    outcome = mp.run(lambda: loss_of(model, data()) * math.nan)
    assert (outcome.verdict(), len(outcome.earlier)) == ("loss not finite", 0)
    model, mp = built("fp16", policy=gs.Dynamic(init_scale=2.0**10, hysteresis=3))
    assert not mp.run(lambda: loss_of(model, data()) * math.nan).earlier
    assert mp.scaler.get_scale() == 2.0**10
    model, mp = built("fp16", policy=gs.Static(init_scale=2.0**10))
    outcome = mp.run(overflowing(model, mp, above=2.0))
    assert (outcome.verdict(), len(outcome.earlier)) == ("scale too high", 0)
    model, mp = built("fp16", policy=gs.Dynamic(init_scale=1.0, min_scale=1.0))
    assert not mp.run(overflowing(model, mp, above=0.0)).earlier


def test_patience_is_for_steps_and_not_for_retries() -> None:
    model, mp = built("fp16", policy=gs.Dynamic(init_scale=2.0**10, hysteresis=3))
    outcome = mp.run(overflowing(model, mp, above=2.0**9), retries=1)
    assert outcome.applied
    assert [float(one.scale) for one in outcome.earlier] == [2.0**10]


def test_headroom_comes_down_in_one_retry() -> None:
    model, mp = built("fp16", policy=gs.Headroom(init_scale=2.0**40))
    outcome = mp.run(lambda: loss_of(model, data()))
    assert outcome.applied
    assert len(outcome.earlier) == 1


@pytest.mark.parametrize("several", ["generator", "list"])
def test_a_whole_window_is_computed_again(several: str) -> None:
    runs = []
    for start in (2.0**11, 2.0**10):
        model, mp = built("fp16-master", policy=gs.Dynamic(init_scale=start))
        torch.manual_seed(3)
        overflowing(model, mp, above=2.0**10)

        def parts(model: Any = model) -> Iterator[Tensor]:
            return (loss_of(model, data(8, seed)) for seed in range(4))

        closure = parts if several == "generator" else (lambda parts=parts: list(parts()))
        outcome = mp.run(closure, accumulate=4)
        assert outcome.applied
        assert len(outcome.loss) == 4
        assert len(model.masks) == (8 if start > 2.0**10 else 4)
        assert model.norm.num_batches_tracked == 4
        runs.append(picture(mp))
    assert same(*runs)


def test_what_the_closure_returned_comes_back() -> None:
    model, mp = built("fp16")
    losses = []

    def closure() -> Tensor:
        losses.append(loss_of(model, data()))
        assert torch.is_autocast_enabled("cpu")
        return losses[-1]

    outcome = mp.run(closure)
    assert torch.equal(outcome.loss, losses[0].detach())
    assert not outcome.loss.requires_grad


def test_what_is_there_is_not_lost_in_a_run() -> None:
    model, mp = built("fp16")
    mp.backward(loss_of(model, data()))
    with pytest.raises(CallOrderError, match="while the parameters have gradients"):
        mp.run(lambda: loss_of(model, data()))
    assert mp.step().applied
    with pytest.raises(SettingError, match="clip_norm must be"):
        mp.run(lambda: loss_of(model, data()), clip_norm=-1)
    assert model.norm.num_batches_tracked == 1


@pytest.mark.parametrize("drop", ["window", "micro"])
def test_a_window_that_was_given_up_is_forgotten(drop: str) -> None:
    runs = []
    for fails in (False, True):
        model, mp = built("fp16", OPTIMIZERS["SGD"], policy=gs.Dynamic(init_scale=2.0**8))
        model.eval()

        def bad(model: Any = model) -> Iterator[Tensor]:
            yield loss_of(model, data()) * math.inf
            raise RuntimeError("planted")

        if fails:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="planted"):
                    mp.run(bad, accumulate=2, drop=drop)
            with pytest.raises(CallOrderError, match="had only 1"), mp.accumulate(2, drop=drop):
                mp.backward(loss_of(model, data()) * math.inf)
        outcome = mp.run(
            lambda model=model: (loss_of(model, data(8, seed)) for seed in range(2)),
            accumulate=2,
            drop=drop,
        )
        assert outcome.loss_finite
        assert drop == "window" or int(outcome.dropped) == 0
        assert mp.run(lambda model=model: loss_of(model, data())).applied
        runs.append(picture(mp))
    assert same(*runs)


def test_closures_that_forget_something() -> None:
    model, mp = built("fp16")
    with pytest.raises(SettingError, match="must return the loss, got None"):
        mp.run(lambda: None)
    with pytest.raises(SettingError, match="must return the loss, got float"):
        mp.run(lambda: 3.0)
    with pytest.raises(CallOrderError, match=r"accumulate\(1\) has had 1"):
        mp.run(lambda: [loss_of(model, data()), loss_of(model, data())])
    assert all(param.grad is None for param in model.parameters())


def test_a_closure_that_fails_leaves_nothing_behind() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    before = picture(mp)
    state = torch.get_rng_state()

    def closure() -> Iterator[Tensor]:
        yield loss_of(model, data())
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        mp.run(closure, accumulate=2)
    assert same(picture(mp), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())
    assert mp.run(lambda: loss_of(model, data())).applied
