"""A GAN on points in the plane: two models, two optimizers, one MixedPrecision.

mp.step(optimizer) ends an iteration of one optimizer, so an overflow in the generator skips only
the generator's step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import softplus

from gradscale.torch import MixedPrecision

ITERATIONS = 500
BATCH = 128


def network(inputs: int, outputs: int, device: str) -> nn.Module:
    layers = (nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))
    return nn.Sequential(*layers).to(device)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    center = torch.tensor([2.0, -1.0], device=device)
    generator = network(4, 2, device)
    critic = network(2, 1, device)
    adam = partial(torch.optim.Adam, betas=(0.5, 0.9), fused=True)
    opt_g = adam(generator.parameters(), lr=1e-3)
    opt_c = adam(critic.parameters(), lr=4e-3)
    mp = MixedPrecision([generator, critic], [opt_g, opt_c], "fp16-master")

    applied = {opt_g: torch.zeros((), device=device), opt_c: torch.zeros((), device=device)}
    for _ in range(ITERATIONS):
        real = center + 0.5 * torch.randn(BATCH, 2, device=device)
        with mp.autocast():
            fake = generator(torch.randn(BATCH, 4, device=device))
            loss = softplus(-critic(real)).mean() + softplus(critic(fake.detach())).mean()
        mp.backward(loss)
        applied[opt_c] += mp.step(opt_c).applied

        with mp.autocast():
            loss = softplus(-critic(fake)).mean()
        # The pass goes through the critic. `inputs` limits it to the generator's gradients, because
        # the critic's next step would use gradients that the pass leaves in the critic.
        mp.backward(loss, inputs=list(generator.parameters()))
        applied[opt_g] += mp.step(opt_g).applied

    with torch.no_grad():
        samples = generator(torch.randn(2000, 4, device=device))
    mean, std = samples.mean(dim=0).tolist(), samples.std(dim=0).tolist()
    steps = [int(applied[optimizer]) for optimizer in (opt_g, opt_c)]
    print(f"wanted mean  2.00 -1.00, got {mean[0]:5.2f} {mean[1]:5.2f}")
    print(f"wanted std   0.50  0.50, got {std[0]:5.2f} {std[1]:5.2f}")
    print(f"{steps[0]} and {steps[1]} of {ITERATIONS} steps applied", end=", ")
    print(f"scale {mp.scaler.get_scale():g}")

    if not torch.dist(samples.mean(dim=0), center) < 0.5:
        raise SystemExit("The generator has not learned the distribution.")
    if not min(steps) > 0.95 * ITERATIONS:
        raise SystemExit("Too many steps were skipped.")


if __name__ == "__main__":
    main()
