"""Small models, data and Trainers for the tests of the Lightning plugin."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from gradscale.torch.optim import AdamW as OwnAdamW

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
    return [value.detach().clone() for value in values]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two lists of tensors are equal to the bit."""
    ours, theirs = list(ours), list(theirs)
    return len(ours) == len(theirs) and all(
        a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )
