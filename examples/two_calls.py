"""Two calls per step, backward() and apply(), with accumulation, clipping, scheduler and average.

The batch of step 30 overflows float16: its step is skipped, the scheduler and the average are not
updated, and the outcome names the parameters whose gradients are not finite.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gradscale.torch import GradScaler

STEPS = 60
MICRO_BATCHES = 4
BAD_STEP = 30


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    scaler = GradScaler(device, init_scale=2.0**12)
    scaler.name(net)
    # Both are called after applied steps only, without waiting for the device.
    scaler.follow(scheduler, lambda: average.update_parameters(net))

    losses: list[float] = []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for _ in range(MICRO_BATCHES):
            inputs = torch.randn(16, 8, device=device)
            targets = inputs.sum(dim=1, keepdim=True) * (300 if step == BAD_STEP else 1.0)
            with torch.autocast(device, dtype=torch.float16):
                outputs = net(inputs)
            # Divided, so that the sum of the gradients is that of the mean loss.
            loss = nn.functional.mse_loss(outputs.float(), targets) / MICRO_BATCHES
            scaler.backward(loss)
            total += loss.detach()
        outcome = scaler.apply(optimizer, clip_norm=1.0)

        # Reading an outcome waits for the device; a real loop does so only occasionally.
        if outcome.applied:
            losses.append(total.item())
        else:
            names = ", ".join(culprit.name for culprit in outcome.culprits())
            print(f"step {step} skipped: {outcome.verdict()}, in {names}")

    scaler.flush()  # calls the followers for the last step
    rate = optimizer.param_groups[0]["lr"]
    moved = int(average.n_averaged)
    print(f"{len(losses)} of {STEPS} steps applied, loss {losses[0]:.3g} -> {losses[-1]:.3g}")
    print(f"the average moved {moved} times, the learning rate is {rate:.2g}")
    print(f"scale {scaler.get_scale():g}, events {scaler.history}")

    if len(losses) != STEPS - 1 or moved != len(losses) or scheduler.last_epoch != len(losses):
        raise SystemExit("The wrong steps were skipped or followed.")
    if not losses[-1] < 0.2 * losses[0]:
        raise SystemExit("The network has not learned.")


if __name__ == "__main__":
    main()
