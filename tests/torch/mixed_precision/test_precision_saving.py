"""MixedPrecision: saving, loading, exporting."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gradscale.errors import StateError
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.mixed_precision import MODES
from gradscale.torch.optim import SGD, AdamW, Lion
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
)
from tensors import same

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


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
@every_optimizer
@every_mode
def test_torchs_checkpoint_is_loaded_whole_before_the_first_step(
    mode: str, make: Any, tmp_path: Path
) -> None:
    """It loads what is in the states that `get_state_dict()` has the optimizer make."""
    model, mp = built(mode, make)
    advance(model, mp, 5)
    other_model, other = built(mode, make)

    def parts(each_model: Any, each: Any) -> dict[str, Any]:
        weights, states = get_state_dict(each_model, each.optimizers[0])
        return {"weights": weights, "states": states, "scaler": each.scaler.state_dict()}

    before = [value.clone() for value in other_model.state_dict().values()]
    loaded = parts(other_model, other)
    assert same(before, list(other_model.state_dict().values()))
    dcp.save(parts(model, mp), checkpoint_id=tmp_path)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        other_model,
        other.optimizers[0],
        model_state_dict=loaded["weights"],
        optim_state_dict=loaded["states"],
    )
    other.scaler.load_state_dict(loaded["scaler"])
    for each_model, each in ((model, mp), (other_model, other)):
        torch.manual_seed(9)
        assert advance(each_model, each, 5).applied
    assert same(parts(other_model, other), parts(model, mp))


class Partly(nn.Module):
    """A model of which a part has no gradient until it is `whole`."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(6, 1), nn.Linear(6, 1)
        self.whole = False

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.idle(x) if self.whole else self.used(x)


TORCH: dict[str, Callable[..., optim.Optimizer]] = {
    "Adadelta": optim.Adadelta,
    **({"Adafactor": optim.Adafactor} if hasattr(optim, "Adafactor") else {}),  # torch 2.5
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "AdamW fused": lambda params, lr: optim.AdamW(params, lr=lr, fused=True),
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda params, lr: optim.RMSprop(params, lr=lr, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": lambda params, lr: optim.SGD(params, lr=lr, momentum=0.9),
    "our AdamW": AdamW,
    "our SGD": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "Lion": Lion,
}


@pytest.mark.parametrize("mode", HALF_WEIGHTS)
@pytest.mark.parametrize("make", TORCH.values(), ids=TORCH)
def test_a_weight_that_was_never_stepped_is_loaded(make: Any, mode: str) -> None:
    runs = []
    for cut in (None, "loaded", "copied"):
        torch.manual_seed(0)
        model = Partly()
        mp = MixedPrecision(model, make(model.parameters(), lr=1e-2), mode)
        for step in range(4):
            if step == 2:
                if cut == "loaded":
                    saved = copy.deepcopy(mp.state_dict())
                    model = Partly()
                    mp = MixedPrecision(model, make(model.parameters(), lr=1e-2), mode)
                    mp.load_state_dict(saved)
                elif cut == "copied":
                    mp = copy.deepcopy(mp)
                    model = mp.models[0]
                model.whole = True
            assert advance(model, mp).applied
        runs.append([*picture(mp), *mp.float32_model_state().values()])
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@every_optimizer
@every_mode
def test_a_copy_goes_on_by_itself(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    model.masks.clear()
    for steps in (0, 3):
        if steps:
            advance(model, mp, steps)
        model.masks.clear()
        other = copy.deepcopy(mp)
        twin = other.models[0]
        states = [list(each.float32_model_state().values()) for each in (other, mp)]
        assert same(*states)
        before = picture(mp)
        torch.manual_seed(5)
        advance(twin, other, 2)
        assert same(picture(mp), before)
        torch.manual_seed(5)
        advance(model, mp, 2)
        assert same(picture(other), picture(mp))


def test_a_copy_follows_with_its_own_schedulers() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["SGD"])
    mp.follow(optim.lr_scheduler.ExponentialLR(mp.optimizers[0], 0.5))
    advance(model, mp)
    mp.flush()
    model.masks.clear()
    other = copy.deepcopy(mp)
    advance(other.models[0], other, 2)
    other.flush()
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (mp, other)]
    assert rates == [1e-2 * 0.5, 1e-2 * 0.5**3]


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_a_state_that_cannot_be_loaded_changes_nothing(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    scheduler = optim.lr_scheduler.ExponentialLR(mp.optimizers[0], 0.5)
    mp.follow(scheduler)
    advance(model, mp, 3)
    saved = mp.state_dict()
    other_model, other = built(mode, make)
    following = optim.lr_scheduler.ExponentialLR(other.optimizers[0], 0.5)
    other.follow(following)
    advance(other_model, other)
    other.flush()
    before = picture(other), other.scaler.state_dict(), following.state_dict()
    bad_state = {**saved["scaler"], "scale": "much"}
    with pytest.raises(StateError):
        other.load_state_dict({**saved, "scaler": bad_state})

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    hook = other.optimizers[0].register_load_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="planted") as raised:
        other.load_state_dict(saved)
    if sys.version_info >= (3, 11):
        assert any("nothing was loaded" in note for note in raised.value.__notes__)
    hook.remove()
    assert same(picture(other), before[0])
    assert (other.scaler.state_dict(), following.state_dict()) == before[1:]
    other.load_state_dict(saved)
    assert same(picture(other), picture(mp))


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
    with pytest.raises(StateError, match="has 1 followed objects, but this MixedPrecision has 0"):
        other.load_state_dict(mp.state_dict())


def test_states_of_others_are_refused_whole() -> None:
    model, mp = built("fp16")
    advance(model, mp, 2)
    good = mp.state_dict()
    _, other = built("fp16")
    before = picture(other)
    for change, message in (
        ({"mode": "bf16"}, "in the mode 'bf16', but this run uses 'fp16'"),
        ({"version": 9}, "has version 9"),
        ({"models": []}, "has 0 models, but this MixedPrecision has 1"),
        (
            {"models": [{"wide.weight": torch.ones(2)}]},
            "'wide.weight' is missing in the model or in the state",
        ),
        ({"optimizers": [{"param_groups": [{"params": [0]}]}]}, r"groups of \[6\]"),
    ):
        with pytest.raises(StateError, match=message):
            other.load_state_dict({**good, **change})
    for odd in ({}, GradScaler("cpu").state_dict(), 3):
        with pytest.raises(StateError, match="not a state of MixedPrecision"):
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
