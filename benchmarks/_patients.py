"""Small models and batches for planted illnesses."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from end_to_end import GPT, TINY
from torch import Tensor, nn
from torch.nn import functional

LossOf = Callable[[int], Tensor]


def batch(number: int, inputs: int = 8, size: int = 64) -> tuple[Tensor, Tensor]:
    """Inputs, and a target that depends on them."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, inputs, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def mlp(
    inputs: int = 8, width: int = 32, outputs: int = 1, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    ).to(dtype)


def regression(
    model: nn.Module,
    given: Callable[[Tensor], Tensor] = lambda x: x,
    target: Callable[[Tensor], Tensor] = lambda y: y,
) -> LossOf:
    def loss_of(number: int) -> Tensor:
        x, y = batch(number)
        return functional.mse_loss(model(given(x)).float(), target(y))

    return loss_of


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sqrt()


class Standardize(nn.Module):
    """A norm by hand."""

    def __init__(self, eps: float = 0.0) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True).sqrt() + self.eps)


class Softmax(nn.Module):
    """exp() without subtracting the largest."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        large = (self.factor * x).half().exp()
        return large / large.sum(1, keepdim=True)


class Heads(nn.Module):
    """A trunk with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 64)
        self.large = nn.Linear(64, 1)
        self.small = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).relu()
        return self.large(x), self.small(x)


def heads(model: nn.Module, weight: float = 1.0, unused: bool = False) -> LossOf:
    def loss_of(number: int) -> Tensor:
        x, y = batch(number)
        large, small = model(x)
        loss = functional.mse_loss(large.float(), y)
        return loss if unused else loss + weight * functional.mse_loss(small.float(), y)

    return loss_of


class Experts(nn.Module):
    """A mixture of four experts by a gate, of which one is never chosen."""

    def __init__(self, dead: int | None) -> None:
        super().__init__()
        self.dead = dead
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(mlp(width=16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).float()
        if self.dead is not None:
            gates = gates - 1e4 * functional.one_hot(torch.tensor(self.dead), 4)
        weights, chosen = gates.softmax(1).max(1, keepdim=True)
        outputs = torch.cat([expert(x).float() for expert in self.experts], 1)
        return weights * outputs.gather(1, chosen)


class Branches(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.trunk, self.branch = mlp(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        side = self.branch(x)
        return self.trunk(x) + (side.detach() if self.detached else side)


class Mix(nn.Module):
    """Attention with a mask that is added."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (x @ x.transpose(1, 2) / math.sqrt(x.shape[-1]) + mask).softmax(-1)
        return weights @ x


class Attention(nn.Module):
    def __init__(self, masked: bool = False, width: int = 16) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(8, width), Mix(), nn.Linear(width, 1)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1],) * 2, -math.inf).triu(0 if self.masked else 1)
        return self.head(self.mix(self.embed(x), mask)).mean(1)


class Scores(nn.Module):
    """Of every token with those before it: minus infinity with those after it."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2) / math.sqrt(x.shape[-1])
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)


class Causal(nn.Module):
    """Attention whose scores are a module."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.scores, self.head = nn.Linear(8, width), Scores(), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.scores(x).softmax(-1) @ x).mean(1)


def sequences(model: nn.Module, tokens: int = 12) -> LossOf:
    def loss_of(number: int) -> Tensor:
        x, _ = batch(number, size=16 * tokens)
        x = x.view(16, tokens, 8)
        return functional.mse_loss(model(x).float(), x.mean((1, 2)).sin().unsqueeze(1))

    return loss_of


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Pooled(nn.Module):
    def __init__(self, tokens: int, size: float) -> None:
        super().__init__()
        self.embed, self.pool, self.head = nn.Linear(8, 16), Sum(), nn.Linear(16, 1)
        nn.init.constant_(self.embed.bias, size)
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.embed(x)) / self.tokens)


class Grow(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor, self.kept = nn.Linear(16, 16), factor, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * (x + self.kept * self.linear(x))


class Residuals(nn.Module):
    def __init__(self, blocks: int, factor: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Grow(factor) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cell(nn.Module):
    """The LSTM cell; torch's own has no float16 on the CPU."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + width, 4 * width)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.gates(torch.cat([x, h.to(x.dtype)], 1)).float().chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = Cell(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 16)
        for token in x.unbind(1):
            h, c = self.cell(token, h, c)
        return self.head(h)


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def images(model: nn.Module) -> LossOf:
    def loss_of(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 1, 8, 8, generator=generator)
        labels = torch.randint(4, (16,), generator=generator)
        return functional.cross_entropy(model(x + labels.view(-1, 1, 1, 1)).float(), labels)

    return loss_of


def gpt() -> GPT:
    return GPT(TINY)


def text(model: nn.Module) -> LossOf:
    def loss_of(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(TINY.words, (8, 1), generator=generator)
        return model((start + torch.arange(TINY.length + 1)) % TINY.words)

    return loss_of


class LowRank(nn.Module):
    """A frozen layer and two factors, of which the second begins at zero."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def lora(model: GPT) -> GPT:
    model.requires_grad_(False)
    for block in model.blocks:
        block.attend = LowRank(block.attend)
        block.widen = LowRank(block.widen)
    return model
