"""MixedPrecision: one object for formats, scale, clipping, skipping, scheduler and accumulation.

An autoencoder compresses 1,797 images of handwritten digits to four numbers each. Weights and
passes are float16, with float32 masters, and every step uses the mean of four micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradscale.demo.digits import load_digits
from gradscale.torch import MixedPrecision
from gradscale.torch.optim import AdamW

STEPS = 400
MICRO_BATCHES = 4
BATCH = 64
HELD_OUT = 297


def autoencoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 4)),
        *(nn.Linear(4, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 64)),
    )


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits().to(device)
    unseen, images = digits[:HELD_OUT], digits[HELD_OUT:]

    model = autoencoder().to(device)
    optimizer = AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    mp = MixedPrecision(model, optimizer, "fp16-master")  # or "fp16", "bf16", "fp32", ...
    mp.follow(scheduler)  # stepped after applied steps only

    def loss_of(batch: Tensor) -> Tensor:
        with mp.autocast():
            return mse_loss(model(batch), batch)

    with torch.no_grad():
        first = loss_of(unseen).item()
    applied = torch.zeros((), device=device)
    for _ in range(STEPS):
        with mp.accumulate(MICRO_BATCHES):
            for micro in images[torch.randint(len(images), (MICRO_BATCHES, BATCH))]:
                mp.backward(loss_of(micro))
        outcome = mp.step(clip_norm=1.0)
        applied += outcome.applied  # on the device, without waiting for it
    mp.flush()  # steps the scheduler for the last step
    with torch.no_grad():
        last = loss_of(unseen).item()
    mean = mse_loss(images.mean(dim=0).expand_as(unseen), unseen).item()

    formats = sorted({str(each.dtype) for each in model.parameters()})
    print(f"weights are {' and '.join(formats)} (norms), masters are in the optimizer's state")
    print(f"{int(applied)} of {STEPS} steps applied, scale {mp.scaler.get_scale():g}")
    print(f"loss on unseen digits {first:.4f} -> {last:.4f}; the mean image has {mean:.4f}")

    exported = mp.float32_model_state()  # the masters, for a float32 model
    plain = autoencoder().to(device)
    plain.load_state_dict(exported)
    with torch.no_grad():
        gap = abs(mse_loss(plain(unseen), unseen).item() - last)
    if scheduler.last_epoch != int(applied):
        raise SystemExit("The scheduler has not followed the steps.")
    if formats != ["torch.float16", "torch.float32"] or not gap < 1e-3:
        raise SystemExit("The weights have the wrong formats or values.")
    if not last < 0.5 * mean:
        raise SystemExit("The network has not learned.")


if __name__ == "__main__":
    main()
