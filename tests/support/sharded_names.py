"""FSDP2 and DTensors, by the names that this torch has for them."""

import unittest
from typing import Any

import torch

try:  # torch 2.6
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

FSDP2_ON_THE_CPU = hasattr(torch.cpu.Stream, "record_event") and torch.__version__ >= "2.9"
"""Whether FSDP2 works without an accelerator: in torch 2.6 it raises, and in 2.8 it adds up the
gradients of ranks where it should take their mean, which shows on two ranks only."""

if not FSDP2_ON_THE_CPU:
    _fully_shard = fully_shard

    def fully_shard(module: Any, *, mesh: Any = None, **settings: Any) -> Any:
        if mesh is None or mesh.device_type == "cpu":
            raise unittest.SkipTest("needs FSDP2 on the CPU")
        return _fully_shard(module, mesh=mesh, **settings)


try:  # torch 2.5
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor

__all__ = [
    "FSDP2_ON_THE_CPU",
    "CPUOffloadPolicy",
    "DTensor",
    "MixedPrecisionPolicy",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "fully_shard",
]
