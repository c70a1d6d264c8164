"""One network, one task, four ways to train it: what `gradscale demo` runs.

The network is a deep autoencoder: it squeezes an image of a digit through 32 numbers and draws it
again. Nothing in it is unusual: sigmoid layers with Glorot's initial weights, mean squared error,
AdamW.

Why float16 fails here without a scale: the loss is a mean over 128 x 64 pixels, so the backward
pass starts with numbers around 2**-14, and each of the seven sigmoids on the way back, whose slope
is at most 1/4, makes them smaller. At the first layer they are around 2**-30, and float16 turns
what is at most 2**-25 into zero. The first layers get no gradient, and the network learns no more
than to draw the mean of all images. float32 has the same small numbers, and room for them.

float16 is real: weights, activations and their gradients are float16 tensors throughout the forward
and the backward pass. float32 are the master weights, the loss and the optimizer, as is usual.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradscale import Dynamic, Off, Policy, Static
from gradscale.errors import SettingError
from gradscale.formats import FLOAT16
from gradscale.torch import GradScaler

WIDTHS = (64, 128, 96, 64, 32, 64, 96, 128, 64)
BATCH = 128
LEARNING_RATE = 5e-3
PROBE_EVERY = 20
"""Steps between two measurements of what underflows."""


class Run(NamedTuple):
    """One way to train."""

    name: str
    dtype: torch.dtype
    """Of weights, activations and gradients in the forward and the backward pass."""
    policy: Policy


RUNS = (
    Run("float32", torch.float32, Off()),
    Run("float16, no scaling", torch.float16, Off()),
    Run("float16, static scale", torch.float16, Static(init_scale=2.0**10)),
    # torch's first scale. Growth is due every 2000 steps there; a run this short would see none.
    Run("float16, dynamic scale", torch.float16, Dynamic(init_scale=2.0**16, growth_interval=50)),
)


class Lost(NamedTuple):
    """What float16 lost of the weight gradients of one step, as shares from 0 to 1."""

    underflow: float
    """Of the elements that are not zero in float16: those below its smallest normal number."""
    flushed: float
    """Of the elements that are not zero in float32: those that are zero in float16."""


class Step(NamedTuple):
    """The measurements of one step of a run."""

    loss: float
    """Before the step, not scaled."""
    scale: float
    """The one that was used."""
    applied: bool
    lost: Lost | None
    """None in float32, in steps that were skipped and between two measurements."""


class Trace(NamedTuple):
    """A run and all its steps."""

    run: Run
    steps: Sequence[Step]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread inside the block.

    The layers are too small to share: on two idle cores a second thread gains nothing in float16,
    and where another program uses that core, waiting for it made the demo five times as slow.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def build(seed: int) -> nn.Sequential:
    """The network, with float32 weights drawn from `seed`."""
    # Before the layers, which draw weights of their own from torch's global generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(WIDTHS):
            linear = nn.Linear(inputs, outputs)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])  # the pixels are a linear function of the last layer


def redraw(net: nn.Module, weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """The loss of `net` with `weights`, computed in their format up to the pixels that it draws."""
    (dtype,) = {weight.dtype for weight in weights.values()}
    drawn = torch.func.functional_call(net, weights, images.to(dtype))
    return nn.functional.mse_loss(drawn.float(), images)


def compare(halves: Sequence[Tensor], exact: Sequence[Tensor]) -> Lost:
    """What the float16 gradients `halves` lost against `exact`, the same in float32."""
    half = torch.cat([grad.flatten() for grad in halves]).abs()
    true = torch.cat([grad.flatten() for grad in exact])
    nonzero, small = int(half.count_nonzero()), (half > 0) & (half < FLOAT16.smallest_normal)
    flushed = int(((half == 0) & (true != 0)).sum())
    return Lost(int(small.sum()) / max(1, nonzero), flushed / max(1, int(true.count_nonzero())))


def check(steps: int, seed: int) -> None:
    """Raises SettingError if `train` cannot take these."""
    if not steps >= 1:
        raise SettingError(f"steps must be >= 1, got {steps}.")
    if not 0 <= seed < 2**63:
        raise SettingError(f"seed must be >= 0 and < 2**63, got {seed}.")


def train(run: Run, images: Tensor, steps: int, seed: int) -> Iterator[Step]:
    """Trains a new network on `images` and yields every step as it is taken.

    Runs with the same `seed` start with the same weights and see the same batches.
    """
    check(steps, seed)
    net = build(seed)
    masters = list(net.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    scaler = GradScaler("cpu", policy=run.policy)
    generator = torch.Generator().manual_seed(seed)
    for index in range(steps):
        batch = images[torch.randint(len(images), (BATCH,), generator=generator)]
        # What float32 `.grad` receives has passed through these, the weights that compute.
        weights = {name: master.to(run.dtype) for name, master in net.named_parameters()}
        loss = redraw(net, weights, batch)
        exact: Sequence[Tensor] = ()
        if run.dtype is torch.float16 and index % PROBE_EVERY == 0:
            for weight in weights.values():
                weight.retain_grad()
            exact = torch.autograd.grad(redraw(net, dict(net.named_parameters()), batch), masters)
        scaler.backward(loss)
        outcome = scaler.apply(optimizer)
        halves = [weight.grad for weight in weights.values() if exact and weight.grad is not None]
        lost = compare(halves, exact) if halves and outcome else None
        yield Step(loss.item(), float(outcome.scale), bool(outcome), lost)


def loss_of_the_mean(images: Tensor) -> float:
    """The loss of a network that draws the mean of all `images` whatever it sees."""
    return float((images - images.mean(dim=0)).square().mean())
