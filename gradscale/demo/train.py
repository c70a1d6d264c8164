"""One network, one task, seven ways to train it: what `gradscale demo` runs.

The network is a deep autoencoder: it squeezes an image of a digit through 32 numbers and draws it
again. Nothing in it is unusual: sigmoid layers with Glorot's initial weights, mean squared error,
AdamW.

Why float16 fails here without a scale: the loss is a mean over 32 x 64 pixels, so the backward
pass starts with numbers around 2**-12, and each of the seven sigmoids on the way back, whose slope
is at most 1/4, makes them smaller. At the first layer they are around 2**-28, and float16 turns
what is at most 2**-25 into zero. The first layers get no gradient, and the network learns no more
than to draw the mean of all images. float32 has the same small numbers, and room for them.

float16 is real: weights, activations and their gradients are float16 tensors throughout the forward
and the backward pass. float32 are the master weights, the loss and the optimizer, as is usual.

Two runs get batches of NaN in the middle, as from a damaged file. No scale can make such a loss
finite. torch's GradScaler halves its scale at each of them all the same, and with its defaults it
needs 2000 finite steps to double the scale once, so the gradients of the remaining steps are all
zero. gradscale skips those steps and leaves the scale alone, but for one: after 32 losses in a row
that are not finite, every eighth is counted as an overflow, because the scale may be the cause.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradscale import Headroom, Off, Policy, Static
from gradscale.errors import SettingError
from gradscale.formats import FLOAT16
from gradscale.torch import GradScaler

WIDTHS = (64, 128, 96, 64, 32, 64, 96, 128, 64)
BATCH = 32
"""float16 on a CPU is slow: with 128 images, seven runs would take three minutes."""
LEARNING_RATE = 5e-3
PROBE_EVERY = 20
"""Steps between two measurements of what underflows."""


NAN_BATCHES = 40
"""Batches in a row that are NaN; fewer in a run of less than 200 steps, one in five."""


class Run(NamedTuple):
    """One way to train."""

    name: str
    dtype: torch.dtype
    """Of weights, activations and gradients in the forward and the backward pass."""
    policy: Policy | None
    """Of gradscale's scaler; None is torch's own `torch.amp.GradScaler` with its defaults."""
    nan_batches: bool = False
    """Whether the batches in the middle of the run are NaN."""


EXACT = Run("float32", torch.float32, Off())
BARE = Run("float16, no scale", torch.float16, Off())
STATIC = Run("float16, static", torch.float16, Static(init_scale=2.0**10))
TORCH = Run("float16, torch", torch.float16, None)
OURS = Run("float16, gradscale", torch.float16, Headroom())
TORCH_NAN = Run("NaN data, torch", torch.float16, None, nan_batches=True)
OURS_NAN = Run("NaN data, gradscale", torch.float16, Headroom(), nan_batches=True)
RUNS = (EXACT, BARE, STATIC, TORCH, OURS, TORCH_NAN, OURS_NAN)


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
    empty: bool
    """Whether every gradient was zero, so that the step taught the network nothing."""
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


def nan_steps(run: Run, steps: int) -> range:
    """The steps of a run of so many whose batches are NaN: in the middle, or none."""
    count = min(NAN_BATCHES, steps // 5) if run.nan_batches else 0
    first = (steps - count) // 2
    return range(first, first + count)


def batches(run: Run, images: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """The batches of a run, drawn from `images` by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    damaged = nan_steps(run, steps)
    for index in range(steps):
        batch = images[torch.randint(len(images), (BATCH,), generator=generator)]
        yield torch.full_like(batch, torch.nan) if index in damaged else batch


class Ours:
    """gradscale's scaler, in the two calls of a step."""

    def __init__(self, policy: Policy, net: nn.Module, log: Path | None) -> None:
        self._scaler = GradScaler("cpu", policy=policy, underflow_every=PROBE_EVERY)
        self._scaler.name(net)
        if log is not None:
            self._scaler.log_to(log)

    def backward(self, loss: Tensor) -> None:
        """Scales the loss and runs the backward pass."""
        self._scaler.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
        """The scale that was used, and whether the step was applied."""
        outcome = self._scaler.apply(optimizer)
        return float(outcome.scale), bool(outcome)

    def close(self) -> None:
        """Ends the log."""
        self._scaler.log_to(None)


class Torch:
    """torch's own scaler with its defaults, in the calls that its documentation gives."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def backward(self, loss: Tensor) -> None:
        """Scales the loss and runs the backward pass."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
        """The scale that was used, and whether the step was applied."""
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad()
        # It does not return whether it stepped; it lowers the scale if, and only if, it did not.
        return scale, self._scaler.get_scale() >= scale

    def close(self) -> None:
        """Has nothing to end."""


def train(
    run: Run, images: Tensor, steps: int, seed: int, log: Path | None = None
) -> Iterator[Step]:
    """Trains a new network on `images` and yields every step as it is taken.

    Runs with the same `seed` start with the same weights and see the same batches. `log` is the
    folder of a run log, which gradscale's scaler writes and torch's cannot.
    """
    check(steps, seed)
    net = build(seed)
    masters = list(net.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    scaler = Torch() if run.policy is None else Ours(run.policy, net, log)
    try:
        for index, batch in enumerate(batches(run, images, steps, seed)):
            # What float32 `.grad` receives has passed through these, the weights that compute.
            weights = {name: master.to(run.dtype) for name, master in net.named_parameters()}
            loss = redraw(net, weights, batch)
            exact: Sequence[Tensor] = ()
            if run.dtype is torch.float16 and index % PROBE_EVERY == 0:
                for weight in weights.values():
                    weight.retain_grad()
                true = redraw(net, dict(net.named_parameters()), batch)
                exact = torch.autograd.grad(true, masters)
            scaler.backward(loss)
            empty = not any(master.grad.any() for master in masters if master.grad is not None)
            scale, applied = scaler.step(optimizer)
            halves = [weight.grad for weight in weights.values() if exact]
            found = [half for half in halves if half is not None]
            lost = compare(found, exact) if found and applied else None
            yield Step(loss.item(), scale, applied, empty, lost)
    finally:
        scaler.close()


def loss_of_the_mean(images: Tensor) -> float:
    """The loss of a network that draws the mean of all `images` whatever it sees."""
    return float((images - images.mean(dim=0)).square().mean())
