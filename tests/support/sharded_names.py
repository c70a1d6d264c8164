"""FSDP2 and DTensors, by the names that this torch has for them."""

import unittest
from typing import Any

try:  # torch 2.6
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.distributed._composable.fsdp import fully_shard as _fully_shard

    def fully_shard(module: Any, *, mesh: Any = None, **settings: Any) -> Any:
        if mesh is None or mesh.device_type == "cpu":
            raise unittest.SkipTest("FSDP2 runs on the CPU from torch 2.6 on")
        return _fully_shard(module, mesh=mesh, **settings)


try:  # torch 2.5
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
except ImportError:
    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor

__all__ = [
    "CPUOffloadPolicy",
    "DTensor",
    "MixedPrecisionPolicy",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "fully_shard",
]
