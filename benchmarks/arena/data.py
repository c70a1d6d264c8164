"""What is trained on: texts that come with Python and the digits that come with gradscale.

All of it is real and none of it is downloaded. The texts differ a little between versions of
Python, so numbers are compared within one.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor

from gradscale.demo.digits import load_digits

OF_TEXT, OF_DIGITS = 0.1, 0.25
"""The shares of all data that are never trained on."""


class Split:
    """What is trained on, and what validation sees."""

    def __init__(self, train: Tensor, validation: Tensor) -> None:
        self.train, self.validation = train, validation


@functools.cache
def alphabet() -> dict[str, int]:
    """A number for every character of Python's documentation."""
    return {char: place for place, char in enumerate(sorted(set(_documentation())))}


@functools.cache
def documentation() -> Split:
    """Python's documentation of its own language, as numbers of characters."""
    return _split_text(_documentation())


@functools.cache
def program() -> Split:
    """The source of a module of Python's: another kind of text in the same alphabet."""
    return _split_text(Path(argparse.__file__).read_text(encoding="utf-8"))


@functools.cache
def digits() -> Split:
    """The images of digits, in an order of their own."""
    images = load_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    kept = int(len(images) * OF_DIGITS)
    return Split(images[order[kept:]], images[order[:kept]])


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` pieces of `text`, of `length` characters and the one that comes next."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]


def turned(images: Tensor, quarters: Tensor) -> Tensor:
    """The images, each turned by so many quarters."""
    square = images.view(-1, 8, 8)
    every = torch.stack([square.rot90(quarter, (1, 2)) for quarter in range(4)])
    return every[quarters, torch.arange(len(images))].reshape(-1, 64)


def _documentation() -> str:
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def _split_text(text: str) -> Split:
    """The text as numbers; what the alphabet does not have is left out."""
    known = alphabet()
    numbers = torch.tensor([known[char] for char in text if char in known])
    kept = int(len(numbers) * (1 - OF_TEXT))
    return Split(numbers[:kept], numbers[kept:])
