from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from gradscale import CallOrderError, Dynamic, GradStats, SettingError
from gradscale.torch import GradScaler
from tensors import parameter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.25, momentum=0.5),
    "sgd-fused": lambda params: SGD(params, lr=0.25, fused=True),
    "adamw": lambda params: AdamW(params, lr=0.25),
    "adamw-fused": lambda params: AdamW(params, lr=0.25, fused=True),
}
# Gradients are these numbers times the scale; 2**120 overflows from a scale of 2**8 on.
SLOPES = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, -2.0, 2.0**-20, 2.0**120]), min_size=3, max_size=3),
    min_size=1,
    max_size=12,
)


def slope(w: Tensor, slopes: list[float]) -> Tensor:
    """A loss whose gradient is `slopes`."""
    return (w * torch.tensor(slopes, device=w.device)).sum()


def state_of(optimizer: Optimizer) -> list[Any]:
    states = optimizer.state_dict()["state"].values()
    return [v.tolist() if isinstance(v, Tensor) else v for s in states for v in s.values()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@given(history=SLOPES)
def test_two_calls_do_what_torchs_five_do(kind: str, history: list[list[float]]) -> None:
    ours, theirs = (
        scaler("cpu", init_scale=2.0**16, growth_interval=2)
        for scaler in (GradScaler, torch.amp.GradScaler)
    )
    params = [parameter(1.0, 2.0, 3.0) for _ in range(2)]
    optimizers = [OPTIMIZERS[kind]([w]) for w in params]
    for slopes in history:
        ours.backward(slope(params[0], slopes))
        outcome = ours.apply(optimizers[0])
        theirs.scale(slope(params[1], slopes)).backward()
        theirs.step(optimizers[1])
        theirs.update()
        optimizers[1].zero_grad()
        assert params[0].grad is None
        overflow = max(map(abs, slopes)) * float(outcome.scale) >= 2.0**128
        assert bool(outcome.applied) is not overflow
        if outcome:
            # Squares of these are exact, and so is a sum of three.
            assert float(outcome.grad_norm) == pytest.approx(math.hypot(*slopes), rel=2.0**-22)
            assert float(outcome.amax) == max(map(abs, slopes)) * float(outcome.scale)
        else:
            assert math.isnan(outcome.grad_norm)
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
    assert params[0].tolist() == params[1].tolist()
    if state_of(optimizers[0]):  # else all steps were skipped, and on the CPU none was called
        assert state_of(optimizers[0]) == state_of(optimizers[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_clip_norm_does_what_torchs_clipping_does(kind: str, device: str) -> None:
    scaler = GradScaler(device, init_scale=2.0**10)
    ours, theirs = (parameter(*range(100), device=device) for _ in range(2))
    optimizers = [OPTIMIZERS[kind]([w]) for w in (ours, theirs)]
    for step in range(5):
        slopes = torch.linspace(-1 - step, 1, 100, device=device)
        scaler.backward((ours * slopes).sum())
        outcome = scaler.apply(optimizers[0], clip_norm=1.5)
        theirs.grad = slopes.clone()
        norm = torch.nn.utils.clip_grad_norm_([theirs], 1.5)
        optimizers[1].step()
        # Two more roundings of the factor, and the norm's own: 100 terms, half of 99 u.
        assert float(outcome.grad_norm) == pytest.approx(float(norm), rel=60 * 2.0**-24)
    # The gradients agree to 60 roundings; five steps of at most 0.25 each carry that over.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * 0.25 * 64 * 2.0**-24 * 100)


def test_clip_value_comes_before_clip_norm_and_the_norm_is_that_before_both() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(0.0, 0.0, 0.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(slope(w, [30.0, -40.0, 0.5]))
    outcome = scaler.apply(optimizer, clip_value=4.0)
    assert w.tolist() == [-4.0, 4.0, -0.5]
    assert float(outcome.grad_norm) == pytest.approx(math.hypot(30, 40, 0.5), rel=2.0**-22)
    assert float(outcome.amax) == 160.0
    torch.nn.init.zeros_(w)
    scaler.backward(slope(w, [30.0, -40.0, 0.0]))
    scaler.apply(optimizer, clip_value=4.0, clip_norm=1.0)
    root = math.sqrt(0.5)
    assert w.tolist() == pytest.approx([-root, root, 0.0], rel=1e-6)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("fused", [False, True])
def test_several_optimizers_are_one_step_with_one_norm(fused: bool) -> None:
    scaler, a, b = GradScaler("cpu", init_scale=4.0), parameter(0.0), parameter(0.0)
    optimizers = [SGD([a], lr=1.0, fused=fused), SGD([b], lr=1.0)]
    scaler.backward(slope(a, [30.0]) + slope(b, [40.0]))
    outcome = scaler.apply(optimizers, clip_norm=5.0)
    assert float(outcome.grad_norm) == 50.0
    assert [a.item(), b.item()] == pytest.approx([-3.0, -4.0], rel=1e-6)
    before = [a.item(), b.item()]
    scaler.backward(slope(a, [1.0]) + slope(b, [1.0]))
    b.grad.fill_(math.inf)
    outcome = scaler.apply(optimizers)
    assert [a.item(), b.item()] == before
    assert not outcome.applied
    assert [bool(scaler.outcome(o).applied) for o in optimizers] == [False, False]
    assert scaler.get_scale() == 2.0
    assert a.grad is None
    assert b.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_of_two_optimizers_is_unscaled_once(fused: bool) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(0.0)
    optimizers = [SGD([w], lr=1.0, fused=fused), SGD([w], lr=2.0, fused=fused)]
    scaler.backward(slope(w, [1.0]))
    outcome = scaler.apply(optimizers)
    assert w.item() == -3.0
    assert float(outcome.grad_norm) == 1.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_stay_if_asked_to_unscaled_or_cleared(kind: str) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(0.0, 0.0)
    optimizer = OPTIMIZERS[kind]([w])
    scaler.backward(slope(w, [1.0, 2.0]))
    scaler.apply(optimizer, zero_grad=False)
    assert w.grad.tolist() == [1.0, 2.0]
    with pytest.raises(CallOrderError, match="no new gradients"):
        scaler.apply(optimizer)
    optimizer.zero_grad()
    scaler.backward(slope(w, [math.inf, 2.0]))
    scaler.apply(optimizer, zero_grad=False)
    assert w.grad.tolist() == [0.0, 0.0]


def test_gradients_unscaled_and_edited_before_are_read_again() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(0.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(slope(w, [1.0]))
    scaler.unscale_(optimizer)
    w.grad.mul_(3.0)
    outcome = scaler.apply(optimizer, clip_norm=10.0)
    assert w.item() == -3.0
    assert float(outcome.grad_norm) == 3.0
    scaler.backward(slope(w, [1.0]))
    scaler.unscale_(optimizer)
    w.grad.fill_(math.nan)
    assert scaler.apply(optimizer).verdict() == "scale too low"
    assert w.item() == -3.0
    assert scaler.get_scale() == 4.0


def test_a_closure_is_evaluated_with_unscaled_clipped_gradients() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(3.0, 4.0)
    seen: list[list[float]] = []

    class Watch(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            seen.append(w.grad.tolist())
            return super().step() or loss

    optimizer = Watch([w], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = slope(w, [3.0, 4.0])
        scaler.backward(loss)
        return loss

    assert scaler.apply(optimizer, closure=closure).loss.detach() == 25.0
    assert scaler.apply(optimizer, closure=closure, clip_norm=0.5)
    assert seen == [[3.0, 4.0], pytest.approx([0.3, 0.4], rel=1e-6)]
    scaler = GradScaler("cpu", enabled=False)
    scaler.apply(optimizer, closure=closure, clip_value=1.0)
    assert seen[-1] == [1.0, 1.0]


def test_lbfgs_finds_the_minimum() -> None:
    scaler, w = GradScaler("cpu"), parameter(5.0, -3.0)
    optimizer = LBFGS([w], line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w - torch.tensor([1.0, 2.0])).square().sum()
        scaler.backward(loss)
        return loss

    assert scaler.apply(optimizer, closure=closure)
    assert w.tolist() == pytest.approx([1.0, 2.0], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_every_format(dtype: torch.dtype, device: str) -> None:
    scaler = GradScaler(device, init_scale=2.0**10)
    w = parameter(1.0, 1.0, dtype=dtype, device=device)
    v = parameter(1.0, device=device)
    optimizer = SGD([w, v], lr=0.5)
    scaler.backward(w.float().sum() + v.sum())
    assert scaler.apply(optimizer, clip_norm=100.0)
    assert w.tolist() == [0.5, 0.5]
    assert v.tolist() == [0.5]


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("bad", [None, 7])
def test_accumulation_gives_what_one_batch_gives(count: int, bad: int | None) -> None:
    batch = torch.arange(16.0) + 1.0
    if bad is not None:
        batch[bad] = 2.0**120
    scaler, w = GradScaler("cpu"), parameter(1.0)
    optimizer = SGD([w], lr=2.0**-8)
    for micro in batch.chunk(count):
        scaler.backward((w * micro).sum() / 16)
    outcome = scaler.apply(optimizer)
    assert bool(outcome.applied) is (bad is None)
    assert w.item() == (1.0 if bad is not None else 1.0 - 2.0**-8 * 8.5)
    assert scaler.get_scale() == (2.0**16 if bad is None else 2.0**15)


def test_a_disabled_scaler_clips_and_steps() -> None:
    scaler, w = GradScaler("cpu", enabled=False), parameter(0.0, 0.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(slope(w, [30.0, 40.0]))
    outcome = scaler.apply(optimizer, clip_norm=5.0)
    assert w.tolist() == pytest.approx([-3.0, -4.0], rel=1e-6)
    assert bool(outcome.applied)
    assert w.grad is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_norm": 0.0},
        {"clip_norm": math.nan},
        {"clip_value": -1.0},
        {"clip_norm": "1"},
        {"clip_norm": True},
        {"optimizers": []},
        {"optimizers": None},
        {"optimizers": torch.nn.Linear(1, 1)},
        {"optimizers": [torch.nn.Linear(1, 1)]},
        {"optimizers": 2},
        {"optimizers": 2, "closure": lambda: None},
    ],
)
def test_bad_arguments_are_errors_and_change_nothing(wrong: dict[str, Any]) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), parameter(1.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    given = dict(wrong)
    optimizers = given.pop("optimizers", optimizer)
    before = copy.deepcopy(w.grad)
    with pytest.raises(SettingError):
        scaler.apply([optimizer, optimizer] if optimizers == 2 else optimizers, **given)
    assert torch.equal(w.grad, before)
    assert scaler.apply(optimizer)
    assert w.item() == 0.0


def test_apply_without_a_backward_pass_is_an_error() -> None:
    scaler, w = GradScaler("cpu"), parameter(1.0)
    optimizer = SGD([w], lr=1.0)
    with pytest.raises(CallOrderError, match="scale"):
        scaler.apply(optimizer)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    with pytest.raises(CallOrderError, match="no new gradients"):
        scaler.apply(optimizer)


@pytest.mark.parametrize("kind", ["sgd", "sgd-fused"])
def test_an_optimizer_that_raises_can_be_asked_again(kind: str) -> None:
    scaler, w = GradScaler("cpu", init_scale=16.0), parameter(0.0)
    optimizer = OPTIMIZERS[kind]([w])
    failures = [MemoryError]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    optimizer.register_step_pre_hook(fail)
    scaler.backward(w.sum())
    with pytest.raises(MemoryError):
        scaler.apply(optimizer)
    assert scaler.apply(optimizer)
    assert w.item() == -0.25


@pytest.mark.parametrize("fused", [False, True])
def test_float64_gradients(fused: bool) -> None:
    scaler, w = GradScaler("cpu"), parameter(0.0, 0.0, dtype=torch.float64)
    scaler.backward(slope(w, [3.0, 4.0]))
    outcome = scaler.apply(SGD([w], lr=1.0, fused=fused), clip_norm=2.5)
    assert w.tolist() == pytest.approx([-1.5, -2.0], rel=1e-6)
    assert outcome.grad_norm.dtype is torch.float32


def test_a_load_between_backward_passes_does_not_mix_scales() -> None:
    scaler, w = GradScaler("cpu", init_scale=64.0), parameter(0.0)
    optimizer = SGD([w], lr=1.0)
    scaler.watch(optimizer)
    scaler.backward(w.sum())
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
    scaler.backward(w.sum())
    assert scaler.apply(optimizer)
    assert w.item() == -2.0
    assert scaler.get_scale() == 16.0


def test_underflow_is_that_of_all_optimizers_also_with_clip_value() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, underflow_every=1)
    a, b = parameter(0.0), parameter(0.0)
    optimizers = [SGD([a], lr=1.0), SGD([b], lr=1.0)]
    for clip in (None, 1.0):
        scaler.backward(slope(a, [1.0]) + slope(b, [2.0**-20]))
        assert float(scaler.apply(optimizers, clip_value=clip).underflow) == 0.5


def test_a_loss_that_was_not_scaled_is_an_error() -> None:
    scaler, w = GradScaler("cpu"), parameter(1.0)
    optimizer = SGD([w], lr=1.0)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    w.sum().backward()
    with pytest.raises(CallOrderError, match=r"instead of loss\.backward"):
        scaler.apply(optimizer)
    assert w.item() == 0.0


def test_an_optimizer_without_gradients_beside_one_with_some() -> None:
    scaler, w = GradScaler("cpu"), parameter(1.0)
    optimizers = [SGD([w], lr=1.0), SGD([parameter(1.0)], lr=1.0)]
    scaler.backward(w.sum())
    assert scaler.apply(optimizers)
    assert w.item() == 0.0
    scaler = GradScaler("cpu")
    scaler.scale(w.sum())
    with pytest.warns(UserWarning, match="0 of the 2 parameters"):
        assert scaler.apply(optimizers).verdict() == "no gradients"


@pytest.mark.gpu
def test_a_thousand_steps_never_wait_and_every_outcome_is_right(no_sync: Any) -> None:
    scaler = GradScaler("cuda", init_scale=2.0**10, growth_interval=7, on_stuck="ignore")
    w = parameter(*[1.0] * 64, device="cuda")
    optimizer = AdamW([w], lr=2.0**-10, fused=True)
    events: list[str] = []
    for name in ("skip", "grow", "backoff", "recover"):
        scaler.on(name, lambda event: events.append(event.name))
    inputs = torch.ones(64, device="cuda")
    infinity = torch.tensor(math.inf, device="cuda")

    def loss(step: int) -> Tensor:
        total = (w * inputs).sum()
        if step in bad:
            total.register_hook(lambda grad: grad * infinity)
        return total

    bad = {step for step in range(1000) if step % 13 == 5 or 200 < step < 230}
    scaler.backward((w * inputs).sum())  # allocates
    scaler.apply(optimizer)
    outcomes = []
    with no_sync():
        for step in range(1000):
            scaler.backward(loss(step))
            outcomes.append(scaler.apply(optimizer, clip_norm=1.0))
    assert {step for step, outcome in enumerate(outcomes) if not outcome} == bad
    scaler.flush()
    assert events.count("skip") == len(bad)
    policy = Dynamic(init_scale=2.0**10, growth_interval=7)
    state = policy.update(policy.init(), GradStats(finite=True))
    for step, outcome in enumerate(outcomes):
        assert float(outcome.scale) == state.scale
        norm = float(outcome.grad_norm)
        assert math.isnan(norm) if step in bad else norm == pytest.approx(8.0, rel=2.0**-22)
        state = policy.update(state, GradStats(finite=step not in bad))
    assert scaler.get_scale() == state.scale
