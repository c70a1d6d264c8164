"""LoRA on a model in float16: a frozen base and trainable adapters, both float16.

torch.amp.GradScaler does not unscale float16 gradients. With MixedPrecision the adapters become
float32, and the base stays in float16 and is not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gradscale.demo.digits import load_digits
from gradscale.torch import MixedPrecision

STEPS = 300
BATCH = 128
RANK = 8


class Adapted(nn.Module):
    """A frozen layer and a low-rank update, which is zero at first."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return output


def pretrained(images: Tensor) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """The layers of an autoencoder for images of digits."""
    sizes = ((64, 128), (128, 32), (32, 64))
    first, second, third = (nn.Linear(*size, device=images.device) for size in sizes)
    net = nn.Sequential(first, nn.ReLU(), second, third)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = images[torch.randint(len(images), (BATCH,))]
        mse_loss(net(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return first, second, third


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = load_digits().to(device)
    first, second, third = pretrained(images)
    model = nn.Sequential(Adapted(first), nn.ReLU(), Adapted(second), Adapted(third))
    model.to(device).half()  # as if it had been loaded in float16, with the adapters
    adapters = [each for each in model.parameters() if each.requires_grad]
    base = [each for each in model.parameters() if not each.requires_grad]
    before = [each.clone() for each in base]
    optimizer = torch.optim.AdamW(adapters, lr=3e-3)

    def loss_of(batch: Tensor) -> Tensor:
        """The loss of drawing digits upside down, for which the base was not trained."""
        with torch.autocast(device, dtype=torch.float16):
            outputs = model(batch)
        return mse_loss(outputs.float(), batch.flip(1))

    theirs = torch.amp.GradScaler(device)
    theirs.scale(loss_of(images)).backward()
    try:
        theirs.step(optimizer)
    except ValueError as error:
        print(f"torch.amp.GradScaler: {error}")
    else:
        raise SystemExit("torch.amp.GradScaler was expected to refuse float16 gradients.")
    optimizer.zero_grad()

    mp = MixedPrecision(model, optimizer, "fp16")  # the only line of gradscale
    start = loss_of(images).item()
    for _ in range(STEPS):
        mp.backward(loss_of(images[torch.randint(len(images), (BATCH,))]))
        mp.step(clip_norm=1.0)
    end = loss_of(images).item()

    frozen, trained = base[0].dtype, adapters[0].dtype
    print(f"gradscale: loss {start:.4f} -> {end:.4f}, base {frozen}, adapters {trained}")
    if not all(torch.equal(now, then) for now, then in zip(base, before, strict=True)):
        raise SystemExit("The weights of the base have changed.")
    if (frozen, trained) != (torch.float16, torch.float32):
        raise SystemExit("The base or the adapters have the wrong format.")
    if not end < 0.3 * start:
        raise SystemExit("The adapters have not learned.")


if __name__ == "__main__":
    main()
