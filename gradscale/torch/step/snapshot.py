"""Snapshot of random state and buffers, restored before a backward pass is run again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def random_state() -> dict[str, Any]:
    """Returns the random state of Python and of torch, on the CPU and on every GPU in use.

    It contains tensors and plain numbers, so `torch.load(weights_only=True)` can read it.
    """
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python = {"version": version, "words": list(words), "gauss": gauss}
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "python": python}


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what `random_state()` returned."""
    torch.set_rng_state(state["cpu"])
    for device, each in enumerate(state["cuda"]):
        torch.cuda.set_rng_state(each, device)
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))


class Snapshot:
    """The random state of torch and Python, and the buffers of `models`, when it was made.

    Buffers are, for example, the statistics of batch norms. Other generators are not included.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._random = random_state()
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in _modules_of(models)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the random state and the buffers."""
        set_random_state(self._random)
        for module, name, buffer, kept in self._buffers:
            # One that was expanded overlaps itself, and cannot be written to.
            whole = buffer.numel() < 2 or 0 not in buffer.stride()
            module._buffers[name] = buffer.copy_(kept) if whole else kept.clone()


def _modules_of(models: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Every module of `models`, once, in no particular order."""
    # `modules()` passes names up through a generator per level: 100 us for the 87 modules of GPT-2
    # small (H200's host), at a time when the device waits for the next forward pass.
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = list(models)
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen.add(module)
            waiting += module._modules.values()
            yield module
