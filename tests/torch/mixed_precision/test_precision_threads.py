"""One `MixedPrecision` of two threads: turns by whole iterations, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradscale as gs
from gradscale.torch import MixedPrecision

MODES = ["fp16", "fp16-master", "fp16-pure"]
X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Run:
    """A model of two layers, each with an optimizer of its own."""

    def __init__(self, mode: str) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizers = [SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in self.model]
        policy = gs.Dynamic(init_scale=64.0, growth_interval=2)
        self.mp = MixedPrecision(self.model, optimizers, mode, policy=policy)

    def loss(self) -> Tensor:
        with self.mp.autocast():
            return self.model(X).float().square().mean()

    def closure(self) -> Tensor:
        loss = self.loss()
        self.mp.backward(loss)
        return loss

    def accumulate(self) -> None:
        with self.mp.accumulate(2):
            self.mp.backward(self.loss())
            self.mp.backward(self.loss())

    def picture(self) -> list[Any]:
        return [
            self.mp.scaler.get_scale(),
            *(value.tolist() for value in self.mp.float32_model_state().values()),
        ]


CALLS: dict[str, Callable[[Run], object]] = {
    "backward": lambda run: run.mp.backward(run.loss()),
    "step": lambda run: run.mp.step(),
    "closure": lambda run: run.mp.step(run.mp.optimizers[0], closure=run.closure),
    "run": lambda run: run.mp.run(run.loss),
    "accumulate": Run.accumulate,
    "zero_grad": lambda run: run.mp.zero_grad(),
    "grad": lambda run: run.mp.grad(run.loss(), list(run.model.parameters())),
    "calibrate": lambda run: run.mp.calibrate(run.loss),
    "load": lambda run: run.mp.load_state_dict(run.mp.state_dict()),
}


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """What `call` raised in another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def _after_backward(run: Run, meanwhile: Callable[[], None]) -> None:
    run.mp.backward(run.loss())
    meanwhile()
    run.mp.step(clip_norm=0.5)


def _after_unscaling(run: Run, meanwhile: Callable[[], None]) -> None:
    run.mp.backward(run.loss())
    run.mp.scaler.unscale_(run.mp.optimizers[0])
    meanwhile()
    run.mp.step()


def _between_micro_batches(run: Run, meanwhile: Callable[[], None]) -> None:
    with run.mp.accumulate(2, drop="micro"):
        run.mp.backward(run.loss())
        meanwhile()
        run.mp.backward(run.loss())
    run.mp.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", [_after_backward, _after_unscaling, _between_micro_batches])
def test_a_second_thread_in_an_unfinished_iteration_changes_nothing(mode: str, when: Any) -> None:
    expected = Run(mode)
    for _ in range(3):
        when(expected, lambda: None)
    for name, call in CALLS.items():
        run, errors = Run(mode), []
        when(run, lambda: None)
        when(run, lambda: errors.append(elsewhere(lambda: call(run))))  # noqa: B023
        when(run, lambda: None)
        assert isinstance(errors[0], gs.CallOrderError), name
        assert run.picture() == expected.picture(), name


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_of_a_second_thread_is_no_part_of_an_accumulation_that_has_had_none(
    mode: str,
) -> None:
    run = Run(mode)
    with run.mp.accumulate(1):
        error = elsewhere(lambda: run.mp.backward(run.loss()))
        run.mp.backward(run.loss())
    assert "second thread" in str(error)
    assert run.mp.step()


@pytest.mark.parametrize("mode", MODES)
def test_threads_take_turns_by_whole_iterations(mode: str) -> None:
    expected, run = Run(mode), Run(mode)
    for _ in range(4):
        _after_backward(expected, lambda: None)
    for number in range(4):
        if number % 2:
            assert elsewhere(lambda: _after_backward(run, lambda: None)) is None
        else:
            _after_backward(run, lambda: None)
    assert run.picture() == expected.picture()
