"""Trainings on text: an ordinary one, and what disturbs it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arena import data
from arena.models import GPT, LSTM
from arena.training import EPS, Place, Training, Turn
from gradscale.torch import optim

PRETRAINING = (200, 300)
"""Steps before the fine-tune, in each of the sizes."""
WEIGHTS: Path | None = None
"""Where processes that share pretrained weights keep them."""


class Text(Training):
    """A GPT on Python's documentation: the ordinary case."""

    name = "GPT"
    clip_norm = 1.0
    sequential = True
    cost = 5.0
    lr = 3e-3

    def build(self) -> None:
        self.batch, self.length = self.place.pick((12, 64), (32, 128))
        width, layers, heads = self.place.pick((48, 2, 4), (256, 3, 8))
        words = len(data.alphabet())
        model = GPT(words, self.length, width, layers, heads)
        self.model = model.to(self.place.device)
        self.optimizer = self.adamw(self.model.parameters(), self.lr / self.place.pick(1, 2))

    def text(self) -> data.Split:
        """What is trained on."""
        return data.documentation()

    def loss_of(self, text: Tensor) -> Tensor:
        """The mean loss of the characters of `text`."""
        with self.precision():
            return self.model(self.there(text))

    def turns(self, step: int) -> Iterator[Turn]:
        self.slow_down(step, self.optimizer)
        text = data.windows(self.text().train, self.batch, self.length, self.generator)
        yield Turn(self.loss_of(text), self.optimizer, lambda: self.loss_of(text))

    def validate(self) -> float:
        generator = torch.Generator().manual_seed(1)
        held_out = self.text().validation
        batches = [data.windows(held_out, 64, self.length, generator) for _ in range(4)]
        with torch.no_grad():
            return sum(self.loss_of(batch).item() for batch in batches) / len(batches)


class HalfWeights(Text):
    """The same with float16 weights and float32 masters. torch's scaler refuses the gradients."""

    name = "half weights"
    sequential = False

    def build(self) -> None:
        super().build()
        if self.place.dtype is torch.float32:
            return
        for module in self.model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.to(self.place.dtype)
        self.optimizer = self.adamw(self.model.parameters(), self.optimizer.defaults["lr"])

    def adamw(self, params: Iterable[Tensor], lr: float) -> Optimizer:
        return optim.AdamW(params, lr=lr, eps=EPS)


class Spikes(Text):
    """One batch in 25 weighs 512 times as much as the others."""

    name = "spikes"
    sequential = False
    spiky = True
    every = 25
    height = 512.0

    def turns(self, step: int) -> Iterator[Turn]:
        factor = self.height if step % self.every == 20 else 1.0
        for loss, optimizer, again in super().turns(step):
            yield Turn(loss * factor, optimizer, lambda again=again: again() * factor)


class NaNs(Text):
    """The losses of 60 batches in a row are NaN, from two fifths of the way."""

    name = "60 NaN batches"
    sequential = False
    steps = (360, 360)
    burst = 60

    def bad(self) -> range:
        """The steps whose losses are NaN."""
        first = self.num_steps * 2 // 5
        return range(first, min(self.num_steps, first + self.burst))

    def turns(self, step: int) -> Iterator[Turn]:
        for loss, optimizer, _ in super().turns(step):
            yield Turn(loss * (float("nan") if step in self.bad() else 1.0), optimizer)

    def calm_after(self) -> int:
        return self.bad().stop


def pretrained(place: Place) -> dict[str, Tensor]:
    """The weights of a GPT that has read the documentation for a while, in float32.

    They are made once, or read from the folder `WEIGHTS` where processes share one.
    """
    key = place._replace(dtype=torch.float32)
    if WEIGHTS is None:
        return _pretrained(key)
    path = WEIGHTS / f"{key.size}-{key.seed}.pt"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(_pretrained(key), unfinished)
        unfinished.replace(path)  # whole, or not there
    weights: dict[str, Tensor] = torch.load(path, map_location=place.device)
    return weights


@functools.cache
def _pretrained(place: Place) -> dict[str, Tensor]:
    num_steps = place.pick(*PRETRAINING)
    training = Text(place, num_steps)
    for step in range(num_steps):
        for loss, optimizer, _ in training.turns(step):
            loss.backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return training.model.state_dict()


class FineTune(Text):
    """A GPT that knows prose learns to read programs, with weights of 2**-24 for every sample.

    Importance weights and losses divided by the size of a whole data set are that small. AdamW
    does not care; float16 does.
    """

    name = "fine-tune"
    sequential = False
    steps = (150, 150)
    lr = 1e-3
    weight = 2.0**-24

    def build(self) -> None:
        weights = pretrained(self.place)
        super().build()
        self.model.load_state_dict(weights)

    def text(self) -> data.Split:
        return data.program()

    def turns(self, step: int) -> Iterator[Turn]:
        for loss, optimizer, _ in super().turns(step):
            yield Turn(loss * self.weight, optimizer)


class LongUnroll(Text):
    """An LSTM whose gradients go back through many characters; the loss is their sum."""

    name = "LSTM"
    sequential = False
    steps = (150, 150)
    cost = 30.0
    lr = 1e-2

    def build(self) -> None:
        self.batch, self.length = self.place.pick((16, 96), (32, 96))
        self.model = LSTM(len(data.alphabet()), self.place.pick(48, 256)).to(self.place.device)
        self.optimizer = self.adamw(self.model.parameters(), self.lr / self.place.pick(1, 2))

    def turns(self, step: int) -> Iterator[Turn]:
        for loss, optimizer, _ in super().turns(step):
            yield Turn(loss * self.length, optimizer)
