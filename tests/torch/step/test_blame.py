from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import torch_has
from cpu_graph import keep_in_tensors
from gradscale import Dynamic, Static
from gradscale.torch import Culprit, GradScaler
from gradscale.torch.grads.reference import Measurement
from one_weight import root

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYERS = 50


def deep(device: str) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in range(LAYERS)))


def unnamed(model: nn.Module, scaler: GradScaler) -> Optimizer:
    return AdamW(model.parameters())


def named_by_the_optimizer(model: nn.Module, scaler: GradScaler) -> Optimizer:
    torch_has.named_parameters()
    return SGD(model.named_parameters(), lr=0.1)  # type: ignore[arg-type]


def named_by_the_model(model: nn.Module, scaler: GradScaler) -> Optimizer:
    scaler.name(model)
    return SGD(model.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize("two_calls", [False, True])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (unnamed, ["group 0, parameter 14, shape (4, 4)", "group 0, parameter 81, shape (4,)"]),
        (named_by_the_optimizer, ["7.weight", "40.bias"]),
        (named_by_the_model, ["7.weight", "40.bias"]),
    ],
)
def test_culprits_are_named_and_counted(
    make: Callable[[nn.Module, GradScaler], Optimizer], names: list[str], two_calls: bool
) -> None:
    model, scaler = deep("cpu"), GradScaler("cpu", policy=Static(init_scale=4.0))
    optimizer = make(model, scaler)
    scaler.backward(model(torch.ones(4)).sum())
    model[7].weight.grad[1:3, 2] = -math.inf
    model[7].weight.grad[0, 0] = math.nan
    model[40].bias.grad[3] = math.nan
    if two_calls:
        scaler.apply(optimizer)
    else:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.outcome().culprits() == [Culprit(names[0], 0, 2, 1), Culprit(names[1], 0, 0, 1)]
    assert scaler.outcome().verdict() == "scale too high"
    scaler.backward(model(torch.ones(4)).sum())
    assert scaler.apply(optimizer).culprits() == []


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("way", ["torch", "ours", "value"])
def test_clipping_does_not_hide_the_culprit(way: str, value: float) -> None:
    model, scaler = deep("cpu"), GradScaler("cpu")
    scaler.name(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler.backward(model(torch.ones(4)).sum())
    model[7].weight.grad[1, 2] = value
    if way == "value":
        scaler.apply(optimizer, clip_value=1.0)
    else:
        if way == "torch":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    infs = int(math.isinf(value))
    assert scaler.outcome().culprits() == [Culprit("7.weight", 0, infs, 1 - infs)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("two_calls", [False, True])
def test_what_does_not_fit_is_named_too(two_calls: bool, fused: bool) -> None:
    torch_has.named_parameters()
    scaler, w = GradScaler("cpu", init_scale=2.0**-10), torch.ones(2, requires_grad=True)
    optimizer = SGD([("w", w)], lr=1.0, fused=fused)
    scaler.backward(w.sum())
    w.grad[1] = 2.0**120
    _ = scaler.apply(optimizer) if two_calls else scaler.step(optimizer)
    assert scaler.outcome().verdict() == "scale too low"
    assert scaler.outcome().culprits() == [Culprit("w", 0, 1, 0)]


@pytest.mark.parametrize("device", DEVICES)
def test_outcomes_can_be_pickled(device: str) -> None:
    scaler, w = GradScaler(device), torch.ones(2, device=device, requires_grad=True)
    optimizer = SGD([w], lr=1.0, fused=True)
    for value in (1.0, math.inf):
        scaler.backward(w.sum())
        w.grad.fill_(value)
        outcome = scaler.apply(optimizer)
        twin = pickle.loads(pickle.dumps(outcome))
        assert repr(twin) == repr(outcome)
        assert twin.culprits() == outcome.culprits()


@pytest.mark.gpu
def test_culprits_on_a_device_are_named_without_a_count_until_kernels_count() -> None:
    model, scaler = deep("cuda"), GradScaler("cuda")
    scaler.name(model)
    optimizer = AdamW(model.parameters(), fused=True)
    scaler.backward(model(torch.ones(4, device="cuda")).sum())
    model[7].weight.grad[1:3, 2] = -math.inf
    model[40].bias.grad[3] = math.nan
    found = scaler.apply(optimizer).culprits()
    assert [(bad.name, bad.infs != 0, bad.nans != 0) for bad in found] == [
        ("7.weight", True, False),
        ("40.bias", False, True),
    ]


def sums(y: Tensor) -> Tensor:
    return y.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("verdict", "loss", "scale", "slope"),
    [
        ("applied", sums, 8.0, 1.0),
        ("loss not finite", lambda y: (y * math.inf).sum(), 8.0, 1.0),
        ("stuck at the floor", root, 2.0**-14, 1.0),
        ("scale too high", lambda y: (y.sqrt() * 0.0).sum(), 8.0, 1.0),  # who knows
        ("scale too high", sums, 8.0, 2.0**126),
        ("scale too high", root, 8.0, 1.0),
    ],
)
def test_verdicts(
    device: str, verdict: str, loss: Callable[[Tensor], Tensor], scale: float, slope: float
) -> None:
    scaler = GradScaler(device, policy=Dynamic(init_scale=scale))
    w = torch.zeros(1, device=device, requires_grad=True)
    scaler.backward(loss(w * slope))
    outcome = scaler.apply(SGD([w], lr=1.0))
    assert outcome.verdict() == verdict
    assert bool(outcome) is (verdict == "applied")
    assert verdict in repr(outcome)


def test_nan_is_an_overflow_until_lower_scales_do_not_help() -> None:
    # Overflows of both signs: infinity minus infinity is all that is left in the gradients.
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    scaler, optimizer = GradScaler("cpu", init_scale=2.0**12), SGD(model.parameters(), lr=0.0)
    x = torch.randn(64, 8)
    verdicts = []
    for _ in range(20):
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x)
        scaler.backward(nn.functional.mse_loss(y.float(), x.sum(1, keepdim=True) * 3e4))
        verdicts.append(scaler.apply(optimizer).verdict())
    first = verdicts.index("applied")
    assert first > 8
    assert verdicts == ["scale too high"] * first + ["applied"] * (20 - first)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("two_calls", [False, True])
def test_nan_beside_small_finite_gradients_is_no_overflow(fused: bool, two_calls: bool) -> None:
    model, scaler = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), GradScaler("cpu")
    optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
    verdicts = []
    for _ in range(25):
        hidden = model[0](torch.ones(1, 2))
        hidden.register_hook(lambda grad: grad * math.nan)
        scaler.backward(model[1](hidden).sum())
        if two_calls:
            scaler.apply(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        verdicts.append(scaler.outcome().verdict())
    # The bias has a gradient of 1, so 2**5 is the first scale with ten binades of headroom.
    assert verdicts == ["scale too high"] * 11 + ["NaN at any scale"] * 14


@pytest.mark.parametrize(("policy", "verdict"), [("static", "high"), ("dynamic", "NaN")])
def test_nan_at_a_scale_that_nothing_lowers_may_be_an_overflow(policy: str, verdict: str) -> None:
    settings = {"static": Static(init_scale=2.0**40), "dynamic": Dynamic(init_scale=2.0**40)}
    weight = nn.Parameter(torch.ones(1))
    scaler = GradScaler("cpu", policy=settings[policy], on_stuck="ignore")
    optimizer = SGD([weight], lr=0.1)
    for _ in range(25):
        loss = weight.sum()
        loss.register_hook(lambda grad: grad * math.nan)  # as infinity minus infinity
        scaler.backward(loss)
        scaler.apply(optimizer)
    assert verdict in scaler.outcome().verdict()


def test_what_does_not_fit_is_a_scale_too_low() -> None:
    scaler, w = GradScaler("cpu", init_scale=2.0**-10), torch.ones(1, requires_grad=True)
    scaler.backward((w * 2.0**120).sum())
    w.grad.fill_(2.0**120)
    assert scaler.apply(SGD([w], lr=1.0)).verdict() == "scale too low"


@pytest.mark.gpu
def test_an_outcome_says_whether_it_is_ready() -> None:
    scaler, w = GradScaler("cuda"), torch.ones(1, device="cuda", requires_grad=True)
    optimizer = SGD([w], lr=1.0, fused=True)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    scaler.backward(w.sum())
    outcome = scaler.apply(optimizer)
    assert not outcome.ready()
    assert repr(outcome) == "StepOutcome(still on the device)"
    torch.cuda.synchronize()
    assert outcome.ready()
    assert "applied" in repr(outcome)


def test_two_reads_of_a_step_are_not_compared_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(found: object, other: object) -> bool:
        raise AssertionError("comparing tensors waits for the device")

    scaler, w = GradScaler("cpu", init_scale=4.0, recheck=True), torch.ones(2)
    keep_in_tensors(scaler)
    optimizer = SGD([w.requires_grad_()], lr=1.0)
    scaler.scale(w.sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(Measurement, "__eq__", compared)
        scaler.step(optimizer)
    assert not scaler.outcome().applied
