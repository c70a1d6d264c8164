"""What torch has only from some version on, one name each, with the version that brought it."""

from __future__ import annotations

import functools
from typing import Any

import torch

OPERATOR_TAGS: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
)
"""Keeps an operator that works on the host out of the CUDA graphs of torch.compile."""


@functools.cache  # a process has the same one as long as it runs
def accelerator() -> str | None:
    """The kind of accelerator that there is, None without one (`torch.accelerator`: torch 2.6)."""
    if not hasattr(torch, "accelerator"):
        kinds = ("cuda", "xpu", "mps")
        return next((kind for kind in kinds if getattr(torch, kind).is_available()), None)
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type
