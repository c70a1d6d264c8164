"""`apex.parallel.LARC`: its rule, over any optimizer, and together with loss scaling."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.compat.apex import amp
from gradscale.compat.apex.fp16_utils import FP16_Optimizer
from gradscale.compat.apex.larc import LARC
from gradscale.errors import CallOrderError
from gradscale.policy import Static
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch import optim as fused
from tensors import same

pytestmark = pytest.mark.usefixtures("fresh_amp")
SETTINGS: dict[str, Any] = {"trust_coefficient": 0.5, "clip": False, "eps": 0.0}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "sgd of ours": lambda params: fused.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw of ours": lambda params: fused.AdamW(params, lr=0.01),
}


def weight(*values: float, grad: Any = None) -> nn.Parameter:
    """A parameter, with a gradient."""
    param = nn.Parameter(torch.tensor(values))
    param.grad = None if grad is None else torch.tensor(grad)
    return param


# The rule. All numbers are exact: the norms are 5 and 10.


@pytest.mark.parametrize(
    ("settings", "group", "want"),
    [
        ({}, {}, [1.5, 2.0]),
        ({"trust_coefficient": 0.25}, {}, [0.75, 1.0]),
        ({"eps": 10.0}, {}, [0.75, 1.0]),
        ({}, {"weight_decay": 2.0}, [1.5, 2.0]),
        ({}, {"lr": 0.5}, [1.5, 2.0]),
        ({"clip": True}, {"lr": 1.0}, [1.5, 2.0]),
        ({"clip": True}, {"lr": 0.5}, [3.0, 4.0]),
        ({"clip": True}, {"lr": 0.125}, [6.0, 8.0]),
        ({"clip": True}, {"lr": torch.tensor(0.5)}, [3.0, 4.0]),
    ],
)
def test_gradient_is_scaled_by_the_ratio_of_norms(
    settings: dict[str, Any], group: dict[str, Any], want: list[float]
) -> None:
    param = weight(3.0, 4.0, grad=[6.0, 8.0])
    settled = {"lr": 1.0, **group}
    optimizer = LARC(torch.optim.SGD([param], **settled), **{**SETTINGS, **settings})
    optimizer.step()
    assert param.grad is not None
    assert param.grad.tolist() == want
    assert param.tolist() == [3.0 - settled["lr"] * want[0], 4.0 - settled["lr"] * want[1]]
    assert optimizer.param_groups[0]["weight_decay"] == group.get("weight_decay", 0)


@pytest.mark.parametrize("clip", [True, False])
def test_norm_of_zero_is_left_alone(clip: bool) -> None:
    params = [weight(0.0, 0.0, grad=[6.0, 8.0]), weight(3.0, 4.0, grad=[0.0, 0.0]), weight(1.0)]
    optimizer = LARC(torch.optim.SGD(params, lr=1.0, weight_decay=2.0), clip=clip)
    optimizer.step()
    assert [param.tolist() for param in params] == [[-6.0, -8.0], [3.0, 4.0], [1.0]]


def test_norm_beyond_float16_is_taken_in_float32() -> None:
    param = nn.Parameter(torch.full((4,), 40000.0, dtype=torch.float16))
    param.grad = torch.ones_like(param)
    LARC(torch.optim.SGD([param], lr=1.0), trust_coefficient=2.0**-14, clip=False, eps=0.0).step()
    assert param.grad.tolist() == [2.44140625] * 4  # 80000 / 2 / 2**14, rounded by nothing


def test_sparse_gradient_is_scaled() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]]))
    (embedding(torch.tensor([3, 3])) * torch.tensor([3.0, 4.0])).sum().backward()
    LARC(torch.optim.SGD(embedding.parameters(), lr=1.0), **SETTINGS).step()
    assert embedding.weight[3].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_sees_scaled_gradients_and_no_weight_decay(name: str) -> None:
    def run(wrapped: bool) -> list[list[float]]:
        param = weight(3.0, 4.0)
        inner = OPTIMIZERS[name]([param])
        decay = inner.param_groups[0]["weight_decay"]
        larc = LARC(inner)
        for grad in ([6.0, 8.0], [1.0, -1.0], [0.5, 3.0]):
            param.grad = torch.tensor(grad)
            if wrapped:
                larc.step()
                assert inner.param_groups[0]["weight_decay"] == decay
            else:
                inner.param_groups[0]["weight_decay"] = 0
                larc._adapt([decay])
                inner.step()
        return [param.tolist(), *(v.tolist() for v in inner.state[param].values() if v.ndim)]

    assert run(True) == run(False)


def test_step_that_raises_gives_the_weight_decay_back() -> None:
    def fail() -> Any:
        raise ZeroDivisionError

    optimizer = LARC(torch.optim.SGD([weight(1.0, grad=[1.0])], lr=1.0, weight_decay=0.5))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fail)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_closure_is_evaluated_and_its_gradients_are_scaled() -> None:
    param = weight(3.0, 4.0)
    optimizer = LARC(torch.optim.SGD([param], lr=1.0), **SETTINGS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * torch.tensor([6.0, 8.0])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 50.0
    assert param.tolist() == [1.5, 2.0]


def test_lbfgs_has_every_evaluation_scaled() -> None:
    param = weight(3.0, 4.0)
    seen: list[list[float]] = []
    optimizer = LARC(torch.optim.LBFGS([param], lr=1.0, max_iter=3), **SETTINGS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        seen.append(param.tolist())
        return loss

    optimizer.step(closure)
    # Twice the parameter has twice its norm: the factor is 1/4, so that the gradient is half of it.
    assert len(seen) > 1
    assert param.grad is not None
    assert param.grad.tolist() == [value / 2 for value in seen[-1]]


# In the place of an optimizer.


def test_it_is_the_optimizer_inside() -> None:
    param, other = weight(1.0, 2.0), weight(3.0)
    inner = torch.optim.SGD([param], lr=0.5, momentum=0.5)
    optimizer = LARC(optimizer=inner, trust_coefficient=0.001, clip=False)
    assert optimizer.optim is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [other]})
    assert inner.param_groups[1]["params"] == [other]
    param.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[param] is inner.state[param]
    assert same(optimizer.state_dict(), inner.state_dict())
    optimizer.zero_grad()
    assert param.grad is None
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = LARC(torch.optim.SGD([{"params": [weight(1.0, 2.0)]}, {"params": [weight(3.0)]}]))
    fresh.load_state_dict(saved)
    assert same(fresh.optim.state_dict(), saved)
    assert "trust_coefficient=0.001" in repr(optimizer)


def test_hooks_are_called_once() -> None:
    optimizer = LARC(torch.optim.SGD([weight(1.0, grad=[1.0])], lr=0.5))
    called: list[str] = []
    for name in ("step", "state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            hook = functools.partial(lambda label, *_: called.append(label), f"{name} {when}")
            getattr(optimizer, f"register_{name}_{when}_hook")(hook)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [
        "step pre",
        "step post",
        "state_dict pre",
        "state_dict post",
        "load_state_dict pre",
        "load_state_dict post",
    ]


def test_copies_are_whole() -> None:
    optimizer = LARC(torch.optim.SGD([weight(1.0)], lr=0.5), trust_coefficient=0.25, clip=False)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.trust_coefficient, other.clip, other.eps) == (0.25, False, 1e-8)
        (param,) = other.param_groups[0]["params"]
        param.grad = torch.ones(1)
        other.step()
        assert param.tolist() == [0.875]


@pytest.mark.parametrize("whose", ["larc", "inside"])
def test_scheduler_sets_its_learning_rate(whose: str) -> None:
    optimizer = LARC(torch.optim.SGD([weight(1.0, grad=[1.0])], lr=1.0))
    target = optimizer if whose == "larc" else optimizer.optim
    scheduler = torch.optim.lr_scheduler.StepLR(target, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


# With loss scaling.


def train(make: Callable[[Any], Any], step: Callable[[nn.Module, Any, Tensor], None]) -> list[Any]:
    """The weights after steps with six batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = LARC(make(model.parameters()))
    for _ in range(6):
        step(model, optimizer, torch.randn(16, 4))
    return [param.tolist() for param in model.parameters()]


def plain(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    """A step without scaling."""
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def scaled_step(scaler: Any, how: str) -> Callable[[nn.Module, Any, Tensor], None]:
    """A step with `scaler`."""

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            return loss

        if how == "closure":
            scaler.step(optimizer, closure)
        else:
            closure()
            if how == "apply":
                scaler.apply(optimizer)
                return
            if how == "unscale_":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize("how", ["step", "unscale_", "apply", "closure"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_steps_are_the_unscaled_ones(name: str, how: str) -> None:
    # A power of two is taken out exactly, and then nothing of it is left in the norms.
    want = train(OPTIMIZERS[name], plain)
    assert train(OPTIMIZERS[name], scaled_step(GradScaler("cpu"), how)) == want
    if how in ("step", "unscale_"):
        assert train(OPTIMIZERS[name], scaled_step(torch.amp.GradScaler("cpu"), how)) == want


def test_gradients_that_stay_scaled_would_be_found() -> None:
    def forgetful(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x).square().mean() * 2.0**16).backward()
        optimizer.step()

    assert train(OPTIMIZERS["sgd"], forgetful) != train(OPTIMIZERS["sgd"], plain)


def test_overflow_is_skipped_and_leaves_no_trace() -> None:
    param = weight(3.0, 4.0)
    optimizer = LARC(torch.optim.SGD([param], lr=1.0, momentum=0.5, weight_decay=0.5))
    scaler = GradScaler("cpu", init_scale=4.0)
    for grad in ([1.0, 2.0], [1e38, 1.0]):
        before = copy.deepcopy((param, optimizer.state_dict()))
        scaler.scale((param * torch.tensor(grad)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert same((param, optimizer.state_dict()), before)


def test_mixed_precision_steps_masters_with_it() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[3.0, 4.0]]))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        mp = MixedPrecision(model, optimizer, "fp16-master", policy=Static(8.0))
        with mp.autocast():
            loss = model(torch.tensor([[6.0, 8.0]])).sum()
        mp.backward(loss)
        mp.step()
        return model.weight.float().flatten().tolist()

    assert run(lambda optimizer: LARC(optimizer, **SETTINGS)) == [1.5, 2.0]
    assert run(lambda optimizer: optimizer) == [-3.0, -4.0]


# With amp. The weights are 3 and 4, the gradients 6 and 8, as above.


def start(level: str, **overrides: Any) -> tuple[nn.Module, LARC]:
    """A model and LARC around its optimizer, at an opt level."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), **SETTINGS)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **overrides)
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = 8.0
    return model, optimizer


def one_step(model: nn.Module, optimizer: Any, *x: float) -> None:
    """A backward pass whose unscaled gradient is `x`, and a step."""
    optimizer.zero_grad()
    loss = model(torch.tensor([x])).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_amp_steps_with_unscaled_gradients(level: str) -> None:
    model, optimizer = start(level)
    one_step(model, optimizer, 6.0, 8.0)
    assert [param.tolist() for param in amp.master_params(optimizer)] == [[[1.5, 2.0]]]
    assert model.weight.tolist() == [[1.5, 2.0]]


def test_norms_are_those_of_masters() -> None:
    model, optimizer = start("O2")
    for _ in range(4):
        one_step(model, optimizer, 2.0**-9, 2.0**-8)
    (master,) = amp.master_params(optimizer)
    param = weight(3.0, 4.0)
    want = LARC(torch.optim.SGD([param], lr=1.0, momentum=0.5), **SETTINGS)
    for _ in range(4):
        param.grad = torch.tensor([2.0**-9, 2.0**-8])
        want.step()
    assert master.flatten().tolist() == param.tolist()
    assert model.weight.dtype is torch.float16
    assert master.tolist() != model.weight.tolist()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_amp_skips_an_overflow(level: str) -> None:
    model, optimizer = start(level)
    one_step(model, optimizer, 6.0, 8.0)
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    one_step(model, optimizer, float("inf"), 8.0)
    assert same((dict(model.state_dict()), optimizer.state_dict()), before)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_run_goes_on_from_a_checkpoint(level: str) -> None:
    model, optimizer = start(level)
    one_step(model, optimizer, 6.0, 8.5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    one_step(model, optimizer, 0.3, 0.7)
    want = [param.tolist() for param in amp.master_params(optimizer)]
    model, optimizer = start(level)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    one_step(model, optimizer, 0.3, 0.7)
    assert [param.tolist() for param in amp.master_params(optimizer)] == want


def test_amp_refuses_a_closure() -> None:
    _, optimizer = start("O1")
    with pytest.raises(CallOrderError, match="was called with a closure"):
        optimizer.step(lambda: 0.0)


def test_fp16_optimizer_goes_around_it() -> None:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
    layer.half()
    inner = LARC(torch.optim.SGD(layer.parameters(), lr=1.0), **SETTINGS)
    optimizer = FP16_Optimizer(inner, static_loss_scale=8.0)
    optimizer.zero_grad()
    optimizer.backward(layer(torch.tensor([[6.0, 8.0]], dtype=torch.float16)).float().sum())
    optimizer.step()
    assert layer.weight.tolist() == [[1.5, 2.0]]
