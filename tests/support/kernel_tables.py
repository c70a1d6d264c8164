"""Tables of tensors for kernels that are called directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.grads import dispatch
from gradscale.torch.grads.collect import grouped


def tables(tensors: list[Tensor]) -> list[tuple[torch.dtype, Any]]:
    """A format and a table for each format of `tensors`."""
    found = []
    for (device, dtype), group in grouped(tensors).items():
        table = dispatch.new_table([value.numel() for value in group], device)
        table.point_to([value.data_ptr() for value in group])
        found.append((dtype, table))
    return found
