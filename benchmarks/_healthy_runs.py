"""Runs in which nothing is wrong."""

from __future__ import annotations

import _patients as models
import torch
from _diagnosis import EVERY, STEPS, diagnose, logged, torchs_loop
from torch import Tensor, nn
from torch.nn import functional

from gradscale.monitor.findings import Finding
from gradscale.torch import GradScaler, Inspector


def mlp() -> list[Finding]:
    model = models.mlp()
    return diagnose(model, models.regression(model), step=torchs_loop)


def cnn() -> list[Finding]:
    model = models.cnn()
    return diagnose(model, models.images(model))


def gpt() -> list[Finding]:
    model = models.gpt()

    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return diagnose(model, models.text(model), step=step)


def lstm() -> list[Finding]:
    model = models.Recurrent()
    return diagnose(model, models.sequences(model))


def gan() -> list[Finding]:
    """Two networks that take turns, each with an inspector, one scaler and two updates."""
    generator, critic = models.mlp(), models.mlp(inputs=1)
    pair = [torch.optim.Adam(m.parameters(), lr=1e-4) for m in (generator, critic)]
    scaler = GradScaler("cpu")
    inspectors = [Inspector(m, scaler, every=EVERY) for m in (generator, critic)]
    for number in range(STEPS):
        x, real = models.batch(number)
        for turn in (1, 0):
            pair[turn].zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                fake = generator(x)
                if turn:
                    gain = critic(real).float().mean() - critic(fake.detach()).float().mean()
                    loss = functional.softplus(-gain)
                else:
                    loss = functional.softplus(-critic(fake).float()).mean()
            scaler.scale(loss).backward()
            scaler.step(pair[turn])
            scaler.update()
    return [finding for inspector in inspectors for finding in inspector.findings()]


def gan_once() -> list[Finding]:
    """Gradients of the critic's loss for the generator are cleared before the generator's pass."""
    generator, critic = models.mlp(), models.mlp(inputs=1)
    pair = [torch.optim.Adam(m.parameters(), lr=1e-4) for m in (generator, critic)]
    scaler = GradScaler("cpu")
    lines: list[dict[str, object]] = []
    scaler.log_to(lines.append)
    inspectors = [Inspector(m, scaler, every=EVERY) for m in (generator, critic)]
    for number in range(STEPS):
        x, real = models.batch(number)
        for turn in (1, 0):
            pair[turn].zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                gain = critic(real).float().mean() - critic(generator(x)).float().mean()
            scaler.scale(functional.softplus(-gain if turn else gain)).backward()
            scaler.step(pair[turn])
        scaler.update()
    scaler.flush()
    found = [finding for inspector in inspectors for finding in inspector.findings()]
    return found or logged(lines)


def lora() -> list[Finding]:
    model = models.lora(models.gpt())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return diagnose(model, models.text(model), optimizer=optimizer)


def rare_expert() -> list[Finding]:
    """In no sampled iteration has it a token."""
    model = models.Experts(dead=2)
    loss = models.regression(model)

    def loss_of(number: int) -> Tensor:
        model.dead = None if number % EVERY == 1 else 2
        return loss(number)

    return diagnose(model, loss_of)


def stochastic_depth() -> list[Finding]:
    model = models.Residuals(blocks=6, factor=1.0)
    loss = models.regression(model)

    def loss_of(number: int) -> Tensor:
        chance = torch.Generator().manual_seed(number)
        for block in model.blocks:
            block.kept = float(torch.rand((), generator=chance) > 0.5)
        return loss(number)

    return diagnose(model, loss_of)


def fixed_target() -> list[Finding]:
    """Random network distillation: the target has no gradient, and no optimizer has it."""
    model = nn.ModuleDict({name: models.mlp(outputs=8) for name in ("target", "student")})

    def loss_of(number: int) -> Tensor:
        x, _ = models.batch(number)
        with torch.no_grad():
            target = model["target"](x)
        return functional.mse_loss(model["student"](x).float(), target.float())

    optimizer = torch.optim.AdamW(model["student"].parameters(), lr=1e-3)
    return diagnose(model, loss_of, optimizer=optimizer)


def masked_scores() -> list[Finding]:
    """The scores are minus infinity where they are masked, while gradients still overflow."""
    model = models.Causal()
    loss = models.sequences(model)
    scaler = GradScaler("cpu", init_scale=2.0**17)
    return diagnose(model, lambda number: 16.0 * loss(number), scaler=scaler)


def warm_up() -> list[Finding]:
    """A learning rate of 0 loses no update."""
    model = models.mlp(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def loss_of(number: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.0 if number < STEPS // 2 else 1e-2
        x, y = models.batch(number)
        return functional.mse_loss(model(x.bfloat16()).float(), y)

    return diagnose(model, loss_of, optimizer=optimizer, autocast=False)
