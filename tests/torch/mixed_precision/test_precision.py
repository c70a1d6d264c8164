"""MixedPrecision: every mode, its guard, adapters, and a GPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradscale as gs
from gradscale.errors import CallOrderError, SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.mixed_precision import LEVELS, MODES
from gradscale.torch.optim import AdamW, Lion
from precision_runs import (
    HALF_WEIGHTS,
    OPTIMIZERS,
    advance,
    built,
    data,
    every_mode,
    every_optimizer,
    loss_of,
    net,
    picture,
)
from tensors import same

torch.set_num_threads(1)


# Modes.


def test_the_names_of_modes() -> None:
    assert set(MODES) == {"fp32", "bf16", "fp16", "bf16-master", "fp16-master", "fp16-pure"}
    for level, name in LEVELS.items():
        model = net()
        assert MixedPrecision(model, AdamW(model.parameters()), level).mode.name == name
    with pytest.raises(SettingError, match=r"mode must be one of fp32, bf16.*O3, got 'fp8'"):
        built("fp8")
    with pytest.raises(SettingError, match="got 16"):
        built(16)  # type: ignore[arg-type]


@every_optimizer
@every_mode
def test_model_that_was_cast_is_refused_in_every_mode(mode: str, make: Any) -> None:
    model, mp = built("fp16-master", make)
    optimizer = mp.optimizers[0]
    with pytest.raises(SettingError, match="has been cast already"):
        MixedPrecision(model, optimizer, mode)
    assert model.wide.weight.dtype is torch.float16
    assert advance(model, mp, 3).applied  # the first one goes on


@every_optimizer
@every_mode
def test_every_mode_trains(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    model.drop.p = 0.0
    first = loss_of(model, data()).item()
    outcome = advance(model, mp, 60, clip_norm=1.0)
    assert outcome.verdict() == "applied"
    assert loss_of(model, data()).item() < 0.5 * first
    weights = {"wide.weight", "wide.bias", "narrow.weight", "narrow.bias"}
    for name, param in model.named_parameters():
        half = mode in HALF_WEIGHTS and name in weights
        assert param.dtype is (MODES[mode].dtype if half else torch.float32)
    scale = float(outcome.scale)
    assert scale > 1 if MODES[mode].passes == "float16" else scale == 1


@every_optimizer
@pytest.mark.parametrize("limits", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01}])
def test_masters_and_split_masters_make_the_same_weights(make: Any, limits: dict[str, Any]) -> None:
    runs = []
    for mode in ("fp16-master", "fp16-pure"):
        model = net()
        # Far from 0, where 16 more bits are all that float32 has.
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(param.sign() * (param.abs() + 0.5))
        mp = MixedPrecision(model, make(model.parameters(), lr=1e-2), mode)
        advance(model, mp, 20, **limits)
        runs.append([*model.parameters(), *mp.float32_model_state().values()])
    assert same(*runs)


def test_what_a_master_loop_by_hand_does() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"], policy=gs.Static(init_scale=2.0**10))
    hand = copy.deepcopy(model)
    params = [p for p in hand.parameters() if p.requires_grad]
    # Masters begin as the weights were before they were rounded.
    wholes = [nn.Parameter(p.detach()) for p in net().parameters()]
    optimizer = optim.AdamW(wholes, lr=1e-2, foreach=True)
    for step in range(10):
        torch.manual_seed(step)
        advance(model, mp)
        torch.manual_seed(step)
        (loss_of(hand, data()) * 2.0**10).backward()
        for param, whole in zip(params, wholes, strict=True):
            whole.grad, param.grad = param.grad.float() / 2.0**10, None
        optimizer.step()
        with torch.no_grad():
            for param, whole in zip(params, wholes, strict=True):
                param.copy_(whole)
        assert same(list(model.parameters()), list(hand.parameters()))


@every_optimizer
@every_mode
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_gradients_leave_no_trace(mode: str, make: Any, bad: float) -> None:
    model, mp = built(mode, make)
    advance(model, mp, 3)
    before = picture(mp)
    model.wide.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([2]), bad))
    model.eval()  # the batch norm may count
    outcome = advance(model, mp)
    assert not outcome.applied
    assert not outcome.finite
    assert same(picture(mp), before)
    assert [culprit.name for culprit in outcome.culprits()] == ["wide.weight"]
    counts = outcome.culprits()[0]
    assert (counts.infs, counts.nans) == ((6, 0) if bad == math.inf else (0, 6))
    assert all(param.grad is None for param in model.parameters())


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_masters_begin_as_the_weights_were(mode: str, make: Any) -> None:
    _, mp = built(mode, make)
    state = mp.float32_model_state()
    for name, param in net().named_parameters():
        # 16 more bits of a float16 number near 0 are not all of float32's.
        atol = 2.0**-41 if mode == "fp16-pure" else 0.0
        torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=atol)


def test_a_policy_takes_the_format_of_the_mode() -> None:
    model, mp = built("bf16", policy=gs.Headroom())
    assert mp.scaler.policy.format == "bfloat16"
    assert advance(model, mp, 3).applied


def test_a_policy_can_be_a_name() -> None:
    assert built("fp16", policy="dynamic")[1].scaler.policy == gs.Dynamic()
    assert built("bf16", policy="headroom")[1].scaler.policy == gs.Headroom(format="bfloat16")


@every_mode
def test_calibrating(mode: str) -> None:
    model, mp = built(mode, policy=gs.Headroom(init_scale=2.0**40))
    before, count = picture(mp), model.norm.num_batches_tracked.clone()
    scale = mp.calibrate(lambda: loss_of(model, data()))
    assert scale == mp.scaler.get_scale()
    assert same(picture(mp), before)
    assert model.norm.num_batches_tracked == count
    assert advance(model, mp).applied


def test_a_static_scale_in_bfloat16() -> None:
    model, mp = built("bf16", policy=gs.Static(init_scale=8.0))
    assert float(advance(model, mp).scale) == 8.0


@every_mode
def test_closures(mode: str) -> None:
    model = net()
    model.drop.p = 0.0
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    mp = MixedPrecision(model, optimizer, mode, policy=gs.Static(init_scale=2.0**8))
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        with mp.autocast():
            loss = loss_of(model, data())
        mp.backward(loss)
        losses.append(loss.item())
        return loss

    for _ in range(4):
        outcome = mp.step(closure=closure)
        assert outcome.applied
    assert losses[-1] < 0.5 * losses[0]
    assert all(param.grad is None for param in model.parameters())


def test_weights_move_only_with_their_masters() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    advance(model, mp)
    mp.backward(loss_of(model, data()))
    for lr in (1e-2, 0.0):
        mp.optimizers[0].param_groups[0]["lr"] = lr
        with pytest.raises(CallOrderError, match=r"Call mp\.step\(\) instead"):
            mp.optimizers[0].step()


def test_a_step_that_moves_nothing_and_raises_leaves_the_weights_in_place() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    (optimizer,) = mp.optimizers
    weights = list(model.parameters())
    for param in weights:
        param.grad = torch.zeros_like(param)
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    with pytest.raises(TypeError):
        optimizer.step(closure=3)  # type: ignore[arg-type]
    optimizer.param_groups[0]["lr"] = lr
    mp.zero_grad()
    assert advance(model, mp).applied
    assert all(a is b for a, b in zip(weights, optimizer.param_groups[0]["params"], strict=True))


def test_a_bad_argument_costs_nothing() -> None:
    runs = []
    for wrong in (False, True):
        model, mp = built("fp16-master", OPTIMIZERS["foreach"])
        mp.backward(loss_of(model, data()))
        if wrong:
            with pytest.raises(SettingError, match="clip_norm must be a number > 0, got -1"):
                mp.step(clip_norm=-1)
        assert mp.step().applied
        runs.append(picture(mp))
    assert same(*runs)


@pytest.mark.parametrize("mode", ["fp16", "fp16-master"])
def test_groups_schedulers_and_averages(mode: str) -> None:
    model = net()
    optimizer = optim.AdamW([model.wide.weight], lr=1e-2)
    mp = MixedPrecision(model, optimizer, mode)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    applied: list[int] = []
    mp.follow(scheduler, lambda: applied.append(1))
    advance(model, mp, 2)
    optimizer.add_param_group({"params": [model.narrow.weight]})
    before = model.narrow.weight.detach().clone()
    model.boost = math.inf
    advance(model, mp)
    assert torch.equal(model.narrow.weight, before)
    model.boost = 1.0
    advance(model, mp, 2)
    assert not torch.equal(model.narrow.weight, before)
    mp.flush()
    assert len(applied) == 4
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**4


def test_names_that_are_nobodys() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    with pytest.raises(SettingError, match="keep_float32 contains 'head', which is not a module"):
        MixedPrecision(model, optimizer, "fp16-master", keep_float32=["head"])
    assert model.wide.weight.dtype is torch.float32
    with pytest.raises(SettingError, match="this Linear, which is not a module"):
        MixedPrecision(model, optimizer, "fp16", keep_float32=[nn.Linear(2, 2)])
    with pytest.raises(SettingError, match="one or more models"):
        MixedPrecision([], optimizer)
    with pytest.raises(
        SettingError, match="optimizer must be an optimizer or several of them, got Linear"
    ):
        MixedPrecision(model, nn.Linear(2, 2))  # type: ignore[arg-type]
    mp = MixedPrecision(model, optimizer, keep_float32=["narrow"])
    with pytest.raises(SettingError, match="that were passed to MixedPrecision, got another AdamW"):
        mp.step(AdamW(model.parameters()))


@every_mode
def test_an_optimizer_of_another_model_is_refused(mode: str) -> None:
    model = net()
    stranger = optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    message = r"None of the 2 parameters of this SGD.*shape \(2, 3\).*6 parameters of the model"
    with pytest.raises(SettingError, match=message):
        MixedPrecision(model, [optim.SGD(model.parameters(), lr=0.1), stranger], mode)
    assert all(param.dtype is torch.float32 for param in model.parameters())


@every_mode
def test_a_step_without_a_pass_is_refused_in_the_words_of_mp(mode: str) -> None:
    model, mp = built(mode)
    expected = r"mp\.step\(\) was called.*Call mp\.backward\(loss\) first"
    for _ in range(2):
        with pytest.raises(CallOrderError, match=expected) as error:
            mp.step()
        assert "scaler" not in str(error.value)
        advance(model, mp)
    loss_of(model, data()).backward()
    with pytest.raises(CallOrderError, match=r"Call mp\.backward\(loss\) instead") as error:
        mp.step()
    assert "scaler" not in str(error.value)


def test_what_it_looks_like() -> None:
    model, mp = built("fp16-master", policy=gs.Dynamic(init_scale=2.0**8))
    assert repr(mp).startswith("MixedPrecision(mode='fp16-master', scale=256, policy=Dynamic(")
    advance(model, mp)
    assert "last=StepOutcome('applied', scale=256" in repr(mp)


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_a_model_that_is_made_float32_goes_on(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    advance(model, mp, 2)
    wide = mp.float32_model_state()
    model.float()
    outcome = advance(model, mp, 2)
    assert outcome.applied
    assert all(param.dtype is torch.float32 for param in model.parameters())
    moved = (model.wide.weight - wide["wide.weight"]).abs().max()
    assert 0 < moved <= 4 * 1e-2  # two steps of SGD or Adam, with momentum


def test_models_and_optimizers_that_take_turns() -> None:
    first, second = net(), net()
    one = optim.SGD(first.parameters(), lr=0.1)
    other = Lion(second.parameters(), lr=0.01)
    mp = MixedPrecision([first, second], [one, other], "fp16-master", keep_float32=["narrow"])
    before = [param.detach().clone() for param in second.parameters()]
    mp.backward(loss_of(first, data()) + loss_of(second, data()))
    assert mp.step(one).applied
    assert same([p.detach() for p in second.parameters()], before)
    assert all(param.grad is not None for param in second.parameters())
    mp.zero_grad()
    assert all(param.grad is None for param in second.parameters())
    mp.backward(loss_of(first, data()) + loss_of(second, data()))
    assert mp.step().applied
    assert not same([p.detach() for p in second.parameters()], before)
    with pytest.raises(SettingError, match="MixedPrecision has 2 models"):
        mp.float32_model_state()
    state = mp.float32_model_state(second)
    assert torch.equal(state["wide.weight"], other.state[second.wide.weight]["master"])


def test_the_gradient_of_a_penalty() -> None:
    runs = []
    for mode in ("fp32", "fp16"):
        model, mp = built(mode)
        model.eval()
        x = data()[0].requires_grad_()
        with mp.autocast():
            out = model(x).float().sum()
        (grad,) = mp.grad(out, x, create_graph=True)
        assert grad is not None
        mp.backward((grad.norm() - 1).square() + out.square() * 1e-3)
        outcome = mp.step()
        assert outcome.applied
        runs.append(float(outcome.grad_norm))
    # The layers' two roundings to 11 bits, twice each, of which the penalty is a square.
    assert runs[1] == pytest.approx(runs[0], rel=2 * 4 * 2.0**-10)


# LoRA.


class Lora(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(6, 16)), nn.Tanh(), Lora(nn.Linear(16, 1)))
    return model.half()  # as a whole, as a checkpoint is loaded


def test_torch_refuses_adapters_in_float16() -> None:
    model = adapted()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, (data()[0].half(), data()[1]))).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@every_optimizer
@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp16-master", "fp16-pure", "fp32"])
def test_adapters_on_a_float16_base_train(mode: str, make: Any) -> None:
    model = adapted()
    base = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    mp = MixedPrecision(model, optimizer, mode)
    with mp.autocast():
        first = loss_of(model, data()).item()
    advance(model, mp, 40)
    with mp.autocast():
        assert loss_of(model, data()).item() < 0.95 * first
    after = [p for p in model.parameters() if not p.requires_grad]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(after, base, strict=True))
    wide = mode == "fp32"
    assert all(p.dtype is (torch.float32 if wide else torch.float16) for p in after)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float16 if mode in HALF_WEIGHTS else torch.float32}


@pytest.mark.gpu
@every_optimizer
@every_mode
def test_on_a_gpu(mode: str, make: Any) -> None:
    model = net().cuda()
    model.drop.p = 0.0
    mp = MixedPrecision(model, make(model.parameters(), lr=1e-2), mode)
    x, y = (value.cuda() for value in data())
    losses = [mp.run(lambda: (model(x).float() - y).square().mean()).loss for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    before = picture(mp)
    model.eval()
    model.wide.weight.register_hook(lambda grad: grad * math.nan)
    with mp.autocast():
        loss = (model(x).float() - y).square().mean()
    mp.backward(loss)
    outcome = mp.step(clip_norm=1.0)
    assert not outcome.applied
    assert same(picture(mp), before)
    name = outcome.culprits()[0].name
    split = MODES[mode].master == "split" and make is not AdamW
    assert name == "wide.weight" or split


@pytest.mark.gpu
@pytest.mark.parametrize("make", [AdamW, OPTIMIZERS["fused"]], ids=["ours", "fused"])
@every_mode
def test_nothing_waits_on_a_gpu(mode: str, make: Any, no_sync: Any) -> None:
    model = net().cuda()
    mp = MixedPrecision(model, make(model.parameters(), lr=1e-2), mode)
    x, y = (value.cuda() for value in data())

    def step() -> None:
        with mp.autocast():
            loss = (model(x).float() - y).square().mean()
        mp.backward(loss)
        mp.step(clip_norm=1.0)

    for _ in range(3):
        step()
    with no_sync():
        for _ in range(3):
            step()
