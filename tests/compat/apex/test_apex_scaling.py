"""`amp.scale_loss` and the steps after it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradscale.compat.apex import amp
from gradscale.compat.apex.larc import LARC
from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.compat.apex.optimizers import FusedAdam, FusedSGD
from gradscale.errors import CallOrderError, SettingError, StateError
from tensors import same

pytestmark = pytest.mark.usefixtures("fresh_amp")
HALF, FLOAT = torch.float16, torch.float32
INIT = 2.0**8
OPTIMIZERS: list[Any] = [
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    lambda params: torch.optim.Adam(params, lr=0.1),
    lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5),
    lambda params: FusedAdam(params, lr=0.1, weight_decay=0.1),
    lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    lambda params: LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)),
]


class Weights(nn.Module):
    """Weights times the input."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def start(
    opt_level: str = "O1", make: Any = OPTIMIZERS[0], weights: Any = (1.0, 2.0), **overrides: Any
) -> tuple[Weights, Optimizer]:
    """A model and its optimizer at an opt level, with scales that begin low."""
    model = Weights(*weights)
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=opt_level, **overrides)
    begin_low()
    return model, optimizer


def begin_low() -> None:
    """Has dynamic scales begin at INIT: gradients of half weights are about 1 here, times that."""
    scalers = amp._amp_state.loss_scalers
    scalers[:] = [
        LossScaler("dynamic", init_scale=INIT) if scaler.dynamic else scaler for scaler in scalers
    ]


def one_pass(model: Weights, optimizer: Any, *x: float, **settings: Any) -> None:
    """A backward pass whose unscaled gradients are `x`; infinity in the loss if one of them is."""
    loss = model(torch.tensor(x)).sum()
    with amp.scale_loss(loss, optimizer, **settings) as scaled:
        scaled.backward()


def grads(optimizer: Any) -> list[list[float] | None]:
    """The gradients that the optimizer will step with."""
    found = [param.grad for param in amp.master_params(optimizer)]
    return [None if grad is None else grad.tolist() for grad in found]


def snapshot(model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    """Everything that a step can change."""
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def fail(_: Any) -> None:
    """Raises."""
    raise ZeroDivisionError


def scale(number: int = 0) -> float:
    """The scale of a loss."""
    return float(amp.state_dict()[f"loss_scaler{number}"]["loss_scale"])


# Scaling and unscaling.


def test_scale_begins_as_in_apex() -> None:
    amp.initialize(Weights(1.0), opt_level="O1")
    assert scale() == 2.0**16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_loss_is_scaled_and_gradients_are_unscaled(level: str) -> None:
    model, optimizer = start(level)
    loss = model(torch.tensor([3.0, 0.5])).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == loss.item() * INIT
        scaled.backward()
    assert grads(optimizer) == [[3.0, 0.5]]
    assert [param.dtype for param in amp.master_params(optimizer)] == [FLOAT]


def test_half_loss_is_scaled_in_float32() -> None:
    _, optimizer = start("O3", loss_scale=2.0**16)
    with amp.scale_loss(torch.ones((), dtype=HALF), optimizer) as scaled:
        assert scaled.item() == 2**16


def test_gradient_below_float16_survives_in_masters() -> None:
    model, optimizer = start("O2")
    one_pass(model, optimizer, 2.0**-30, 1.0)
    assert grads(optimizer) == [[0.0, 1.0]]  # the input is float16 already
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2)).sum() * 2.0**-30, optimizer) as scaled:
        scaled.backward()
    assert grads(optimizer) == [[2.0**-30] * 2]


def test_float32_training_is_left_alone() -> None:
    model, optimizer = start("O0")
    loss = model(torch.tensor([math.inf, 1.0])).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == math.inf
        scaled.backward()
    optimizer.step(lambda: None)  # a closure is fine where amp does nothing
    assert not torch.isfinite(model.w).all()


# Skipping.


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bad_step_changes_nothing_and_the_next_one_steps(level: str, make: Any) -> None:
    def making(params: Any) -> Optimizer:
        optimizer: Optimizer = make(params)
        for group in optimizer.param_groups:
            group.update({"eps": 1e-3} if "eps" in group else {})
        return optimizer

    model, optimizer = start(level, making, loss_scale="dynamic")
    one_pass(model, optimizer, 1.0, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    before = snapshot(model, optimizer)
    one_pass(model, optimizer, math.inf, 1.0)
    optimizer.step()
    assert same(snapshot(model, optimizer), before)
    assert scale() == INIT / 2
    one_pass(model, optimizer, 1.0, 1.0)
    optimizer.step()
    assert not same(snapshot(model, optimizer), before)
    assert scale() == INIT / 2


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bad_first_step_changes_nothing(make: Any) -> None:
    model, optimizer = start("O2", make)
    one_pass(model, optimizer, math.nan, 1.0)
    before = model.w.clone()
    optimizer.step()
    assert torch.equal(model.w, before)
    one_pass(model, optimizer, 1.0, 1.0)
    optimizer.step()
    twin, its = start("O2", make)
    one_pass(twin, its, 1.0, 1.0)
    its.step()
    assert same(snapshot(model, optimizer), snapshot(twin, its))


def test_optimizer_that_counts_in_its_groups_is_put_back() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    model, optimizer = start("O1", lambda params: Counting(params, lr=0.1))
    for x in (math.inf, 1.0, math.inf, 1.0):
        one_pass(model, optimizer, x, 1.0)
        optimizer.step()
    assert optimizer.param_groups[0]["count"] == 2


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_static_scale_skips_too(level: str) -> None:
    model, optimizer = start(level, loss_scale=128.0)
    one_pass(model, optimizer, math.inf, 1.0)
    optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]
    assert scale() == 128


def test_overflow_skips_every_optimizer_named_there_once() -> None:
    one, other = Weights(1.0), Weights(1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (one, other)]
    amp.initialize([one, other], optimizers, opt_level="O1", num_losses=2)
    begin_low()

    def train(x: float, y: float) -> tuple[float, float]:
        loss = one(torch.tensor([x])).sum() + other(torch.tensor([y])).sum()
        with amp.scale_loss(loss, optimizers, loss_id=1) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return one.w.item(), other.w.item()

    assert train(math.inf, 1.0) == (1.0, 1.0)
    assert train(1.0, 1.0) == (0.5, 0.5)
    assert [scale(0), scale(1)] == [INIT, INIT / 2]


def test_scheduler_sees_no_fault_in_a_skipped_step() -> None:
    model, optimizer = start("O2")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    one_pass(model, optimizer, math.inf, 1.0)
    optimizer.step()
    scheduler.step()  # a warning, which is an error here, if it missed the step
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("how", ["by position", "by name"])
def test_closure_is_refused(level: str, how: str) -> None:
    model, optimizer = start(level)
    one_pass(model, optimizer, 1.0, 1.0)
    with pytest.raises(CallOrderError, match="closure, which amp does not support"):
        optimizer.step(lambda: 0.0) if how == "by position" else optimizer.step(closure=lambda: 0.0)


# The scale.


def test_scale_grows_on_the_last_step_of_the_window() -> None:
    model, optimizer = start("O1")
    amp._amp_state.loss_scalers[0] = LossScaler("dynamic", scale_window=3)
    seen = []
    for _ in range(4):
        one_pass(model, optimizer, 1.0, 1.0)
        seen.append(scale())
    assert seen == [2.0**16, 2.0**16, 2.0**17, 2.0**17]
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**17, "unskipped": 1}}
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**17


def test_scale_stays_within_its_bounds() -> None:
    model = Weights(1.0, 2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bounds = {"min_loss_scale": 2.0**14, "max_loss_scale": 2.0**15}
    amp.initialize(model, optimizer, opt_level="O1", **bounds)
    assert scale() == 2.0**15
    for _ in range(3):
        one_pass(model, optimizer, math.inf, 1.0)
    assert scale() == 2.0**14


def test_run_that_diverged_does_not_collapse_to_zero() -> None:
    # Apex halves until 1 / 0.0 raises.
    model, optimizer = start("O1")
    for _ in range(1100):
        one_pass(model, optimizer, math.inf, 1.0)
        optimizer.step()
    assert scale() == 2.0**-14
    one_pass(model, optimizer, 1.0, 1.0)
    assert grads(optimizer) == [[1.0, 1.0]]


def test_unscaled_gradient_that_does_not_fit_is_skipped() -> None:
    # A scale below 1, and gradients that are float16's: unscaled they are infinite.
    model, optimizer = start("O3", loss_scale=2.0**-10)
    with amp.scale_loss((model(torch.ones(2)) * 2.0**17).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("loss_id", [1, -1, "0"])
def test_unknown_loss_is_refused(loss_id: Any) -> None:
    model, optimizer = start("O1")
    with pytest.raises(SettingError, match=r"loss_id must be from 0 to num_losses - 1 = 0, got"):
        one_pass(model, optimizer, 1.0, 1.0, loss_id=loss_id)


def test_unknown_optimizer_is_refused() -> None:
    model, _ = start("O1")
    stranger = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        SettingError, match=r"those that were passed to amp.initialize\(\), got another"
    ):
        one_pass(model, stranger, 1.0, 1.0)


# Accumulation.


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_passes_add_up_though_the_scale_moves(level: str) -> None:
    model, optimizer = start(level, loss_scale="dynamic")
    amp._amp_state.loss_scalers[0] = LossScaler("dynamic", init_scale=8.0, scale_window=1)
    for x in (1.0, 0.25, 2.0):
        one_pass(model, optimizer, x, -x)
    assert grads(optimizer) == [[3.25, -3.25]]
    assert scale() == 64


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_several_losses_of_several_scales_add_up(level: str) -> None:
    model, optimizer = start(level, loss_scale="dynamic", num_losses=3)
    amp._amp_state.loss_scalers[1] = LossScaler(4.0)
    for loss_id, x in enumerate((1.0, 0.25, 2.0)):
        one_pass(model, optimizer, x, -x, loss_id=loss_id)
    assert grads(optimizer) == [[3.25, -3.25]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_in_one_of_several_passes_skips_the_step(level: str) -> None:
    model, optimizer = start(level, num_losses=2)
    one_pass(model, optimizer, math.inf, 1.0, loss_id=0)
    one_pass(model, optimizer, 1.0, 1.0, loss_id=1)
    optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]
    assert [scale(0), scale(1)] == [INIT / 2, INIT]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_delayed_passes_are_unscaled_by_the_last(level: str) -> None:
    model, optimizer = start(level, loss_scale="dynamic")
    amp._amp_state.loss_scalers[0] = LossScaler("dynamic", init_scale=8.0)
    one_pass(model, optimizer, 1.0, 2.0, delay_unscale=True)
    assert model.w.grad is not None
    assert model.w.grad.tolist() == [8.0, 16.0]
    one_pass(model, optimizer, 1.0, 2.0, delay_unscale=True)
    one_pass(model, optimizer, 0.5, 0.5)
    assert grads(optimizer) == [[2.5, 4.5]]
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_delayed_pass_keeps_its_own_scale(level: str) -> None:
    model, optimizer = start(level, loss_scale="dynamic", num_losses=2)
    amp._amp_state.loss_scalers[:] = [LossScaler(8.0), LossScaler(2.0)]
    one_pass(model, optimizer, 1.0, 2.0, loss_id=0, delay_unscale=True)
    one_pass(model, optimizer, 0.5, 0.5, loss_id=1)
    assert grads(optimizer) == [[1.5, 2.5]]
    one_pass(model, optimizer, 1.0, 1.0, loss_id=0, delay_unscale=True)  # on top of unscaled ones
    assert grads(optimizer) == [[2.5, 3.5]]
    optimizer.step()


def test_bad_delayed_pass_of_another_scale_skips_the_step() -> None:
    model, optimizer = start("O1", num_losses=2)
    one_pass(model, optimizer, math.inf, 2.0, loss_id=0, delay_unscale=True)
    amp._amp_state.loss_scalers[1] = LossScaler(2.0)
    one_pass(model, optimizer, 1.0, 1.0, loss_id=1)
    optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]
    assert scale(0) == INIT / 2


def test_step_with_scaled_gradients_is_refused() -> None:
    model, optimizer = start("O1")
    one_pass(model, optimizer, 1.0, 1.0, delay_unscale=True)
    with pytest.raises(CallOrderError, match=r"still scaled: .* delay_unscale=True"):
        optimizer.step()


def test_delayed_check_is_made_by_the_step() -> None:
    model, optimizer = start("O1")
    one_pass(model, optimizer, math.inf, 1.0, delay_overflow_check=True)
    assert scale() == INIT
    optimizer.step()
    assert scale() == INIT / 2
    assert model.w.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_pass_that_raises_leaves_earlier_gradients(level: str) -> None:
    model, optimizer = start(level, loss_scale=8.0)
    one_pass(model, optimizer, 1.0, 2.0)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(model.w.sum(), optimizer):
        raise ZeroDivisionError
    assert grads(optimizer) == [[1.0, 2.0]]
    one_pass(model, optimizer, 0.5, 0.5)
    assert grads(optimizer) == [[1.5, 2.5]]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_pass_that_raises_in_the_middle_leaves_nothing_of_its_own(level: str) -> None:
    model, optimizer = start(level, loss_scale=8.0)
    loss = model(torch.ones(2)).sum()
    hook = model.w.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    hook.remove()
    assert grads(optimizer) == [None]
    one_pass(model, optimizer, 0.5, 0.5)
    assert grads(optimizer) == [[0.5, 0.5]]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_zero_grad_clears_masters_that_a_pass_did_not_reach(level: str) -> None:
    one, other = Weights(1.0), Weights(1.0)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=1.0)
    amp.initialize([one, other], optimizer, opt_level=level, loss_scale=8.0)
    one_pass(one, optimizer, 0.5)
    one_pass(other, optimizer, 0.25)
    assert grads(optimizer) == [[0.5], [0.25]]
    one_pass(other, optimizer, 0.25)
    assert grads(optimizer) == [[0.5], [0.5]]
    optimizer.zero_grad()
    one_pass(other, optimizer, 0.25)
    assert grads(optimizer) == [None, [0.25]]
    optimizer.step()
    assert (one.w.tolist(), other.w.tolist()) == ([1.0], [0.75])


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_zero_grad_clears_masters_too(level: str, set_to_none: bool, whose: str) -> None:
    model, optimizer = start(level, loss_scale=8.0)
    owner: Any = optimizer if whose == "optimizer" else model
    one_pass(model, optimizer, 1.0, 2.0)
    owner.zero_grad(set_to_none=set_to_none)
    one_pass(model, optimizer, 4.0, 4.0)
    assert grads(optimizer) == [[4.0, 4.0]]
    owner.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert model.w.tolist() == [1.0, 2.0]


def test_writing_to_half_gradients_is_no_zero_grad() -> None:
    model, optimizer = start("O2")
    one_pass(model, optimizer, 1.0, 2.0)
    assert model.w.grad is not None
    model.w.grad.mul_(0.5)
    one_pass(model, optimizer, 1.0, 2.0)
    assert grads(optimizer) == [[2.0, 4.0]]


# Masters.


def test_o2_moves_masters_by_less_than_a_weight_can_show() -> None:
    model, optimizer = start("O2", lambda params: torch.optim.SGD(params, lr=2.0**-13))
    for _ in range(8):
        one_pass(model, optimizer, 1.0, 0.0)
        optimizer.step()
        optimizer.zero_grad()
    # float16 below 1 has steps of 2**-11: a single step of 2**-13 would be lost.
    assert model.w.tolist() == [1 - 2.0**-10, 2.0]
    assert model.w.dtype is HALF


def test_clipping_goes_through_master_params() -> None:
    model, optimizer = start("O2", lambda params: torch.optim.SGD(params, lr=1.0))
    one_pass(model, optimizer, 3.0, 4.0)
    norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 2.5)
    assert norm.item() == 5
    optimizer.step()
    assert model.w.tolist() == pytest.approx([1 - 1.5, 2 - 2.0], abs=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_group_added_after_initialize_is_trained(level: str) -> None:
    model, more = Weights(1.0), Weights(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize([model, more], optimizer, opt_level=level, loss_scale="dynamic")
    begin_low()
    optimizer.add_param_group({"params": more.parameters(), "lr": 0.25})
    for x, want in ((1.0, (0.5, 0.75)), (math.inf, (0.5, 0.75)), (1.0, (0.0, 0.5))):
        loss = (model(torch.tensor([x])) + more(torch.tensor([x]))).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert len(list(amp.master_params(optimizer))) == 2
        optimizer.step()
        optimizer.zero_grad()
        assert (model.w.item(), more.w.item()) == want


def test_backward_without_scale_loss_moves_masters_too() -> None:
    model, optimizer = start("O2", lambda params: torch.optim.SGD(params, lr=1.0))
    model(torch.tensor([2.0**-13, 0.5])).sum().backward()
    optimizer.step()
    assert [param.tolist() for param in amp.master_params(optimizer)] == [[1 - 2.0**-13, 1.5]]
    assert model.w.tolist() == [1.0, 1.5]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_masters_survive_a_checkpoint(make: Any) -> None:
    model, optimizer = start("O2", make)
    one_pass(model, optimizer, 0.001, 0.3)
    optimizer.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    want = [param.clone() for param in amp.master_params(optimizer)]
    twin, its = start("O2", make, weights=(5.0, 5.0))
    assert [param.tolist() for param in amp.master_params(its)] == [[5.0, 5.0]]  # makes masters
    twin.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    assert same(list(amp.master_params(its)), want)
    for each, optimizer_ in ((model, optimizer), (twin, its)):
        optimizer_.zero_grad()
        one_pass(each, optimizer_, 0.7, 0.1)
        optimizer_.step()
    mine, theirs = snapshot(model, optimizer), snapshot(twin, its)
    assert same((mine[0], mine[1]["state"]), (theirs[0], theirs[1]["state"]))


def test_state_of_apex_masters_is_loaded_unrounded() -> None:
    # Apex' optimizer holds float32 masters at O2, so its state is that of float32 parameters.
    master = nn.Parameter(torch.tensor([1.0, 2.0]))
    apex = torch.optim.Adam([master], lr=0.1)
    master.grad = torch.tensor([1 + 2.0**-20, 0.5])
    apex.step()
    model, optimizer = start("O2", OPTIMIZERS[1])
    optimizer.load_state_dict(copy.deepcopy(apex.state_dict()))
    assert same(dict(optimizer.state[model.w]), dict(apex.state[master]))
    one_pass(model, optimizer, 0.5, 0.5)
    optimizer.step()
    assert optimizer.state[model.w]["step"].item() == 2
    assert optimizer.state[model.w]["exp_avg"].dtype is FLOAT


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_device_trains_as_the_host(level: str, make: Any) -> None:
    def run(device: str) -> tuple[Any, float]:
        model = Weights(1.0, 2.0).to(device)
        optimizer = make(model.parameters())
        for group in optimizer.param_groups:
            group.update({"eps": 1e-2} if "eps" in group else {})
        amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
        begin_low()
        for x in (0.5, 0.25, math.inf, -1.0):
            for half in (0.5, 0.5):
                loss = model(torch.tensor([x * half, half], device=device)).sum()
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 8.0)
            optimizer.step()
            optimizer.zero_grad()
        return model.w.tolist(), scale()

    (mine, its_scale), (theirs, their_scale) = run("cuda"), run("cpu")
    # Operations on both are rounded once each; a weight has at most 11 or 24 bits of its own.
    assert mine == pytest.approx(theirs, rel=2.0**-9 if level != "O1" else 2.0**-20)
    assert its_scale == their_scale < INIT


def test_step_that_raised_is_recovered_from() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise ZeroDivisionError
            super().step(closure)

    model, optimizer = start("O2", lambda params: Failing(params, lr=1.0))
    one_pass(model, optimizer, 0.5, 0.0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    Failing.fails = False
    optimizer.zero_grad()
    one_pass(model, optimizer, 0.25, 0.0)
    optimizer.step()
    assert model.w.tolist() == [0.75, 2.0]
    assert optimizer.param_groups[0]["params"][0] is model.w


def test_state_from_before_initialize_is_cast_at_o3() -> None:
    model = Weights(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model.w.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    amp.initialize(model, optimizer, opt_level="O3")
    assert optimizer.state[model.w]["momentum_buffer"].dtype is HALF


def test_eps_that_is_zero_in_half_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"eps=1e-08 of Adam is 0 in torch.float16"):
        start("O3", lambda params: torch.optim.Adam(params))
    start("O2", lambda params: torch.optim.Adam(params))


# Checkpoints of the scales.


def test_scales_are_saved_and_loaded() -> None:
    model, optimizer = start("O1", num_losses=2)
    one_pass(model, optimizer, 1.0, 1.0, loss_id=0)
    one_pass(model, optimizer, math.inf, 1.0, loss_id=1)
    saved = amp.state_dict()
    assert saved == {
        "loss_scaler0": {"loss_scale": INIT, "unskipped": 1},
        "loss_scaler1": {"loss_scale": INIT / 2, "unskipped": 0},
    }
    start("O2", num_losses=2)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    start("O2", num_losses=2, loss_scale=128.0)
    amp.load_state_dict(saved)
    assert scale(1) == INIT / 2


def test_collapsed_scale_of_an_old_checkpoint_is_lifted() -> None:
    start("O1")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 1e-314, "unskipped": 0}})
    assert scale() == 2.0**-14


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}}, "has 1 loss scalers, .* created 2"),
        ({}, "must be what amp.state_dict"),
        ({"scale": 1.0, "growth_tracker": 1, "hysteresis_tracker": 1}, "must be what amp.state"),
        (
            {
                "loss_scaler0": {"loss_scale": 4.0, "unskipped": 0},
                "loss_scaler1": {"loss_scale": -1.0, "unskipped": 0},
            },
            "must be a finite number > 0",
        ),
        (
            {
                "loss_scaler0": {"loss_scale": 4.0, "unskipped": 0},
                "loss_scaler1": {"loss_scale": 1e-60, "unskipped": 0},
            },
            "loss_scaler1: loss_scale must be a normal float32 number",
        ),
    ],
)
def test_wrong_state_is_refused_and_nothing_is_loaded(state: Any, message: str) -> None:
    start("O1", num_losses=2, loss_scale=2.0)
    with pytest.raises(StateError, match=message):
        amp.load_state_dict(state)
    assert [scale(0), scale(1)] == [2.0, 2.0]


def test_comparison_can_fail() -> None:
    one = {"a": [torch.ones(2), 1.0]}
    assert same(one, {"a": [torch.ones(2), 1.0]})
    for other in ({"a": [torch.zeros(2), 1.0]}, {"a": [torch.ones(2), 2.0]}, {"b": one["a"]}):
        assert not same(one, other)
    assert not same(torch.ones(2), torch.ones(2, dtype=HALF))
    assert not same([1], [1, 2])
