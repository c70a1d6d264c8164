"""A loss with a scale of its own: a tiny auxiliary loss and a main loss, on one shared trunk.

The main loss overflows at any but a small scale. At that scale all gradients of the auxiliary loss
underflow in float16, and its head learns nothing. A loss_id gives the auxiliary loss its own scale,
and its gradients are converted to the common scale in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradscale.torch import GradScaler

STEPS = 300
MAIN = 1e3
AUXILIARY = 1e-10


class Result(NamedTuple):
    scale: float
    auxiliary_scale: float
    zeros: float
    """Share of the auxiliary head's gradients that were zero, over all steps."""
    error: float
    """The loss of the auxiliary head; 1 is the loss of a constant output."""


def train(loss_id: int | str) -> Result:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh()).to(device)
    head = nn.Linear(32, 1, device=device)
    auxiliary_head = nn.Linear(32, 1, device=device)
    parameters = [*trunk.parameters(), *head.parameters(), *auxiliary_head.parameters()]
    # Such gradients are small compared with Adam's default eps of 1e-8, whatever the scale.
    optimizer = torch.optim.Adam(parameters, lr=0.02, eps=1e-20, fused=True)
    scaler = GradScaler(device, growth_interval=10)
    zeros = torch.zeros((), device=device)
    error = torch.zeros((), device=device)

    for _ in range(STEPS):
        inputs = torch.randn(64, 8, device=device)
        with torch.autocast(device, dtype=torch.float16):
            features = trunk(inputs)
            outputs, auxiliary_outputs = head(features), auxiliary_head(features)
        loss = MAIN * mse_loss(outputs.float(), inputs.sum(dim=1, keepdim=True))
        error = mse_loss(auxiliary_outputs.float(), inputs[:, :1])

        # The second pass uses the same trunk, so the first pass must retain the graph.
        scaler.backward(loss, retain_graph=True)
        scaler.backward(AUXILIARY * error, loss_id=loss_id)
        if auxiliary_head.weight.grad is not None:
            zeros += (auxiliary_head.weight.grad == 0).float().mean()
        scaler.apply(optimizer)

    scales = scaler.get_scale(), scaler.get_scale(loss_id)
    return Result(*scales, (zeros / STEPS).item(), error.item())


def main() -> None:
    one, two = train(loss_id=0), train(loss_id="auxiliary")
    for name, result in (("one scale", one), ("two scales", two)):
        print(
            f"{name:>10}: main {result.scale:<6g} auxiliary {result.auxiliary_scale:<12g}"
            f"zero gradients {result.zeros:4.0%}, error of the auxiliary head {result.error:.2f}"
        )
    if one.zeros < 0.9 or two.zeros > 0.2:
        raise SystemExit("Gradients should vanish with one scale, but not with two.")
    if not two.error < 0.2 < one.error:
        raise SystemExit("The auxiliary head should learn only with a scale of its own.")


if __name__ == "__main__":
    main()
