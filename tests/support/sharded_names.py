"""FSDP2 and DTensors, by the names that this torch has for them."""

try:  # torch 2.6
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        fully_shard,
    )

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
