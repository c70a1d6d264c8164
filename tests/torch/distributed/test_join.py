"""Ranks that run out of data step with the others, inside torch's `Join`; with real processes."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from gradscale.errors import SettingError
from gradscale.torch import GradScaler, JoinableStep, MixedPrecision, average_in_float16
from ranks import everyone, fork_ranks, on_ranks, run_check
from shared_models import HOW, OPTIMIZERS, WIDTH, loss_of

ROWS = 4
COUNTS = (2, 5, 7)
"""Batches of the ranks. The first has run out when the second overflows, and both when the third
does."""
BAD = {3: 1, 5: 2}
"""Which rank overflows in which step."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def weights(model: nn.Module) -> list[float]:
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


class Run:
    """A model on this rank, its optimizer and its scaler."""

    def __init__(self, kind: str = "fused", way: str = "apply") -> None:
        self.model = net()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.scaler.name(self.wrapped)
        self.way = way

    def step(self) -> None:
        if self.way == "apply":
            self.scaler.apply(self.optimizer, clip_norm=100.0)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.way != "cleared before":
                self.optimizer.zero_grad(set_to_none=self.way != "zeros")

    def join(self, optimizers: Any = None) -> Join:
        known = self.optimizer if optimizers is None else optimizers
        return Join([self.wrapped, JoinableStep(self.step, known, self.wrapped)])

    def train(self, count: int, first: int = 0) -> None:
        """Takes steps on so many batches."""
        rank = dist.get_rank()
        for step in range(first, first + count):
            if self.way == "cleared before":
                self.optimizer.zero_grad()
            self.scaler.backward(loss_of(self.wrapped, batch(step, rank)))
            if BAD.get(step) == rank:
                # After it was reduced, so that no other rank has it.
                self.model[0].weight.grad[0, 0] = math.inf  # type: ignore[index,union-attr]
            self.step()

    def told(self) -> tuple[Any, ...]:
        state = self.scaler.state_dict()
        return self.scaler.get_scale(), state["_growth_tracker"], weights(self.model)


def alone(kind: str) -> tuple[nn.Module, float]:
    """What one process makes of the same batches: the model, and its largest gradient."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    largest = 0.0
    for step in range(max(COUNTS)):
        for rank, count in enumerate(COUNTS):
            if step < count:
                (loss_of(model, batch(step, rank)) / len(COUNTS)).backward()
        if step not in BAD:
            grads = [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
            largest = max(largest, float(max(grads)))
            optimizer.step()
        optimizer.zero_grad()
    return model, largest


def check_uneven() -> None:
    """Raises if ranks differ from one another, or from a process that is alone."""
    rank = dist.get_rank()
    for kind in OPTIMIZERS:
        for way in ("apply", "step", "zeros", "cleared before"):
            case = f"{kind}, {way}"
            run = Run(kind, way)
            with run.join():
                run.train(COUNTS[rank])
                last = weights(run.model)
            told = everyone(run.told())
            assert all(each == told[0] for each in told), case
            # Three good steps, one bad, one good, one bad, one good.
            assert told[0][:2] == (2.0**7, 1), case
            assert told[0][2] == everyone(last)[-1], case  # as DDP leaves them
            model, largest = alone(kind)
            # Means over 32 elements, of 3 ranks, through two layers and in another order: at most
            # 64 roundings of gradients; each step divides by eps at most.
            error = 64 * torch.finfo(torch.float32).eps * largest
            bound = max(COUNTS) * HOW["lr"] * 2 * error / HOW["eps"]
            off = torch.tensor(told[0][2]) - torch.tensor(weights(model))
            assert off.abs().max() <= bound, f"{case}: {off.abs().max()} > {bound}"


def check_next_epoch() -> None:
    """Raises if ranks go different ways after it, or if they do not where nobody prevents it."""
    rank = dist.get_rank()
    for kind in OPTIMIZERS:
        other = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
        for optimizers, alike in ((None, True), (other, False)):
            run = Run(kind)
            with run.join(optimizers):
                run.train(COUNTS[rank])
            run.train(2, first=10)
            told = everyone(run.told())
            assert (told[0] == told[1] == told[2]) == alike, kind


def check_accumulation() -> None:
    """Raises if a rank that has run out steps where the others only accumulate."""
    rank = dist.get_rank()
    run = Run()
    steps = []
    counted = run.step
    run.step = lambda: (steps.append(1), counted())[-1]  # type: ignore[method-assign]
    with run.join():
        # The first ends after a whole step, the third in the middle of one, with an infinity in
        # what it has, which nobody will reduce.
        for micro in range((2, 8, 5)[rank]):
            reduces = micro % 2 == 1
            with nullcontext() if reduces else run.wrapped.no_sync():
                run.scaler.backward(loss_of(run.wrapped, batch(micro, rank)) / 2)
            if rank == 2 and micro == 4:
                run.model[0].weight.grad.fill_(math.inf)  # type: ignore[union-attr,operator]
            if reduces:
                run.step()
    told = everyone((*run.told(), len(steps)))
    assert told[0] == told[1] == told[2]
    assert told[0][0] == 2.0**9  # four good steps
    assert told[0][3] == 4


def check_no_data() -> None:
    """Raises if a rank that never had a batch does not go along."""
    rank = dist.get_rank()
    for way in ("apply", "step"):
        run = Run(way=way)
        with run.join():
            run.train((0, 4, 3)[rank])
        told = everyone(run.told())
        assert told[0] == told[1] == told[2], way
        assert told[0][:2] == (2.0**8, 0), way  # three good steps, one bad


def check_hook() -> None:
    """Raises if averages in float16 do not go with it."""
    rank = dist.get_rank()
    run = Run()
    run.wrapped.register_comm_hook(None, average_in_float16)
    with run.join():
        run.train(COUNTS[rank])
    told = everyone(run.told())
    assert told[0] == told[1] == told[2]
    assert told[0][:2] == (2.0**7, 1)


def check_precision() -> None:
    """Raises if weights in half precision and their masters differ, also in the next epoch."""
    rank = dist.get_rank()
    for mode in ("fp16", "fp16-master"):
        model = net()
        optimizer = optim.AdamW(model.parameters(), fused=True, **HOW)
        mp = MixedPrecision(model, optimizer, mode)
        wrapped = DistributedDataParallel(model)
        mp.name(wrapped)

        def train(first: int, count: int, mp: Any = mp, wrapped: Any = wrapped) -> None:
            for step in range(first, first + count):
                with mp.autocast():
                    loss = loss_of(wrapped, batch(step, rank))
                mp.backward(loss)
                mp.step()

        with Join([wrapped, JoinableStep(mp.step, optimizer, wrapped)]):
            train(0, COUNTS[rank])
        train(10, 2)
        told = everyone((mp.scaler.get_scale(), weights(model)))
        assert told[0] == told[1] == told[2], mode


def check_alone() -> None:
    """Trains in DDP's own `join()`, where nobody shadows the scaler. Must not come back."""
    run = Run()
    with warnings.catch_warnings(), run.wrapped.join():
        run.train(COUNTS[dist.get_rank()])


@pytest.mark.parametrize(
    ("check", "world"), on_ranks(3, "uneven next_epoch no_data accumulation hook precision")
)
def test_ranks_step_together(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)


def test_without_it_the_others_wait(tmp_path: Path) -> None:
    ended = fork_ranks(__file__, "alone", 3, tmp_path, patience=3, limit=60)
    assert 0 not in ended.codes
    assert "Timed out" in ended.errors


def test_it_stands_behind_the_model(one_rank: Any) -> None:
    run = Run()
    joinable = JoinableStep(run.step, run.optimizer, run.wrapped)
    for order in ([joinable], [joinable, run.wrapped]):
        with pytest.raises(SettingError, match=r"must come after the DDP model, but is the first"):
            Join(order)
    with Join([joinable, run.wrapped], enable=False):
        pass
    with Join([run.wrapped, joinable]):
        run.train(2)
    assert run.scaler.get_scale() == 2.0**8


def test_its_arguments_are_checked(one_rank: Any) -> None:
    run = Run()
    with pytest.raises(SettingError, match=r"step must be a function, got AdamW"):
        JoinableStep(run.optimizer, run.step, run.wrapped)  # type: ignore[arg-type]
    for given, what in ((run.step, "method"), ([run.optimizer, "adam"], "str")):
        with pytest.raises(
            SettingError, match=f"optimizer must be an optimizer or several of them, got {what}"
        ):
            JoinableStep(run.step, given, run.wrapped)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"model must be the DDP model, got Sequential. Wrap it"):
        JoinableStep(run.step, run.optimizer, run.model)  # type: ignore[arg-type]
