"""The arms: how one step is taken, with whose scale."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradscale
from arena import measure
from arena.training import Training, Turn
from gradscale.torch import GradScaler, StepOutcome
from gradscale.torch.mixed_precision.recomputation import Recomputation

BLOCKS = "float16, blocks"
RETRIES, SKIPPING = "Headroom, retries", "Headroom, spikes skipped"
STATIC_SCALES = (*range(-10, 39, 4), 40)
"""The logarithms to the base 2 of the scales that the search tries."""
STARTS = (0, 8, 16, 24, 32, 40)
"""The same of the first scales that `--starts` tries."""


class Stepper(Protocol):
    """Takes steps, each in two calls."""

    def backward(self, loss: Tensor) -> None:
        """The backward pass of the scaled loss."""

    def scale(self) -> Tensor | float:
        """The scale of that backward pass; a tensor is overwritten by `apply`."""

    def apply(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        """Unscales, clips and steps, or skips; moves the scale and clears the gradients."""


class Bare:
    """No scale. A step is skipped if its gradients are not finite."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def scale(self) -> float:
        return 1.0

    def apply(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        contract: Any = optimizer  # the one that torch's scaler has with fused optimizers
        found_inf = (~measure.finite(measure.gradients(optimizer))).float()
        contract.grad_scale, contract.found_inf = None, found_inf
        _clip(optimizer, clip_norm)
        optimizer.step()
        del contract.grad_scale, contract.found_inf
        optimizer.zero_grad()


class Torchs:
    """torch's scaler at its defaults, in torch's loop."""

    def __init__(self, device: str, **settings: float) -> None:
        self.scaler = torch.amp.GradScaler(device, **settings)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def scale(self) -> Tensor:
        scale: Tensor = self.scaler._get_scale_async()  # get_scale() waits
        return scale

    def apply(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        self.scaler.unscale_(optimizer)
        _clip(optimizer, clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


class Ours:
    """gradscale's scaler with one of its policies, in two calls."""

    def __init__(self, device: str, policy: Any, **settings: Any) -> None:
        self.scaler = GradScaler(device, policy=policy, on_stuck="ignore", **settings)
        self.outcome: Any = None

    def backward(self, loss: Tensor) -> None:
        self.scaler.backward(loss)

    def scale(self) -> Tensor:
        scale: Tensor = self.scaler._get_scale_async()
        return scale

    def apply(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        self.outcome = self.scaler.apply(optimizer, clip_norm=clip_norm)


class Retrying(Ours):
    """The same, with batches computed again that overflow, as `MixedPrecision(retries=2)` does."""

    def __init__(self, device: str, policy: Any) -> None:
        super().__init__(device, policy)
        self.recomputation = Recomputation(self.scaler, retries=2)
        self.again: Callable[[], Tensor] | None = None

    def apply(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        tries = 0

        def attempt() -> StepOutcome:
            nonlocal tries
            if tries and self.again is not None:
                self.scaler.backward(self.again())
            tries += 1
            return self.scaler.apply(optimizer, clip_norm=clip_norm)

        retries = 0 if self.again is None else None
        self.outcome = self.recomputation.run(attempt, lambda: None, retries)


class Blocks(Ours):
    """torch's rule for the loss, and a scale of its own for every block of the model.

    What is seen of gradients has left the blocks: it says nothing of underflow inside of them.
    """

    def __init__(self, training: Training, scales: Any) -> None:
        super().__init__(training.place.device, gradscale.Dynamic())
        self.scales = scales

    def apply(self, optimizer: Optimizer, clip_norm: float | None) -> None:
        super().apply(optimizer, clip_norm)
        self.scales.update()


class Arm(NamedTuple):
    """A way to train: a format, and who scales."""

    name: str
    dtype: torch.dtype
    make: Callable[[Training], Stepper]
    only_sequential: bool = False
    only_spiky: bool = False

    def suits(self, training: type[Training]) -> bool:
        """Whether it says anything of that kind of training."""
        return (training.sequential or not self.only_sequential) and (
            training.spiky or not self.only_spiky
        )


def take(stepper: Stepper, turn: Turn, clip_norm: float | None) -> None:
    """Takes or skips the step of a turn."""
    _begin(stepper, turn)
    stepper.apply(turn.optimizer, clip_norm)


def advance(
    stepper: Stepper, turn: Turn, clip_norm: float | None, first: int = 0
) -> measure.Reading:
    """The same, measured.

    `first` is the place of the optimizer's first tensor among all of the training.
    """
    device = turn.loss.device
    before = measure.number(measure.steps_taken(turn.optimizer), device)
    _begin(stepper, turn)
    facts = [measure.number(value, device) for value in (turn.loss, stepper.scale())]
    seen = measure.look(measure.gradients(turn.optimizer))
    stepper.apply(turn.optimizer, clip_norm)
    after = measure.number(measure.steps_taken(turn.optimizer), device)
    return measure.Reading(torch.cat([torch.stack([before, after, *facts]), seen]), first)


def _begin(stepper: Stepper, turn: Turn) -> None:
    if isinstance(stepper, Retrying):
        stepper.again = turn.again
    stepper.backward(turn.loss)


@functools.cache
def fixed_arms() -> dict[str, Arm]:
    """The arms that are run once for every seed."""
    arms = [
        Arm("float32", torch.float32, lambda training: Bare()),
        Arm("bfloat16", torch.bfloat16, lambda training: Bare()),
        Arm("float16, no scale", torch.float16, lambda training: Bare()),
        Arm("torch's GradScaler", torch.float16, lambda training: Torchs(training.place.device)),
    ]
    for name in ("Dynamic", "Headroom", "LogMax", "Histogram"):
        policy = getattr(gradscale, name, None)
        if policy is None:
            print(f"{name} is left out: gradscale does not have it", flush=True)
        else:
            arms.append(_ours(name, policy))
    for name, make in (
        (RETRIES, lambda t: Retrying(t.place.device, gradscale.Headroom())),
        (SKIPPING, lambda t: Ours(t.place.device, gradscale.Headroom(spikes="skip"))),
    ):
        arms.append(Arm(name, torch.float16, make, only_spiky=True))
    blocks = _blocks()
    if blocks is None:
        print(f"{BLOCKS} is left out: gradscale has no BlockScales", flush=True)
    else:
        arms.append(blocks)
    return {arm.name: arm for arm in arms}


def static_arm(log2_scale: int) -> Arm:
    """A scale that never moves."""
    policy = gradscale.Static(init_scale=2.0**log2_scale)
    return Arm(static_name(log2_scale), torch.float16, lambda t: Ours(t.place.device, policy))


def static_name(log2_scale: int) -> str:
    """What the arm with this scale is called."""
    return f"static 2^{log2_scale}"


def named(name: str) -> Arm:
    """The arm with this name."""
    if name in fixed_arms():
        return fixed_arms()[name]
    for log2_scale in STATIC_SCALES:
        if name == static_name(log2_scale):
            return static_arm(log2_scale)
    every = {arm.name: arm for start in STARTS for arm in start_arms(start)}
    return every[name]


def start_arms(log2_scale: int) -> list[Arm]:
    """torch's scaler and the policies that move, from this scale on."""
    scale = 2.0**log2_scale
    arms = [
        Arm(
            f"torch's GradScaler from 2^{log2_scale}",
            torch.float16,
            lambda training: Torchs(training.place.device, init_scale=scale),
        )
    ]
    for name in ("Headroom", "LogMax", "Histogram"):
        policy = getattr(gradscale, name, None)
        if policy is not None:
            arms.append(_ours(f"{name} from 2^{log2_scale}", policy, init_scale=scale))
    return arms


def _ours(name: str, policy: Callable[..., Any], **settings: float) -> Arm:
    return Arm(name, torch.float16, lambda t: Ours(t.place.device, policy(**settings)))


def _clip(optimizer: Optimizer, clip_norm: float | None) -> None:
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(measure.parameters(optimizer), clip_norm)


def _blocks() -> Arm | None:
    """The arm of BlockScales; None if gradscale does not have it."""
    try:
        scales = importlib.import_module("gradscale.torch.blocks").BlockScales
    except (ImportError, AttributeError):
        return None
    return Arm(BLOCKS, torch.float16, lambda t: Blocks(t, scales(t.model)), only_sequential=True)
