"""The loops that must come out right: each gives the numbers of the same loop without a scaler.

Every loop is written once and run twice, with a scaler in float32 and with none in float64.
Gradients are small whole numbers and scales powers of two, so that the two are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from cpu_graph import CpuGraph, keep_in_tensors
from gradscale import CallOrderError
from gradscale.torch import GradScaler


class Plain:
    """What is called in the place of a scaler, in the loop without one."""

    def __init__(self) -> None:
        self.scale = lambda loss: loss
        self.unscale_ = self.update = self.watch = lambda *_: None

    def step(self, optimizer: Any) -> None:
        optimizer.step()


Loop = Callable[[Any, list[Tensor], list[Any]], object]


def slopes(params: list[Tensor], *factors: float) -> Tensor:
    """A loss whose gradients are `factors`, and depend on the parameters a little."""
    pairs = zip(params, factors, strict=False)
    return sum(
        ((f * p + p * p / 2).sum() for p, f in pairs if f), torch.zeros((), dtype=params[0].dtype)
    )


def run(loop: Loop, scaler: Any, dtype: torch.dtype, fused: bool = False) -> list[list[float]]:
    """The parameters after `loop` with two optimizers of one parameter each."""
    params = [torch.full((2,), float(k), dtype=dtype, requires_grad=True) for k in (1, 2)]
    optimizers = [SGD([param], lr=0.25, fused=fused) for param in params]
    loop(scaler, params, optimizers)
    return [param.tolist() for param in params]


@pytest.fixture(params=["numbers", "tensors", "fused"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the state of the scaler is, and whether optimizers skip by themselves."""
    return request.param


def check(loop: Loop, kind: str, watch: bool = False) -> None:
    """Compares `loop` with and without a scaler whose scale moves in every iteration."""
    scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=1)
    if kind == "tensors":
        keep_in_tensors(scaler)

    def watched(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for optimizer in optimizers if watch else ():
            scaler.watch(optimizer)
        loop(scaler, params, optimizers)

    ours = run(watched, scaler, torch.float32, fused=kind == "fused")
    assert ours == run(watched, Plain(), torch.float64)


def test_unscaled_gradients_that_are_given_up(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for give_up in (False, True, False, True, False):
            scaler.scale(slopes(params, 1.0)).backward()
            scaler.unscale_(optimizers[0])
            torch.nn.utils.clip_grad_value_(params[:1], 2.0)
            if not give_up:
                scaler.step(optimizers[0])
            optimizers[0].zero_grad()
            scaler.update()

    check(loop, kind)


def test_a_step_by_hand_after_unscale(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for _ in range(4):
            scaler.scale(slopes(params, 1.0)).backward()
            scaler.unscale_(optimizers[0])
            optimizers[0].step()
            optimizers[0].zero_grad()
            scaler.update()

    check(loop, kind)


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("none", [True, False])
def test_sharpness_aware_minimization(kind: str, updates: int, none: bool) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for _ in range(3):
            scaler.scale(slopes(params, 1.0)).backward()
            scaler.unscale_(optimizers[0])
            with torch.no_grad():
                up = params[0].grad * 0.5
                params[0].add_(up)
            if updates == 2:
                scaler.update()
            # Within one iteration zeros are not enough: they might be unscaled gradients.
            optimizers[0].zero_grad(set_to_none=none or updates == 1)
            scaler.scale(slopes(params, 1.0)).backward()
            with torch.no_grad():
                params[0].sub_(up)
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()

    check(loop, kind)


class OutOfMemory(RuntimeError):
    """What a backward pass raises in the middle."""


@pytest.mark.parametrize("where", [0, 1])
def test_a_batch_that_runs_out_of_memory_is_left_out(kind: str, where: int) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        def fail(_: Tensor) -> None:
            raise OutOfMemory

        for batch in range(4):
            try:
                loss = slopes(params, 1.0, 2.0)
                if batch == 1:
                    middle = params[where] * 1.0
                    middle.register_hook(fail)
                    loss = loss + middle.sum()
                scaler.scale(loss).backward()
            except OutOfMemory:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                continue
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()

    check(loop, kind)


@pytest.mark.parametrize("updates", [1, 2])
def test_generative_adversarial_training(kind: str, updates: int) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        maker, critic = optimizers
        for _ in range(4):
            critic.zero_grad()
            scaler.scale(slopes(params, 0.0, 2.0)).backward()
            scaler.step(critic)
            if updates == 2:
                scaler.update()
            maker.zero_grad()
            scaler.scale(slopes(params, 1.0, -1.0)).backward()  # also adds to the critic's
            scaler.step(maker)
            scaler.update()

    check(loop, kind)


def test_the_next_batch_before_update(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        scaler.scale(slopes(params, 1.0)).backward()
        for _ in range(4):
            scaler.step(optimizers[0])
            optimizers[0].zero_grad()
            scaler.scale(slopes(params, 2.0)).backward()
            scaler.update()
        scaler.step(optimizers[0])

    check(loop, kind)


def test_losses_of_two_iterations_that_add_up(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for _ in range(3):
            early = scaler.scale(slopes(params, 1.0))
            scaler.scale(slopes(params, 0.0, 1.0)).backward()
            scaler.step(optimizers[1])
            scaler.update()
            optimizers[1].zero_grad()
            (early + scaler.scale(slopes(params, 4.0))).backward()
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad()

    check(loop, kind, watch=True)


def test_a_loss_scaled_before_update_and_run_after_it(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        scaled = scaler.scale(slopes(params, 1.0))
        for _ in range(3):
            scaled.backward()
            scaler.step(optimizers[0])
            optimizers[0].zero_grad()
            scaled = scaler.scale(slopes(params, 2.0))
            scaler.update()

    check(loop, kind)


def test_accumulation_over_updates(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for micro in range(12):
            scaler.scale(slopes(params, 1.0, 2.0)).backward()
            scaler.step(optimizers[0])
            optimizers[0].zero_grad()
            if micro % 4 == 3:
                scaler.step(optimizers[1])
                optimizers[1].zero_grad()
            scaler.update()

    check(loop, kind, watch=True)


@pytest.mark.parametrize("none", [True, False])
def test_an_optimizer_that_steps_every_second_iteration(kind: str, none: bool) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for iteration in range(6):
            scaler.scale(slopes(params, 1.0, 2.0)).backward()
            for optimizer in optimizers[: 1 + iteration % 2]:
                scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=none)
            scaler.update()

    check(loop, kind, watch=True)


def test_an_optimizer_that_is_met_late(kind: str) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        scaler.scale(slopes(params, 1.0, 2.0)).backward()
        for optimizer in optimizers:  # the second one after the scale has moved
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    check(loop, kind)


@pytest.mark.parametrize("none", [True, False])
def test_a_graph_that_is_run_twice(kind: str, none: bool) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        for _ in range(3):
            loss = scaler.scale(slopes(params, 1.0))
            loss.backward(retain_graph=True)
            loss.backward()
            scaler.step(optimizers[0])
            scaler.update()
            optimizers[0].zero_grad(set_to_none=none)

    check(loop, kind)


@pytest.mark.parametrize("clear", [None, "zeros", "none"])
def test_adding_to_unscaled_gradients_is_an_error_until_they_are_cleared(
    kind: str, clear: str | None
) -> None:
    def loop(scaler: Any, params: list[Tensor], optimizers: list[Any]) -> None:
        scaler.scale(slopes(params, 1.0)).backward()
        scaler.unscale_(optimizers[0])
        if clear is not None:
            optimizers[0].zero_grad(set_to_none=clear == "none")
        scaler.scale(slopes(params, 1.0)).backward()
        if clear == "none" or isinstance(scaler, Plain):
            scaler.step(optimizers[0])
            return
        for call in (scaler.step, scaler.unscale_):
            with pytest.raises(CallOrderError, match="zero_grad"):
                call(optimizers[0])
        optimizers[0].zero_grad()
        scaler.scale(slopes(params, 1.0)).backward()
        if clear is None:
            scaler.scale(slopes(params, 1.0)).backward()
        scaler.step(optimizers[0])

    check(loop, kind)


def test_a_captured_backward_pass_and_eager_steps() -> None:
    scaler, w = GradScaler("cpu", init_scale=2.0**6, growth_interval=1), torch.ones(2)
    keep_in_tensors(scaler)
    w.requires_grad_()
    plain = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ours, theirs = SGD([w], lr=0.25), SGD([plain], lr=0.25)
    w.grad = torch.zeros(2)
    scaler.scale(slopes([w], 1.0)).backward()
    scaler.step(ours)
    scaler.update()
    with CpuGraph() as graph:
        w.grad.zero_()
        scaler.scale(slopes([w], 1.0)).backward()
    for replay in range(4):
        if replay:  # the capture was the first one
            graph.replay()
        scaler.step(ours)
        scaler.update()
    for _ in range(5):
        theirs.zero_grad()
        slopes([plain], 1.0).backward()
        theirs.step()
    assert w.tolist() == plain.tolist()
    assert scaler.get_scale() == 2.0**11
