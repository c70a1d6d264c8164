"""Schedule-free optimizers, which also move weights in `train()` and `eval()`, with masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscale.torch import MixedPrecision

torch.set_num_threads(1)
DTYPES = {"fp16-master": torch.float16, "fp16-pure": torch.float16, "bf16-master": torch.bfloat16}


def adamw(params: Any) -> Any:
    return pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW(params, lr=0.1)


@pytest.mark.parametrize("mode", list(DTYPES))
def test_masters_move_as_float32_weights_with_the_same_gradients(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    weights = [param.detach().clone().requires_grad_() for param in model.parameters()]
    reference, optimizer = adamw(weights), adamw(model.parameters())
    mp = MixedPrecision(model, optimizer, mode)

    def compare() -> None:
        masters = mp.float32_model_state()
        for (name, param), weight in zip(model.named_parameters(), weights, strict=True):
            assert torch.equal(masters[name], weight.detach())
            assert torch.equal(param, weight.detach().to(DTYPES[mode]))

    def evaluate() -> Tensor:
        return (model(torch.ones(2, 4)) - 1).square().mean()

    moved = []
    for each in (reference, optimizer):
        each.train()
    for _ in range(3):
        mp.backward(evaluate())
        scale = mp.scaler.get_scale()  # a power of two, so that the division is exact
        for param, weight in zip(model.parameters(), weights, strict=True):
            weight.grad = param.grad.float() / scale
        reference.step()
        assert mp.step().applied
        compare()
        before = model.weight.detach().clone()
        for each in (reference, optimizer):
            each.eval()
        compare()
        moved.append(not torch.equal(before, model.weight))
        for each in (reference, optimizer):
            each.train()
        compare()
    assert any(moved)


def test_the_loss_falls_in_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = adamw(model.parameters())
    mp = MixedPrecision(model, optimizer, "fp16-master")
    losses = []
    for _ in range(20):
        optimizer.train()
        loss = (model(torch.ones(2, 4)) - 1).square().mean()
        mp.backward(loss)
        mp.step()
        optimizer.eval()
        with torch.no_grad():
            losses.append(float((model(torch.ones(2, 4)) - 1).square().mean()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("mode", list(DTYPES))
def test_a_run_goes_on_from_its_state(mode: str) -> None:
    torch.manual_seed(0)
    runs = []
    for _ in range(2):
        model = nn.Linear(4, 3)
        optimizer = adamw(model.parameters())
        runs.append((model, MixedPrecision(model, optimizer, mode)))
        optimizer.train()

    def step(number: int) -> None:
        model, mp = runs[number]
        mp.backward((model(torch.ones(2, 4)) - 1).square().mean())
        assert mp.step().applied

    step(0)
    step(0)
    step(1)
    runs[1][1].load_state_dict(runs[0][1].state_dict())
    for _ in range(2):
        first, second = (mp.float32_model_state() for _, mp in runs)
        for name in first:
            assert torch.equal(first[name], second[name])
        step(0)
        step(1)


@pytest.mark.parametrize("mode", list(DTYPES))
def test_an_optimizers_own_load_state_dict_takes_its_argument_by_name(mode: str) -> None:
    """As `set_state_dict()` of torch.distributed.checkpoint passes it."""
    model = nn.Linear(4, 3)
    optimizer = adamw(model.parameters())
    mp = MixedPrecision(model, optimizer, mode)
    optimizer.train()
    mp.backward(model(torch.ones(2, 4)).sum())
    assert mp.step().applied
    saved, before = optimizer.state_dict(), mp.float32_model_state()
    optimizer.load_state_dict(state_dict=saved)
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
    after = mp.float32_model_state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
