"""What must not differ where kernels decide: failures, odd arguments, what is kept alive."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import SGD

from cpu_graph import CpuGraph, keep_in_tensors
from gradscale import Dynamic, Static, StuckError
from gradscale.torch import GradScaler
from gradscale.torch.grads import dispatch as kernels

PATHS = ["reference", "triton"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def ones(count: int = 2, **settings: Any) -> Any:
    return torch.ones(count, device=HERE, requires_grad=True, **settings)


def failing_once(optimizer: Any) -> None:
    """Makes the next step of `optimizer` raise."""
    left = [1]

    def fail(*_: object) -> None:
        if left:
            left.pop()
            raise MemoryError

    optimizer.register_step_pre_hook(fail)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("clear", [True, False])
def test_gradients_of_a_step_that_raised_are_still_scaled(path: str, clear: bool) -> None:
    w = ones()
    optimizer, scaler = SGD([w], lr=0.5, fused=True), GradScaler(HERE, init_scale=1024.0)
    failing_once(optimizer)
    with kernels.use(path):
        scaler.backward(w.sum())
        with pytest.raises(MemoryError):
            scaler.apply(optimizer)
        if clear:
            optimizer.zero_grad(set_to_none=False)
        scaler.backward(w.sum())
        scaler.apply(optimizer)
    assert w.tolist() == ([0.5, 0.5] if clear else [0.0, 0.0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_that_raised_is_not_counted(path: str, bad: bool) -> None:
    w = ones()
    optimizer, scaler = SGD([w], lr=0.5, fused=True), GradScaler(HERE, init_scale=4.0)
    failing_once(optimizer)
    with kernels.use(path):
        scaler.backward(w.sum())
        if bad:
            w.grad[0] = math.inf
        # A skip that the host knows of does not call the optimizer.
        if not (bad and path == "reference" and HERE == "cpu"):
            with pytest.raises(MemoryError):
                scaler.apply(optimizer)
        outcome = scaler.apply(optimizer)
    assert scaler.state_dict()["gradscale"]["counters"]["steps"] == 1
    assert int(outcome.skipped_in_a_row) == int(bad)


def test_an_interruption_between_launches_spoils_no_later_step() -> None:
    measure = kernels.module("measure")
    a, b = ones(), ones(dtype=torch.bfloat16)
    optimizer, scaler = SGD([a, b], lr=0.5, fused=True), GradScaler(HERE, init_scale=4.0)
    real, calls = measure._measure, []

    def interrupted(*args: Any, **settings: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args, **settings)

    with kernels.use("triton"):
        for _ in range(2):
            scaler.backward(a.sum() + b.sum().float())
            with mock.patch.object(measure, "_measure", interrupted):
                if calls:
                    scaler.apply(optimizer)
                else:
                    with pytest.raises(KeyboardInterrupt):
                        scaler.apply(optimizer)
            optimizer.zero_grad()
        scaler.backward(a.sum() + b.sum().float())
        b.grad[0] = math.inf
        assert scaler.apply(optimizer).verdict() == "scale too high"


@pytest.mark.parametrize("path", PATHS)
def test_limits_and_settings_may_be_whole_numbers(path: str) -> None:
    from gradscale.torch import optim

    w = ones(4)
    kinds: list[Any] = [
        SGD([w], lr=1, fused=True),
        optim.SGD([w], lr=1, momentum=1, weight_decay=0),
        optim.AdamW([w], lr=1, weight_decay=1, eps=1),
        optim.Lion([w], lr=1, betas=(0, 0)),
    ]
    with kernels.use(path):
        for optimizer in kinds:
            scaler = GradScaler(HERE, init_scale=4)
            scaler.backward(w.sum())
            scaler.apply(optimizer, clip_norm=1)
            scaler.backward(w.sum())
            scaler.clip_grad_norm_(optimizer, 1)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("path", PATHS)
def test_small_float16_gradients_reach_torchs_fused_optimizers(path: str) -> None:
    w = torch.zeros(2, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = SGD([w], lr=2.0**26, fused=True)
    scaler = GradScaler(HERE, init_scale=2.0**16)
    with kernels.use(path):
        scaler.backward((w.float() * 2.0**-26).sum())
        scaler.apply(optimizer)
    assert w.tolist() == [-1.0, -1.0]  # in float16, the unscaled gradient is 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [2.0**-60, 2.0**-10, 8.0, 2.0**60])
@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**64])
def test_a_norm_is_right_at_any_scale(path: str, size: float, scale: float) -> None:
    w = torch.zeros(4, device=HERE, requires_grad=True)
    optimizer, scaler = SGD([w], lr=1.0, fused=True), GradScaler(HERE, init_scale=scale)
    with kernels.use(path):
        scaler.backward(w.sum() * size)
        outcome = scaler.apply(optimizer)
    assert float(outcome.grad_norm) == pytest.approx(2 * size)


def test_a_quiet_scaler_keeps_its_records() -> None:
    a, b = ones(), ones()
    quiet, busy = (GradScaler(HERE, init_scale=4.0, growth_interval=n) for n in (1, 10**6))
    optimizers = [SGD([w], lr=0.5, fused=True) for w in (a, b)]
    late = mock.patch("gradscale.torch.telemetry.transport.Sent.arrived", return_value=False)
    with kernels.use("triton"), late:
        quiet.backward(a.sum())
        quiet.apply(optimizers[0])
        for _ in range(3):
            busy.backward(b.sum())
            busy.apply(optimizers[1])
    quiet.flush()
    assert quiet.history == [(1, 8.0, "grow")]


def test_a_failure_to_clear_gradients_ends_the_iteration_all_the_same() -> None:
    w = ones()
    optimizer, scaler = SGD([w], lr=0.5, fused=True), GradScaler(HERE, init_scale=4.0)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with kernels.use("triton"):
        with mock.patch.object(optimizer, "zero_grad", interrupted):
            scaler.backward(w.sum())
            with pytest.raises(KeyboardInterrupt):
                scaler.apply(optimizer)
        optimizer.zero_grad()
        scaler.backward(w.sum())
        assert scaler.apply(optimizer)
    assert scaler._get_growth_tracker() == 2


@pytest.mark.parametrize("path", PATHS)
def test_an_outcome_keeps_neither_scaler_nor_model_alive(path: str) -> None:
    model = torch.nn.Linear(3, 3, device=HERE)
    optimizer, scaler = SGD(model.parameters(), lr=0.1, fused=True), GradScaler(HERE)
    scaler.follow(torch.optim.lr_scheduler.ConstantLR(optimizer))
    with kernels.use(path):
        scaler.backward(model(torch.ones(1, 3, device=HERE)).sum())
        outcome = scaler.apply(optimizer)
    weight = weakref.ref(model.weight)
    del model, optimizer, scaler
    gc.collect()
    assert weight() is None
    assert outcome.culprits() == []


@pytest.mark.parametrize("path", PATHS)
def test_culprits_have_names_where_others_have_no_gradient(path: str) -> None:
    model = torch.nn.Linear(3, 3, device=HERE)
    model.bias.requires_grad_(False)
    optimizer, scaler = SGD(model.parameters(), lr=0.1, fused=True), GradScaler(HERE)
    scaler.name(model)
    with kernels.use(path):
        scaler.backward(model(torch.ones(1, 3, device=HERE)).sum())
        model.weight.grad[0, 0] = math.inf
        assert [bad.name for bad in scaler.apply(optimizer).culprits()] == ["weight"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("two_calls", [False, True])
def test_a_rule_of_ones_own_is_followed(path: str, two_calls: bool) -> None:
    class Mine(Dynamic):
        def update(self, state: Any, stats: Any, xp: Any = None) -> Any:
            return state

    w = ones()
    optimizer = SGD([w], lr=0.1, fused=True)
    scaler = GradScaler(HERE, policy=Mine(init_scale=4.0, growth_interval=1))
    with kernels.use(path):
        scaler.backward(w.sum())
        if two_calls:
            scaler.apply(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 4.0


@pytest.mark.skipif(HERE == "cuda", reason="a graph of the CPU")
def test_a_captured_backward_pass_and_an_eager_step_have_the_scale_of_the_replay() -> None:
    w = ones()
    optimizer, scaler = SGD([w], lr=0.0), GradScaler(HERE, init_scale=4.0, growth_interval=1)
    keep_in_tensors(scaler)
    scaler.backward(w.sum())
    scaler.apply(optimizer)
    w.grad = torch.zeros(2)
    graph = CpuGraph()
    with graph:
        w.grad.zero_()
        scaler.scale(w.sum()).backward()
    for _ in range(4):
        graph.replay()
        scaler.unscale_(optimizer)
        assert w.grad.tolist() == [1.0, 1.0]
        scaler.step(optimizer)
        scaler.update()


def test_skips_are_counted_where_no_scale_moves() -> None:
    """A record whose scale has not moved is read all the same if its step was skipped."""
    weight = ones()
    optimizer = SGD([weight], lr=1.0, fused=True)
    with kernels.use("triton"):
        scaler = GradScaler(HERE, policy=Static(init_scale=4.0), on_stuck="raise", stuck_after=3)
        for factor in (1.0, math.inf, math.inf, math.inf):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        with pytest.raises(StuckError, match="3 steps in a row"):
            scaler.flush()


@pytest.mark.skipif(HERE == "cuda", reason="a graph of the CPU")
def test_a_capture_in_the_middle_of_an_iteration_copies_the_scale_in_every_replay() -> None:
    scaler, w = GradScaler("cpu", init_scale=8.0, growth_interval=1), torch.ones(2)
    keep_in_tensors(scaler)
    optimizer = SGD([w.requires_grad_()], lr=0.0)
    w.grad = torch.zeros(2)
    scaler.scale(w.sum())  # begins an iteration with a scale of 8
    graph = CpuGraph()
    with graph:
        w.grad.zero_()
        scaler.scale(w.sum()).backward()
    for scale in (8.0, 16.0, 32.0):
        graph.replay()
        assert w.grad.tolist() == [scale, scale]
        scaler.step(optimizer)
        scaler.update()
