"""Runs that are made ill on purpose."""

from __future__ import annotations

import math

import _patients as models
import torch
from _diagnosis import EVERY, STEPS, diagnose
from torch import Tensor, nn
from torch.nn import functional

from gradscale.monitor.findings import Finding
from gradscale.policy import Dynamic, Static
from gradscale.torch import GradScaler, Inspector

FIRST, NAN = torch.zeros(1, dtype=torch.long), math.nan


def bad_initialisation() -> list[Finding]:
    model = models.mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    return diagnose(model, models.regression(model))


def log_of_zero() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), models.Log(), nn.Linear(16, 1))
    return diagnose(model, models.regression(model))


def large_activations() -> list[Finding]:
    model = models.gpt()
    with torch.no_grad():
        model.blocks[1].widen.bias.add_(1e5)
    return diagnose(model, models.text(model))


def nan_label() -> list[Finding]:
    model = models.mlp()
    return diagnose(model, models.regression(model, target=lambda y: y.index_fill(0, FIRST, NAN)))


def forgotten_zero_grad() -> list[Finding]:
    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    model = models.mlp()
    return diagnose(model, models.regression(model), step=step)


def wrong_clip_order() -> list[Finding]:
    model = models.mlp()

    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return diagnose(model, models.regression(model), step=step)


def small_head() -> list[Finding]:
    model = models.Heads()
    return diagnose(model, models.heads(model, weight=1e-9))


def dead_expert() -> list[Finding]:
    model = models.Experts(dead=2)
    return diagnose(model, models.regression(model))


def eps_in_float16() -> list[Finding]:
    model = models.mlp().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        # Unscaled gradients of 1e-5, whose squares float16 does not have.
        return 1e-3 * functional.mse_loss(model(x.half()).float(), y)

    # The scaler refuses such an optimizer, so this loop has none.
    inspector = Inspector(model, every=EVERY)
    for number in range(STEPS):
        loss_of(number).backward()
        optimizer.step()
        optimizer.zero_grad()
        inspector.step()
    inspector.close()
    return inspector.findings()


def nan_in_data() -> list[Finding]:
    model = models.mlp()
    return diagnose(model, models.regression(model, given=lambda x: x.index_fill(0, FIRST, NAN)))


def masked_row() -> list[Finding]:
    model = models.Attention(masked=True)
    return diagnose(model, models.sequences(model))


def zero_std() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Standardize(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    return diagnose(model, models.regression(model))


def zero_std_backward() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Standardize(eps=1e-3), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(0.5)
    return diagnose(model, models.regression(model))


def root_of_zero() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Root(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 0.0
    return diagnose(model, models.regression(model))


def exploding_learning_rate() -> list[Finding]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    return diagnose(model, models.regression(model), optimizer=optimizer)


def scale_too_high() -> list[Finding]:
    model = models.mlp()
    scaler = GradScaler("cpu", policy=Static(init_scale=2.0**24), on_stuck="ignore")
    return diagnose(model, models.regression(model), scaler=scaler)


def penalty_overflow() -> list[Finding]:
    model = models.mlp()

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        x.requires_grad_()
        out = model(x)
        # The mistake: a scale by hand, and a square in float16.
        (grad,) = torch.autograd.grad(2.0**12 * out.float().sum(), x, create_graph=True)
        return functional.mse_loss(out.float(), y) + grad.half().square().sum()

    return diagnose(model, loss_of)


def unused_parameter() -> list[Finding]:
    model = models.Heads()
    return diagnose(model, models.heads(model, unused=True))


def detached_branch() -> list[Finding]:
    model = models.Branches(detached=True)
    return diagnose(model, models.regression(model))


def half_weights(dtype: torch.dtype, lr: float) -> list[Finding]:
    model = models.mlp(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        return functional.mse_loss(model(x.to(dtype)).float(), y)

    return diagnose(model, loss_of, optimizer=optimizer, autocast=False)


def sum_in_float16() -> list[Finding]:
    model = models.mlp(outputs=512)

    def loss_of(number: int) -> Tensor:
        x, _ = models.batch(number)
        return (model(x).half() - 3.0).square().half().sum(dtype=torch.float16)

    return diagnose(model, loss_of)


def softmax_by_hand() -> list[Finding]:
    model = nn.Sequential(nn.Linear(8, 16), models.Softmax(factor=20.0), nn.Linear(16, 1))
    return diagnose(model, models.regression(model))


def unbalanced_losses() -> list[Finding]:
    model = models.Heads()

    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        large, small = loss.unbind()
        scaler.backward(large, retain_graph=True)
        scaler.backward(small, loss_id="small")
        scaler.apply(optimizer)

    def loss_of(number: int) -> Tensor:
        x, y = models.batch(number)
        first, second = model(x)
        both = functional.mse_loss(first.float(), y), functional.mse_loss(second.float(), y)
        return torch.stack([1e4 * both[0], 1e-6 * both[1]])

    policy = Dynamic(init_scale=2.0**8, growth_interval=5)
    scaler = GradScaler("cpu", policy=policy, on_stuck="ignore")
    return diagnose(model, loss_of, scaler=scaler, step=step, steps=260, every=40)


def no_scale() -> list[Finding]:
    model = models.mlp(width=128)
    scaler = GradScaler("cpu", policy=Static(init_scale=1.0))
    loss = models.regression(model)
    return diagnose(model, lambda number: 1e-4 * loss(number), scaler=scaler)


def dead_relu() -> list[Finding]:
    model = models.mlp()
    with torch.no_grad():
        model[2].bias.fill_(-1e3)
    return diagnose(model, models.regression(model))


def sum_pooling() -> list[Finding]:
    model = models.Pooled(tokens=4096, size=32.0)
    return diagnose(model, models.sequences(model, tokens=4096), steps=20)


def growing_residuals() -> list[Finding]:
    model = models.Residuals(blocks=8, factor=6.0)
    return diagnose(model, models.regression(model))


def bad_checkpoint() -> list[Finding]:
    model = models.mlp()
    with torch.no_grad():
        model[2].weight[3, 4] = NAN
    return diagnose(model, models.regression(model))
