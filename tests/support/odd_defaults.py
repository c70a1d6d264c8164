"""A pytest plugin: a tensor that does not name its device and its format has odd ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def odd_defaults() -> Iterator[None]:
    """Tensors are float16, and on a device that has no numbers, unless they say otherwise."""
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
