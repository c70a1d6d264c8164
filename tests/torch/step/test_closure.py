from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from gradscale import CallOrderError
from gradscale.torch import GradScaler
from tensors import same

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": lambda p: LBFGS(p, max_iter=5),
    "LBFGS with a line search": lambda p: LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "fused AdamW": lambda p: AdamW(p, fused=True),
}
CALLS = {
    "by position": lambda scaler, optimizer, closure: scaler.step(optimizer, closure),
    "by keyword": lambda scaler, optimizer, closure: scaler.step(optimizer, closure=closure),
}


class Job:
    """A small regression whose closure scales by `scaler`, or not at all."""

    def __init__(self, make: Callable[[Any], Optimizer], scaler: GradScaler | None) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.inputs, self.targets = torch.randn(16, 4), torch.randn(16, 1)
        self.optimizer = make(self.model.parameters())
        self.scaler = scaler
        self.losses: list[float] = []
        self.spoil: Callable[[int, Tensor], Tensor] = lambda evaluation, loss: loss
        self.spoil_gradients: Callable[[int], bool] = lambda evaluation: False

    def closure(self) -> Tensor:
        evaluation = len(self.losses)
        self.optimizer.zero_grad()
        loss = (self.model(self.inputs) - self.targets).square().mean()
        loss = self.spoil(evaluation, loss)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.backward(loss)
        if self.spoil_gradients(evaluation):
            self.model[0].weight.grad[0, 0] = math.inf
        self.losses.append(loss.item())
        return loss

    def facts(self) -> tuple[Any, Any]:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


def test_comparison_sees_one_changed_number() -> None:
    facts = {"a": [torch.ones(2), 3]}
    assert same(facts, copy.deepcopy(facts))
    assert not same(facts, {"a": [torch.tensor([1.0, 2.0]), 3]})
    assert not same(facts, {"a": [torch.ones(2), 4]})
    assert not same(facts, {"b": [torch.ones(2), 3]})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closures_see_unscaled_losses_and_gradients_in_every_evaluation(
    call: str, name: str
) -> None:
    scaler = GradScaler("cpu", growth_interval=2)
    ours, plain = Job(OPTIMIZERS[name], scaler), Job(OPTIMIZERS[name], None)
    for _ in range(4):
        result = CALLS[call](scaler, ours.optimizer, ours.closure)
        scaler.update()
        assert torch.equal(result, plain.optimizer.step(plain.closure))
    assert ours.losses == plain.losses
    assert same(ours.facts(), plain.facts())
    assert scaler.get_scale() == 2.0**18


@pytest.mark.parametrize("set_to_none", [True, False])
def test_closures_may_clear_gradients_in_place(set_to_none: bool) -> None:
    scaler = GradScaler("cpu")
    job = Job(OPTIMIZERS["LBFGS"], scaler)
    job.optimizer.zero_grad = lambda: Optimizer.zero_grad(job.optimizer, set_to_none)
    for _ in range(2):
        scaler.step(job.optimizer, job.closure)
        scaler.update()
    assert job.losses[-1] < job.losses[0]


@pytest.mark.parametrize("evaluation", [0, 1, 3])
@pytest.mark.parametrize("name", ["LBFGS", "LBFGS with a line search"])
def test_an_overflow_in_any_evaluation_undoes_the_whole_step(name: str, evaluation: int) -> None:
    scaler = GradScaler("cpu")
    job = Job(OPTIMIZERS[name], scaler)
    scaler.step(job.optimizer, job.closure)
    scaler.update()
    before, start = job.facts(), len(job.losses)
    job.spoil_gradients = lambda index: index == start + evaluation
    assert scaler.step(job.optimizer, job.closure) is None
    scaler.update()
    assert same(job.facts(), before)
    assert len(job.losses) == start + evaluation + 1
    assert scaler.get_scale() == 2.0**15
    job.spoil_gradients = lambda index: False
    scaler.step(job.optimizer, job.closure)
    scaler.update()
    assert not same(job.facts(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_first_loss_skips_the_step_and_spares_the_scale(bad: float) -> None:
    scaler = GradScaler("cpu")
    job = Job(OPTIMIZERS["LBFGS"], scaler)
    before = job.facts()
    job.spoil = lambda evaluation, loss: loss + bad
    assert scaler.step(job.optimizer, job.closure) is None
    scaler.update()
    assert same(job.facts(), before)
    assert scaler.get_scale() == 2.0**16


def test_a_trial_step_with_a_nan_loss_is_rejected_by_the_line_search() -> None:
    scaler = GradScaler("cpu")
    job = Job(OPTIMIZERS["LBFGS with a line search"], scaler)
    before = job.facts()
    job.spoil = lambda evaluation, loss: loss * math.nan if evaluation == 1 else loss
    scaler.step(job.optimizer, job.closure)
    scaler.update()
    after = job.facts()
    assert not same(after, before)
    assert all(torch.isfinite(value).all() for value in after[0].values())
    assert job.losses[-1] < job.losses[0]
    assert scaler.get_scale() == 2.0**16


def test_parameters_that_a_step_makes_infinite_are_put_back() -> None:
    scaler = GradScaler("cpu")
    job = Job(lambda p: SGD(p, lr=1e38), scaler)
    job.spoil = lambda evaluation, loss: loss * 1e4
    before = job.facts()
    assert scaler.step(job.optimizer, job.closure) is None
    scaler.update()
    assert same(job.facts(), before)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("mistake", ["unscaled", "returns scaled", "raises", "never called"])
def test_a_wrong_closure_is_an_error_that_changes_nothing(mistake: str) -> None:
    scaler = GradScaler("cpu")
    job = Job(OPTIMIZERS["SGD"], scaler)
    scaler.step(job.optimizer, job.closure)
    scaler.update()
    before = job.facts()

    def closure() -> Tensor:
        job.optimizer.zero_grad()
        loss = job.model(job.inputs).square().mean()
        if mistake == "unscaled":
            loss.backward()
        scaled = scaler.scale(loss) if mistake != "unscaled" else loss
        if mistake == "raises":
            raise KeyError("in the data")
        return scaled

    def deaf(given: Any = None) -> None:
        with torch.no_grad():
            job.model[0].weight.add_(1.0)

    if mistake == "never called":
        job.optimizer.step = deaf
    errors = {
        "unscaled": (CallOrderError, r"scaler\.backward\(loss\)"),
        "returns scaled": (CallOrderError, "returned the scaled loss"),
        "raises": (KeyError, "in the data"),
        "never called": (CallOrderError, "never called the closure"),
    }
    error, message = errors[mistake]
    with pytest.raises(error, match=message):
        scaler.step(job.optimizer, closure)
    assert same(job.facts(), before)


class PerturbThenStep(SGD):
    """Sharpness-aware in style: uses gradients from before the step, then those of its closure."""

    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        moves = [p.grad * 0.1 for p in params]
        with torch.no_grad():
            for p, move in zip(params, moves, strict=True):
                p.add_(move)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, move in zip(params, moves, strict=True):
                p.sub_(move)
        super().step()


@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_from_before_the_step_are_unscaled_for_it(explicit: bool) -> None:
    scaler = GradScaler("cpu")
    ours = Job(lambda p: PerturbThenStep(p, lr=0.1, momentum=0.9), scaler)
    plain = Job(lambda p: PerturbThenStep(p, lr=0.1, momentum=0.9), None)
    for _ in range(3):
        ours.closure()
        if explicit:
            scaler.unscale_(ours.optimizer)
        scaler.step(ours.optimizer, ours.closure)
        scaler.update()
        plain.closure()
        plain.optimizer.step(plain.closure)
    assert same(ours.facts(), plain.facts())


@pytest.mark.parametrize("evaluation", [0, 1])
def test_a_bad_gradient_before_or_in_the_closure_undoes_a_two_pass_step(evaluation: int) -> None:
    scaler = GradScaler("cpu")
    job = Job(lambda p: PerturbThenStep(p, lr=0.1, momentum=0.9), scaler)
    before = job.facts()
    job.spoil_gradients = lambda index: index == evaluation
    job.closure()
    scaler.step(job.optimizer, job.closure)
    scaler.update()
    assert same(job.facts(), before)
    assert len(job.losses) == evaluation + 1
    assert scaler.get_scale() == 2.0**15


def test_none_is_no_closure() -> None:
    for call in (lambda s, o: s.step(o, None), lambda s, o: s.step(o, closure=None)):
        scaler, w = GradScaler("cpu"), torch.ones(1, requires_grad=True)
        scaler.backward(w.sum())
        call(scaler, SGD([w], lr=1.0))
        assert w.tolist() == [0.0]


def test_a_second_step_with_a_closure_names_update() -> None:
    scaler = GradScaler("cpu")
    job = Job(OPTIMIZERS["SGD"], scaler)
    scaler.step(job.optimizer, job.closure)
    with pytest.raises(CallOrderError, match="update"):
        scaler.step(job.optimizer, job.closure)


@pytest.mark.parametrize("bad", [set(), {1}, {0, 1, 2}])
@pytest.mark.parametrize("in_place", [False, True])
def test_droppable_passes_of_an_evaluation_weigh_as_much_as_all(
    bad: set[int], in_place: bool
) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), torch.zeros(1, requires_grad=True)
    optimizer = Twice([w], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=not in_place)
        for i in range(3):
            slope = 3e38 if i in bad else 2.0
            scaler.backward(((w - w.detach()) * slope).sum(), droppable=True)
        return w.detach().sum()

    outcome = scaler.apply(optimizer, closure=closure)
    assert bool(outcome.applied) is (len(bad) < 3)
    assert int(outcome.dropped) == len(bad)
    assert w.item() == (-12.0 if outcome.applied else 0.0)  # twice three times two
    assert scaler.get_scale() == (2.0 if bad else 4.0)


@pytest.mark.parametrize("loss_id", [0, "own"])
def test_a_step_that_has_rejected_its_last_evaluation_is_applied(loss_id: int | str) -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), torch.zeros(1, requires_grad=True)
    optimizer, losses = Trial([w], lr=1.0), [1.0, math.nan]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.sum() * losses.pop(0)
        scaler.backward(loss, loss_id=loss_id)
        return loss

    outcome = scaler.apply(optimizer, closure=closure)
    assert outcome.applied
    assert w.item() == -1.0
    assert scaler.get_scale(loss_id) == 4.0


def test_a_step_by_an_evaluation_that_a_loss_of_its_own_has_spoilt_is_undone() -> None:
    scaler, w = GradScaler("cpu", init_scale=4.0), torch.zeros(1, requires_grad=True)
    optimizer, factors = Twice([w], lr=1.0), [1.0, math.nan]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.sum() * factors.pop(0)
        scaler.backward(w.sum())
        scaler.backward(loss, loss_id="own")
        return loss

    assert not scaler.apply(optimizer, closure=closure)
    assert w.item() == 0.0


def test_a_parameter_that_the_last_evaluation_does_not_reach_is_looked_at_too() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = Twice([a, b], lr=1.0)
    optimizer.evaluations = 3
    losses = iter([lambda: (a + b).sum(), lambda: a.sum() * math.nan, lambda: b.sum()])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = next(losses)()
        scaler.backward(loss)
        return loss

    assert not scaler.apply(optimizer, closure=closure)
    assert (a.item(), b.item()) == (0.0, 0.0)


class Twice(SGD):
    """Steps after every one of its evaluations, whatever the loss was."""

    evaluations = 2

    def step(self, closure: Any = None) -> Any:
        """The loss of the last evaluation."""
        for _ in range(self.evaluations):
            with torch.enable_grad():
                loss = closure()
            super().step()
        return loss


class Trial(SGD):
    """Tries to step twice, and takes the second step back if the loss was infinite."""

    def step(self, closure: Any = None) -> Any:
        """The loss of the first evaluation."""
        with torch.enable_grad():
            loss = closure()
        super().step()
        (w,) = self.param_groups[0]["params"]
        here = w.detach().clone()
        with torch.enable_grad():
            tried = closure()
        if tried != math.inf:
            super().step()
        else:
            w.detach().copy_(here)
        return loss
