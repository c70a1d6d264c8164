"""Trainings on digits: what no scale fits, and what needs another than the usual one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from arena import data
from arena.models import perceptron
from arena.training import EPS, Training, Turn


class DeepPlain(Training):
    """Which digits lie on their side? Twenty sigmoid layers, no normalisation, no short cuts.

    Each layer makes gradients about four times smaller. Those of the first layer are 2**-44 of
    those of the last: float16 has 40 binades, from its smallest subnormal number to its largest.
    """

    name = "deep plain net"
    metric = "accuracy"
    higher_is_better = True
    noise = 0.02
    steps = (400, 400)
    cost = 4.0
    sequential = True
    classes = 2

    def build(self) -> None:
        width = self.place.pick(48, 128)
        widths = [64, *[width] * 20, self.classes]
        self.model = perceptron(widths, nn.Sigmoid).to(self.place.device)
        self.optimizer = self.adamw(self.model.parameters(), self.place.pick(2e-3, 1e-3))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Some images to train on, turned, and by how much each is turned."""
        images = self.pick()
        quarters = torch.randint(self.classes, (len(images),), generator=self.generator)
        images = data.turned(images, quarters)
        return self.there(images), self.there(quarters)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """The same of what is never trained on: every image, turned in every way."""
        images = data.digits().validation.repeat(self.classes, 1)
        quarters = torch.arange(self.classes).repeat_interleave(len(images) // self.classes)
        return self.there(data.turned(images, quarters)), self.there(quarters)

    def pick(self, count: int = 128) -> Tensor:
        """Some images to train on."""
        images = data.digits().train
        return images[torch.randint(len(images), (count,), generator=self.generator)]

    def turns(self, step: int) -> Iterator[Turn]:
        images, quarters = self.batch()
        with self.precision():
            logits = self.model(images)
        yield Turn(functional.cross_entropy(logits.float(), quarters), self.optimizer)

    def validate(self) -> float:
        images, quarters = self.held_out()
        with torch.no_grad(), self.precision():
            return (self.model(images).argmax(1) == quarters).float().mean().item()


class TinyLoss(DeepPlain):
    """Which digits lie on their side, and how much ink have they? The second loss weighs 2**-30.

    The first question is soon answered, and its gradients become small: from then on there is room
    for a higher scale. The metric is the mean of the two accuracies.
    """

    name = "tiny auxiliary loss"
    steps = (400, 600)
    cost = 1.0
    sequential = False
    weight = 2.0**-30

    def build(self) -> None:
        width = self.place.pick(64, 256)
        self.model = nn.ModuleDict(
            {
                "both": perceptron([64, width], nn.ReLU),
                "turn": perceptron([width, width, 2], nn.ReLU),
                "ink": perceptron([width, width, 4], nn.ReLU),
            }
        ).to(self.place.device)
        self.optimizer = self.adamw(self.model.parameters(), self.place.pick(5e-3, 1e-3))
        ink = data.digits().train.sum(1)
        self.bounds = ink.quantile(torch.tensor([0.25, 0.5, 0.75])).to(self.place.device)

    def told(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the net says of both questions."""
        with self.precision():
            both = self.model["both"](images).relu()
            heads = (self.model["turn"], self.model["ink"])
            turn, ink = (head(both).float() for head in heads)
            return turn, ink

    def quarter_of_ink(self, images: Tensor) -> Tensor:
        """0 for the quarter of all digits that have the least ink, and so on."""
        return torch.bucketize(images.sum(1), self.bounds)

    def turns(self, step: int) -> Iterator[Turn]:
        images, quarters = self.batch()
        turn, ink = self.told(images)
        small = self.weight * functional.cross_entropy(ink, self.quarter_of_ink(images))
        yield Turn(functional.cross_entropy(turn, quarters) + small, self.optimizer)

    def validate(self) -> float:
        images, quarters = self.held_out()
        with torch.no_grad():
            turn, ink = (says.argmax(1) for says in self.told(images))
        right = (turn == quarters).float() + (ink == self.quarter_of_ink(images)).float()
        return right.mean().item() / 2


class SmallHead(TinyLoss):
    """The same questions; one batch in 50 weighs 2**12 times as much, and the second loss 2**-26.

    Room for such a batch takes the gradients of the second head, whose loss is the metric; that of
    the first is the second metric. A third of the answers to the first question are random, so that
    its gradients stay large; and all are clipped far below, as AdamW would else remember a spike
    for a thousand steps.
    """

    name = "spikes, small head"
    metric = "loss"
    second_metric = "main loss"
    higher_is_better = False
    noise = 0.02
    clip_norm = 0.01
    steps = (500, 600)
    spiky = True
    weight = 2.0**-26
    every = 50
    height = 2.0**12

    def turns(self, step: int) -> Iterator[Turn]:
        self.slow_down(step, self.optimizer)
        images, quarters = self.batch()
        random = self.there(torch.rand(len(images), generator=self.generator))
        quarters = torch.where(random < 1 / 3, (random * 6).long(), quarters)
        factor = self.height if step % self.every == 40 else 1.0

        def loss() -> Tensor:
            turn, ink = self.told(images)
            small = self.weight * functional.cross_entropy(ink, self.quarter_of_ink(images))
            return (functional.cross_entropy(turn, quarters) + small) * factor

        yield Turn(loss(), self.optimizer, loss)

    def validate(self) -> float:
        images, _ = self.held_out()
        with torch.no_grad():
            ink = self.told(images)[1]
            return functional.cross_entropy(ink, self.quarter_of_ink(images)).item()

    def validate_second(self) -> float:
        images, quarters = self.held_out()
        with torch.no_grad():
            turn = self.told(images)[0]
            return functional.cross_entropy(turn, quarters).item()


class GAN(DeepPlain):
    """Two networks that draw and judge digits; their losses are sums over the batch.

    The metric is the Frechet distance between the pixels of drawn and of real digits.
    """

    name = "GAN"
    metric = "distance"
    higher_is_better = False
    noise = 0.3
    steps = (400, 600)
    cost = 2.0
    sequential = False
    latent = 16

    def build(self) -> None:
        width = self.place.pick(64, 256)
        device = self.place.device
        self.model = perceptron([self.latent, width, width, 64], nn.LeakyReLU, 1.4).to(device)
        self.judge = perceptron([64, width, width, 1], nn.LeakyReLU, 1.4).to(device)
        self.drawer, self.critic = (
            torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=EPS, fused=True)
            for net in (self.model, self.judge)
        )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """So many drawn digits."""
        noise = torch.randn(count, self.latent, generator=generator)
        return self.model(self.there(noise)).sigmoid()

    def believed(self, images: Tensor, truth: float) -> Tensor:
        """The loss of a judge who should say `truth`."""
        says = self.judge(images).float()
        return functional.binary_cross_entropy_with_logits(
            says, torch.full_like(says, truth), reduction="sum"
        )

    def turns(self, step: int) -> Iterator[Turn]:
        self.slow_down(step, self.critic, self.drawer)
        with self.precision():
            real = self.there(self.pick())
            drawn = self.draw(len(real), self.generator).detach()
            loss = self.believed(real, 1.0) + self.believed(drawn, 0.0)
        yield Turn(loss, self.critic)
        self.judge.requires_grad_(False)
        with self.precision():
            loss = self.believed(self.draw(len(real), self.generator), 1.0)
        yield Turn(loss, self.drawer)
        self.judge.requires_grad_(True)

    def validate(self) -> float:
        with torch.no_grad(), self.precision():
            drawn = self.draw(2000, torch.Generator().manual_seed(1))
        return frechet(drawn.cpu().double(), data.digits().train.double())


def frechet(left: Tensor, right: Tensor) -> float:
    """The Frechet distance of two clouds of points, as if both were normal."""
    if not left.isfinite().all():
        return float("inf")
    apart = (left.mean(0) - right.mean(0)).square().sum()
    first, second = left.T.cov(), right.T.cov()
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    return (apart + first.trace() + second.trace() - 2 * shared).item()
