"""A gradient penalty, as in WGAN-GP: a critic that measures the distance of two clouds of points.

The penalty is a function of unscaled gradients. mp.grad() computes them with the scale, so that
float16 can represent them, and returns them unscaled. The backward pass of the penalty is a double
backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradscale.torch import MixedPrecision

STEPS = 400
BATCH = 256
PENALTY = 10.0
SHIFT = 1.0


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    critic = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9), fused=True)
    mp = MixedPrecision(critic, optimizer, "fp16")
    shift = torch.tensor([SHIFT, 0.0], device=device)

    def clouds(count: int) -> tuple[Tensor, Tensor]:
        left, right = torch.randn(2, count, 2, device=device)
        return left, right + shift

    slope = torch.zeros(())
    for _ in range(STEPS):
        left, right = clouds(BATCH)
        between = torch.lerp(left, right, torch.rand(BATCH, 1, device=device)).requires_grad_()

        with mp.autocast():
            gap = critic(right).float().mean() - critic(left).float().mean()
            scores = critic(between).float().sum()
        (slopes,) = mp.grad(scores, between, create_graph=True)
        if slopes is None:
            raise SystemExit("The critic does not depend on its input.")
        norms = slopes.norm(dim=1)

        mp.backward(-gap + PENALTY * (norms - 1).square().mean())
        mp.step()
        slope = norms.detach().mean()

    left, right = clouds(10_000)
    with torch.no_grad():
        distance = (critic(right).mean() - critic(left).mean()).item()
    print(f"the clouds are {SHIFT:.2f} apart, the critic says {distance:.2f}")
    print(f"mean slope {slope:.2f} (wanted: 1), scale {mp.scaler.get_scale():g}")
    if not abs(distance - SHIFT) < 0.2 or not abs(slope - 1) < 0.15:
        raise SystemExit("The critic has not learned the distance.")


if __name__ == "__main__":
    main()
