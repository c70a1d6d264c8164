"""A GAN on points in the plane: two optimizers, one scaler, and a step for each of them.

apply() ends an iteration, so each network has one of its own: an overflow of the generator skips
the generator's step and not the discriminator's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import softplus

from gradscale.torch import GradScaler

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
    discriminator = network(2, 1, device)
    adam = partial(torch.optim.Adam, betas=(0.5, 0.9), fused=True)
    optimizer_g = adam(generator.parameters(), lr=1e-3)
    optimizer_d = adam(discriminator.parameters(), lr=4e-3)
    scaler = GradScaler(device, growth_interval=200)

    for _ in range(ITERATIONS):
        real = center + 0.5 * torch.randn(BATCH, 2, device=device)

        with torch.autocast(device, dtype=torch.float16):
            fake = generator(torch.randn(BATCH, 4, device=device))
            says_real = discriminator(real).float()
            says_fake = discriminator(fake.detach()).float()
        scaler.backward(softplus(-says_real).mean() + softplus(says_fake).mean())
        scaler.apply(optimizer_d)

        with torch.autocast(device, dtype=torch.float16):
            says_fake = discriminator(fake).float()
        # Only the generator's gradients: the pass goes through the discriminator, and without
        # `inputs` it would leave gradients there, for the discriminator's next step.
        scaler.backward(softplus(-says_fake).mean(), inputs=list(generator.parameters()))
        scaler.apply(optimizer_g)

    with torch.no_grad():
        samples = generator(torch.randn(2000, 4, device=device))
    mean, std = samples.mean(dim=0).tolist(), samples.std(dim=0).tolist()
    print(f"wanted mean  2.00 -1.00, got {mean[0]:5.2f} {mean[1]:5.2f}")
    print(f"wanted std   0.50  0.50, got {std[0]:5.2f} {std[1]:5.2f}")
    print(f"scale {scaler.get_scale():g}, both steps applied in the last iteration: ", end="")
    print(bool(scaler.outcome(optimizer_d)) and bool(scaler.outcome(optimizer_g)))

    if not torch.dist(samples.mean(dim=0), center) < 0.5:
        raise SystemExit("The generator has not found the points.")


if __name__ == "__main__":
    main()
