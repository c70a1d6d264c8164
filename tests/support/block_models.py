"""Models with blocks, and what tests of block scales do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.torch.blocks import BlockScales

torch.set_num_threads(1)
WIDTH = 8


class Residual(nn.Module):
    """`x` and what two layers add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Stream(nn.Module):
    """An embedding, blocks, and a head that uses the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens((x[:, :3] * 3).abs().long() % 11)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T


class Skips(nn.Module):
    """Long skips over blocks, one called twice, tied weights, dicts and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Residual() for _ in range(3)), Pair(), Two()])
        self.blocks[1].wide.weight = self.blocks[0].wide.weight
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.blocks[2].wide.weight = nn.Parameter(torch.randn(16, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[0](first)
        third = self.blocks[1](second)
        pair = self.blocks[3]({"left": self.blocks[2](third), "right": second})
        both = self.blocks[4](pair["left"], other=[pair["right"], first])
        return both[0] + both[1] + first + self.outer.weight.sum(0) + third


class Pair(nn.Module):
    """From a dict to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Any]:
        return {"left": self.line(x["left"]) + x["right"], "right": self.line(x["right"]), "n": 1}


class Two(nn.Module):
    """Two tensors to a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, other: list[Tensor]) -> tuple[Tensor, Tensor]:
        return self.line(x).sin() + other[1], x * other[0]


class Damped(nn.Module):
    """A layer without normalisation, through which gradients lose two binades."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.line = nn.Linear(num_inputs, num_outputs)
        nn.init.orthogonal_(self.line.weight, 1.2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.line(x))
        return y * 0.25 + (y * 0.75).detach()


class Pool(nn.Module):
    """A module without weights that turns positions into one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "mean":
            return x.mean(1)
        if self.kind == "sum":
            return x.sum(1) / x.shape[1]
        if self.kind == "stride":
            return nn.functional.avg_pool1d(x.transpose(1, 2), 8, 8).mean(2)
        if self.kind == "reshape":
            return x.reshape(len(x), 4, -1, x.shape[-1]).mean((1, 2))
        return (x[:, ::2] + x[:, 1::2]).mean(1)  # "add"


class Pooled(nn.Module):
    """Plain blocks in a list, pooling among them, and a first layer that is a narrow code.

    Its gradients span about 50 binades. `between` says whether the pooling is a module of the list
    or a call between two blocks; a `wide` stream is float32 between the blocks.
    """

    def __init__(
        self,
        kind: str = "mean",
        *,
        between: bool = False,
        wide: bool = False,
        depth: int = 24,
        below: int = 6,
        num_features: int = 32,
    ) -> None:
        super().__init__()
        width, code = 16, 3
        layers: list[nn.Module] = [Damped(num_features, code), Damped(code, width)]
        layers += [Damped(width, width) for _ in range(depth - 2)]
        self.pool = Pool(kind)
        if not between:
            layers.insert(below, Pool(kind))
        self.below = below if between else None
        self.wide = wide
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            if place == self.below:
                x = self.pool(x)
            x = block(x)
            x = x.float() if self.wide else x
        return self.head(x)


def positions(seed: int, num: int, num_positions: int = 32) -> tuple[Tensor, Tensor]:
    """Sequences of noise that all lean towards one of four directions, and which one it is."""
    generator = torch.Generator().manual_seed(seed)
    ways = torch.randn(2, 32, generator=torch.Generator().manual_seed(7))
    ways = ways / ways.norm(dim=1, keepdim=True)
    labels = torch.randint(4, (num,), generator=generator)
    signs = torch.stack([labels % 2, labels // 2], 1) * 2.0 - 1
    noise = torch.randn(num, num_positions, 32, generator=generator)
    lean = (signs @ ways)[:, None] * torch.rand(num, 1, 1, generator=generator)
    return noise + lean, labels


def plain() -> nn.Module:
    return nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def nested() -> nn.Module:
    def stage() -> nn.Module:
        layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH), nn.Dropout(0)
        return nn.Sequential(*layers)

    return nn.Sequential(stage(), nn.Sequential(stage(), Residual()), nn.Linear(WIDTH, 1))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def residuals() -> nn.Module:
    return nn.Sequential(*(Residual() for _ in range(4)))


CHAINS = [plain, nested, residuals, Stream, attention]


def inputs(make: Callable[[], nn.Module]) -> Tensor:
    shape = (2, 3, WIDTH) if make is attention else (4, WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def plant(blocks: BlockScales, exponents: Iterable[int] | None = None) -> None:
    """Gives the blocks very different scales."""
    if exponents is None:
        exponents = [(7 * place) % 23 - 11 for place in range(len(blocks.names))]
    state = blocks.state_dict()
    state["exponents"] = dict(zip(blocks.names, exponents, strict=True))
    blocks.load_state_dict(state)


def gradients(model: nn.Module, x: Tensor, passes: int = 1, half: bool = False) -> list[Tensor]:
    """The gradients of all parameters, and of the input."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    for _ in range(passes):
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            out = model(x)
        ((out if out.dtype is torch.float64 else out.float()).square().mean() * 64).backward()
    return [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]
