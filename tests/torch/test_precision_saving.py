"""MixedPrecision: saving, loading, exporting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import optim

from gradscale.errors import StateError
from gradscale.torch import GradScaler
from gradscale.torch.precision import MODES
from precision_runs import (
    HALF_WEIGHTS,
    OPTIMIZERS,
    advance,
    built,
    data,
    every_mode,
    every_optimizer,
    net,
    picture,
    same,
)

torch.set_num_threads(1)


@every_optimizer
@every_mode
def test_a_state_goes_on_bit_for_bit(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    advance(model, mp, 5)
    saved = copy.deepcopy(mp.state_dict())
    other_model, other = built(mode, make)
    other.load_state_dict(saved)
    assert same(picture(other), picture(mp))
    for each_model, each in ((model, mp), (other_model, other)):
        torch.manual_seed(9)
        advance(each_model, each, 5)
    assert same(picture(other), picture(mp))
    assert other.scaler.state_dict() == mp.scaler.state_dict()


def test_what_follows_is_saved_with_it() -> None:
    runs = []
    for cut in (False, True):
        model, mp = built("fp16-master", OPTIMIZERS["SGD"])
        mp.follow(optim.lr_scheduler.ExponentialLR(mp.optimizers[0], 0.5), lambda: None)
        for step in range(6):
            if cut and step == 3:
                saved = mp.state_dict()
                model, mp = built("fp16-master", OPTIMIZERS["SGD"])
                mp.follow(optim.lr_scheduler.ExponentialLR(mp.optimizers[0], 0.5))
                mp.load_state_dict(saved)
            torch.manual_seed(step)
            advance(model, mp)
        mp.flush()
        runs.append([*picture(mp), torch.tensor(mp.optimizers[0].param_groups[0]["lr"])])
    assert same(*runs)
    _, other = built("fp16-master", OPTIMIZERS["SGD"])
    with pytest.raises(StateError, match="has 1 followed, here are 0"):
        other.load_state_dict(mp.state_dict())


def test_states_of_others_are_refused_whole() -> None:
    model, mp = built("fp16")
    advance(model, mp, 2)
    good = mp.state_dict()
    _, other = built("fp16")
    before = picture(other)
    for change, message in (
        ({"mode": "bf16"}, "of the mode 'bf16', and this run is 'fp16'"),
        ({"version": 9}, "has version 9"),
        ({"models": []}, "has 0 models, here are 1"),
        ({"models": [{"wide.weight": torch.ones(2)}]}, "'wide.weight' is missing here or there"),
        ({"optimizers": [{"param_groups": [{"params": [0]}]}]}, r"groups of \[6\]"),
    ):
        with pytest.raises(StateError, match=message):
            other.load_state_dict({**good, **change})
    for odd in ({}, GradScaler("cpu").state_dict(), 3):
        with pytest.raises(StateError, match="no state of MixedPrecision"):
            other.load_state_dict(odd)  # type: ignore[arg-type]
    assert same(picture(other), before)
    assert other.scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("mode", MODES)
def test_a_float32_model_reads_what_was_trained(mode: str) -> None:
    model, mp = built(mode)
    model.drop.p = 0.0
    advance(model, mp, 10)
    plain = net()
    plain.load_state_dict(mp.float32_model_state())
    plain.drop.p = 0.0
    model.eval(), plain.eval()
    with mp.autocast():
        mine = model(data()[0]).float()
    theirs = plain(data()[0])
    bound = 0.0 if mode == "fp32" else 8 * torch.finfo(MODES[mode].dtype).eps
    assert (mine - theirs).abs().max() <= bound * theirs.abs().max()
    if mode in HALF_WEIGHTS:  # more than the half weights tell
        weight = mp.float32_model_state()["wide.weight"]
        assert not torch.equal(weight, model.wide.weight.float())
        assert torch.equal(weight.to(model.wide.weight.dtype), model.wide.weight)
