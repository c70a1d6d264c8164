"""The networks of the arena."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from arena.half import Linear, linear, matmul


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = Linear(width, 3 * width), Linear(width, width)
        self.widen, self.narrow = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x`, one vector for every character, with what this block adds."""
        batch, length, width = x.shape
        heads = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = matmul(query, key.mT).float() / math.sqrt(query.shape[-1])
        past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        shares = scores.masked_fill(~past, -math.inf).softmax(-1)
        mixed = matmul(shares, value)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm_2(x))))


class GPT(nn.Module):
    """A GPT-2 without dropout. What is added up from block to block stays float32."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.tell = Linear(width, words, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.05)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of every character but the first, told by those before it."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = (self.tokens(inputs) + self.places.weight[: inputs.shape[1]]).float()
        for block in self.blocks:
            x = block(x)
        logits = self.tell(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LSTM(nn.Module):
    """An LSTM over characters, unrolled by hand.

    The library's own LSTM has no float16 on the CPU. Here as there, the gradients of the weights
    are added up over all characters in the format of the backward pass.
    """

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.gates, self.tell = Linear(2 * width, 4 * width), Linear(width, words)
        self.width = width

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss of every character but the first, told by those before it."""
        inputs, targets = self.tokens(text[:, :-1]), text[:, 1:]
        memory = inputs.new_zeros(len(text), self.width)
        state, states = memory, []
        weight, bias = self.gates.weight, self.gates.bias
        if torch.is_autocast_enabled(inputs.device.type):
            dtype = torch.get_autocast_dtype(inputs.device.type)
            weight, bias = weight.to(dtype), bias.to(dtype)  # once, not for every character
        for char in inputs.unbind(1):
            gates = linear(torch.cat([char.to(state.dtype), state], 1), weight, bias)
            keep, take, show, new = gates.chunk(4, 1)
            memory = (keep + 1).sigmoid() * memory + take.sigmoid() * new.tanh()
            state = show.sigmoid() * memory.to(show.dtype).tanh()
            states.append(state)
        logits = self.tell(torch.stack(states, 1)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def perceptron(
    widths: Sequence[int], activation: Callable[[], nn.Module], gain: float = 1.0
) -> nn.Sequential:
    """Linear layers with Glorot's weights, and an activation between each two."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = Linear(inputs, outputs)
        nn.init.xavier_uniform_(layer.weight, gain=gain)
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
    return nn.Sequential(*layers[:-1])
