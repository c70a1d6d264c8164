"""MixedPrecision: every mode, its guard, masters, accumulation and retries."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradscale as gs
from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.optim import AdamW, Lion
from gradscale.torch.precision import LEVELS, MODES

torch.set_num_threads(1)
HALF_WEIGHTS = [name for name, mode in MODES.items() if mode.casts]
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "ours": AdamW,
    "fused": lambda params, lr: optim.AdamW(params, lr=lr, fused=True),
    "foreach": lambda params, lr: optim.AdamW(params, lr=lr, foreach=True),
    "SGD": lambda params, lr: optim.SGD(params, lr=lr, momentum=0.9),
}
every_mode = pytest.mark.parametrize("mode", MODES)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Net(nn.Module):
    """Everything that a try must not count twice: dropout and a batch norm. `boost` overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.4)
        self.narrow = nn.Linear(16, 1)
        self.boost = 1.0
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(torch.tanh(self.wide(x))))
        self.masks.append(x.detach() == 0)
        return self.narrow(x) * self.boost


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(count: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x).float() - y).square().mean()


def built(mode: str, make: Any = AdamW, **settings: Any) -> tuple[Any, MixedPrecision]:
    model = net()
    return model, MixedPrecision(model, make(model.parameters(), lr=1e-2), mode, **settings)


def advance(model: Any, mp: MixedPrecision, steps: int = 1, **limits: Any) -> gs.torch.StepOutcome:
    for _ in range(steps):
        with mp.autocast():
            loss = loss_of(model, data())
        mp.backward(loss)
        outcome = mp.step(**limits)
    return outcome


def picture(mp: MixedPrecision) -> list[Tensor]:
    """All numbers of models and optimizers, masters and averages among them."""
    found: list[Tensor] = []
    for model in mp.models:
        found += [value.clone() for value in model.state_dict().values()]
    for optimizer in mp.optimizers:
        for state in optimizer.state_dict()["state"].values():
            found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


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
    assert mp.scaler._policy.format == "bfloat16"
    assert advance(model, mp, 3).applied


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
    with pytest.raises(CallOrderError, match=r"Call mp\.step\(\) instead"):
        mp.optimizers[0].step()


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
    with pytest.raises(SettingError, match="keep_float32 has 'head', which is no module"):
        MixedPrecision(model, optimizer, "fp16-master", keep_float32=["head"])
    assert model.wide.weight.dtype is torch.float32
    with pytest.raises(SettingError, match="this Linear, which is no module"):
        MixedPrecision(model, optimizer, "fp16", keep_float32=[nn.Linear(2, 2)])
    with pytest.raises(SettingError, match="one or more models"):
        MixedPrecision([], optimizer)
    with pytest.raises(SettingError, match="optimizer must be one or more, got Linear"):
        MixedPrecision(model, nn.Linear(2, 2))  # type: ignore[arg-type]
    mp = MixedPrecision(model, optimizer, keep_float32=["narrow"])
    with pytest.raises(SettingError, match="that MixedPrecision was made with, got AdamW"):
        mp.step(AdamW(model.parameters()))


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
    with pytest.raises(SettingError, match="which of the 2 models"):
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


def turns(mode: str, make: Any, left: bool) -> list[Tensor]:
    """A loop of two networks that takes gradients of an earlier scale along, or clears them."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    for each in (first, second):
        nn.init.constant_(each.weight, 0.25)
    one, other = make(first.parameters(), lr=1e-3), make(second.parameters(), lr=1e-3)
    policy = gs.Dynamic(init_scale=16.0, growth_interval=1, growth_factor=16.0)
    mp = MixedPrecision([first, second], [one, other], mode, policy=policy)
    x = torch.ones(8, 4)
    mp.backward(second(first(x).detach()).float().mean())
    mp.step(other)
    mp.backward(second(first(x)).float().mean())
    mp.step(one)
    if left:
        mp.step(other)  # with what the last pass left for it
        return picture(mp)
    mp.backward(second(first(x).detach()).float().mean())
    mp.step(other)
    return picture(mp)


@every_optimizer
@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])
def test_gradients_of_two_scales_are_not_added_up(mode: str, make: Any) -> None:
    with pytest.raises(CallOrderError, match="another scale were left"):
        turns(mode, make, left=False)


@every_optimizer
def test_gradients_that_were_left_are_divided_by_their_own_scale(make: Any) -> None:
    torch.manual_seed(0)
    wide = turns("fp16", make, left=True)
    torch.manual_seed(0)
    half = turns("fp16-master", make, left=True)
    # The weights are powers of two and the rest is exact in both.
    sizes = [value.shape for value in wide[:4]]
    assert sizes == [value.shape for value in half[:4]]
    for one, other in zip(wide[:4], half[:4], strict=True):
        assert (one - other.float()).abs().max() <= 2.0**-11


@every_optimizer
@pytest.mark.parametrize("mode", HALF_WEIGHTS)
def test_what_was_loaded_is_exported(mode: str, make: Any) -> None:
    model, mp = built(mode, make)
    advance(model, mp, 3)
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    state = mp.float32_model_state()
    atol = 2.0**-11 if mode == "fp16-pure" else 0.0  # its 16 bits stay as they are
    for name, value in loaded.items():
        torch.testing.assert_close(state[name].float(), value.float(), rtol=0, atol=atol)
    with pytest.raises(SettingError, match="model must be one that"):
        mp.float32_model_state(nn.Linear(2, 2))


def test_a_step_that_raises_leaves_the_gradients_where_they_were() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    mp.backward(loss_of(model, data()))
    grads = [param.grad.clone() for param in model.parameters()]
    fails = [True]

    def fail(*_: Any) -> None:
        if fails and fails.pop():
            raise RuntimeError("planted")

    mp.optimizers[0].register_step_pre_hook(fail)
    for limit, error in ((-1.0, SettingError), (1.0, RuntimeError)):
        with pytest.raises(error):
            mp.step(clip_norm=limit)
        assert all(param.grad is not None for param in model.parameters())
    mp.zero_grad()
    loaded = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    model.eval()
    mp.backward(loss_of(model, data()))
    assert mp.step().applied
    assert (model.wide.weight - 1).abs().max() < 0.1  # the load was not undone
    assert len(grads) == 6


def test_what_listens_may_raise() -> None:
    model, mp = built("fp16-master", OPTIMIZERS["foreach"])
    mp.scaler.on("skip", lambda event: 1 / 0)
    hook = model.wide.weight.register_hook(lambda grad: grad * math.inf)
    mp.backward(loss_of(model, data()))
    with pytest.raises(ZeroDivisionError):
        mp.step()
    hook.remove()
    assert mp._masters[id(mp.optimizers[0])].pairs() == []
    assert advance(model, mp).applied


def test_a_parameter_has_one_master() -> None:
    model = net()
    both = [optim.SGD(model.parameters(), lr=0.1), optim.SGD(model.wide.parameters(), lr=0.1)]
    with pytest.raises(SettingError, match=r'in two optimizers.*the mode "fp16"'):
        MixedPrecision(model, both, "fp16-master")
    MixedPrecision(model, both, "fp16")


def test_a_closure_that_clears_the_model() -> None:
    norms = []
    for mode in ("fp16", "fp16-master"):
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
        mp = MixedPrecision(model, optimizer, mode, policy=gs.Static(init_scale=256.0))

        def closure(model: Any = model, mp: Any = mp) -> Tensor:
            model.zero_grad()
            loss = model(torch.eye(4)).float().square().sum()
            mp.backward(loss)
            return loss

        mp.step(closure=closure)
        norms.append(model.weight.detach().float())
    torch.testing.assert_close(*norms, rtol=0, atol=2.0**-10)


@every_optimizer
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_half_weights_that_are_unfrozen_have_masters(mode: str, make: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[0].requires_grad_(False)
    mp = MixedPrecision(model, make(model.parameters(), lr=1e-3), mode)
    for step in range(6):
        model[0].requires_grad_(step > 1)
        outcome = mp.run(lambda: model(torch.randn(8, 4)).float().square().mean())
        assert outcome.applied
    state = mp.optimizers[0].state[model[0].weight]
    assert state["master"].dtype is torch.float32
    assert model[0].weight.isfinite().all()
    assert torch.equal(state["master"].half(), model[0].weight)


def test_names_of_masters_do_not_pile_up() -> None:
    model, mp = built("fp16-pure", OPTIMIZERS["foreach"])
    advance(model, mp, 3)
    count = len(mp.scaler._names._given)
    kept = []
    for _ in range(20):
        advance(model, mp)
        kept.append(torch.zeros(16, 6))
    assert len(mp.scaler._names._given) <= count


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

    with pytest.raises(CallOrderError, match=r"accumulate\(3\) saw 1 backward"), mp.accumulate(3):
        one()
    mp.zero_grad()
    with mp.accumulate(1):
        one()
        with pytest.raises(CallOrderError, match="this is one more"):
            one()
        with pytest.raises(CallOrderError, match="after the block"):
            mp.step()
    mp.zero_grad()
    with pytest.raises(CallOrderError, match="within"), mp.accumulate(1), mp.accumulate(1):
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


def test_either_all_passes_are_spared_or_none() -> None:
    model, mp = built("fp16")
    mp.backward(loss_of(model, data()), spare=True)
    mp.backward(loss_of(model, data()))
    with pytest.raises(CallOrderError, match="1 of 2 losses had spare=True"):
        mp.step()
    mp.zero_grad()
    with pytest.raises(SettingError, match="goes with the common scale, got loss_id=1"):
        mp.backward(loss_of(model, data()), spare=True, loss_id=1)


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


def test_without_the_moment_put_back_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradscale.torch.moment.Moment.restore", lambda self: None)
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
    with pytest.raises(CallOrderError, match="with gradients there"):
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
            with pytest.raises(CallOrderError, match="saw 1"), mp.accumulate(2, drop=drop):
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


# Saving.


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
