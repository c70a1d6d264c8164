"""Train a small network in float16 on the CPU with torch's usual loop; only the import is changed.

Step 6 has a batch whose gradients overflow float16 at the current scale: the step is skipped, the
scale is halved, and training continues.
"""

from __future__ import annotations

import torch

from gradscale.torch import GradScaler

STEPS = 14
BAD_STEP = 6


def main() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=5)

    print(f"{'step':>4}  {'loss':>12}  {'scale':>6}  applied")
    for step in range(STEPS):
        inputs = torch.randn(64, 8)
        targets = inputs.sum(dim=1, keepdim=True) * (1e4 if step == BAD_STEP else 1.0)

        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = net(inputs)
        # In float32: the backward pass of a float16 loss overflows at scales above 2**15.
        loss = torch.nn.functional.mse_loss(outputs.float(), targets)

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()

        outcome = scaler.outcome(optimizer)
        applied = "yes" if outcome.applied else "no"
        print(f"{step:>4}  {loss.item():>12.4g}  {outcome.scale.item():>6g}  {applied}")


if __name__ == "__main__":
    main()
