"""Small models, data and Trainers for the tests of the Lightning plugin."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import gradscale as gs
from gradscale.plugins.lightning import GradscalePrecision
from gradscale.torch import MixedPrecision
from gradscale.torch.optim import AdamW as OwnAdamW

POLICY = gs.Dynamic(init_scale=2.0**18, backoff_factor=2.0**-4, growth_interval=2)
"""Begins with overflows in the float16 backward pass, and grows into further ones."""
OURS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""Our names of Lightning's modes."""

THEIR_WARNINGS = [
    # Lightning 2.6 builds torch's LeafSpec, which torch 2.13 deprecates.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Advice about the machine: GPUs and cores that these tests leave idle.
    "GPU available but not used",
    "The '.*dataloader' does not have many workers",
]
"""What Lightning says that has nothing to do with the plugin."""


def ignore_their_warnings() -> None:
    """Keeps `THEIR_WARNINGS` from being errors."""
    for message in THEIR_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def adamw(params: Any, kind: str) -> torch.optim.Optimizer:
    """An AdamW of one of three kinds, which skip in different ways."""
    if kind == "own":
        return OwnAdamW(params, lr=1e-2)
    return torch.optim.AdamW(params, lr=1e-2, **{kind: True})


def network() -> nn.Sequential:
    """A small network, the same in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    """How far the network is from the sum of its inputs."""
    return nn.functional.mse_loss(net(batch).float(), batch.sum(1, keepdim=True))


def batches(count: int = 8, bad: int | None = 4, seed: int = 1) -> Tensor:
    """Batches, of which the one at `bad` has an infinite input."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(count, 4, 8, generator=generator)
    if bad is not None:
        data[bad, 0, 0] = torch.inf
    return data


class Model(LightningModule):
    """A network with an AdamW, and a scheduler that halves the rate after every step."""

    def __init__(self, kind: str = "foreach", interval: str = "step") -> None:
        super().__init__()
        self.net = network()
        self.kind, self.interval = kind, interval
        self.rates: list[float] = []
        """The learning rate after every batch."""

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.net, batch)

    def test_step(self, batch: Tensor) -> None:
        self.log("distance", loss_of(self.net, batch), batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters(), self.kind)
        scheduler = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer(plugin: Any, **settings: Any) -> Trainer:
    """A Trainer on the CPU that writes nothing."""
    standard = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
    }
    return Trainer(plugins=plugin, **{**standard, **settings})


def loader(data: Tensor) -> DataLoader[Tensor]:
    """The batches of `data`, in order."""
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def bits(values: Any) -> list[Tensor]:
    """Copies of tensors, to compare."""
    return [value.detach().cpu().clone() for value in values]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two lists of tensors are equal to the bit."""
    ours, theirs = list(ours), list(theirs)
    return len(ours) == len(theirs) and all(
        a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


class Run(NamedTuple):
    """How a run ended."""

    weights: list[Tensor]
    exact: list[Tensor]
    """The weights in float32, with masters in their place."""
    rates: list[float]
    """The learning rate after every batch."""
    verdicts: list[str]
    """What became of every step."""
    scale: float

    def agrees(self, other: Run) -> bool:
        """Whether another run ended alike, to the bit."""
        tensors = same(self.weights, other.weights) and same(self.exact, other.exact)
        return tensors and self[2:] == other[2:]


def policy_of(mode: str) -> gs.Policy | None:
    """`POLICY` in float16, else that of the mode."""
    return None if mode.startswith("bf16") else POLICY


def by_hand(mode: str, kind: str, accumulate: int = 1, device: str = "cpu", **limits: float) -> Run:
    """A run of `Model` in a loop of our own calls."""
    net = network().to(device)
    optimizer = adamw(net.parameters(), kind)
    mp = MixedPrecision(net, optimizer, OURS.get(mode, mode), policy=policy_of(mode))
    scheduler = StepLR(optimizer, 1, 0.5)
    rates, verdicts = [], []
    for number, batch in enumerate(batches().to(device)):
        with mp.autocast():
            loss = loss_of(net, batch) / accumulate
        mp.backward(loss)
        if (number + 1) % accumulate == 0:
            outcome = mp.step(**limits)
            verdicts.append(outcome.verdict())
            if outcome.applied:
                scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    exact = mp.float32_model_state().values()
    return Run(bits(net.parameters()), bits(exact), rates, verdicts, mp.scaler.get_scale())


class Verdicts(Callback):
    """Collects what became of every step, and waits for the device to do so."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > len(self.all):
            self.all.append(trainer.precision_plugin.scaler.outcome().verdict())


def by_trainer(mode: str, kind: str, **settings: Any) -> Run:
    """A run of `Model` by a Trainer with the plugin."""
    plugin, verdicts, model = (
        GradscalePrecision(mode, policy=policy_of(mode)),
        Verdicts(),
        Model(kind),
    )
    trainer(plugin, callbacks=[verdicts], **settings).fit(model, loader(batches()))
    exact = plugin.float32_model_state(model.net).values()
    scale = plugin.scaler.get_scale()
    return Run(bits(model.parameters()), bits(exact), model.rates, verdicts.all, scale)
