"""Weights that are not finite, which no scale cures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.grads.dtensor import local
from gradscale.torch.telemetry.names import Names


@torch.no_grad()
def bad_weights(names: Names, optimizers: Iterable[Any]) -> list[str]:
    """The names of the parameters of `optimizers` that are not finite; **waits for the device**.

    Of a sharded parameter, by what this rank has.
    """
    alive = list(optimizers)
    known = names.of(alive)
    params = {id(p): p for o in alive for group in o.param_groups for p in group["params"]}
    flags: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
    for key, param in params.items():
        values = local(param.detach())
        if values.dtype.itemsize < 2:
            continue  # torch cannot ask numbers of 8 bits
        flags[values.device].append((key, torch.isfinite(values).all()))
    bad: set[int] = set()
    for found in flags.values():
        fine = torch.stack([flag for _, flag in found]).tolist()
        bad |= {key for (key, _), good in zip(found, fine, strict=True) if not good}
    return [name for key, name in known.items() if key in bad]
