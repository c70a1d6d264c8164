"""LBFGS in float16, which evaluates the loss several times per step.

The closure calls scaler.backward(loss) instead of loss.backward(). All evaluations of a step have
the same scale, and if one of them overflows, the whole step is undone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler

STEPS = 20


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = torch.linspace(-3, 3, 128, device=device).unsqueeze(1)
    targets = torch.sin(inputs)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=10, line_search_fn="strong_wolfe")
    # So high that the first steps overflow and the scale falls.
    scaler = GradScaler(device, init_scale=2.0**22)

    def loss_of() -> Tensor:
        with torch.autocast(device, dtype=torch.float16):
            outputs = net(inputs)
        return nn.functional.mse_loss(outputs.float(), targets)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        scaler.backward(loss)
        return loss

    first = loss_of().item()
    num_applied = 0
    for _ in range(STEPS):
        outcome = scaler.apply(optimizer, closure=closure)
        num_applied += bool(outcome.applied)
    last = loss_of().item()

    skipped = STEPS - num_applied
    print(f"loss {first:.3g} -> {last:.3g} in {num_applied} steps, {skipped} undone")
    print(f"scale {scaler.get_scale():g}")
    if not 0 < skipped < STEPS:
        raise SystemExit("Only the first steps should have overflowed.")
    if not last < 0.02 * first:
        raise SystemExit("LBFGS has not converged.")


if __name__ == "__main__":
    main()
