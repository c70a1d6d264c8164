"""Drop-in classes for torch's names inside `replace()`: ours, with torch's constructors.

Each inherits from ours first and from the class whose name it has as well, so a scaler that was
made inside is an instance of that class outside, too. The other way round, a scaler of torch's that
was made outside is an instance of what has the name inside.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch
from torch.cpu.amp.grad_scaler import GradScaler as TorchCpuGradScaler
from torch.cuda.amp.grad_scaler import GradScaler as TorchCudaGradScaler

from gradscale.torch import scaler
from gradscale.torch.distributed import fsdp_scaler


def _subclasses_of(theirs: type) -> Any:
    """The `__subclasshook__` with which the subclasses of `theirs` are those of a class."""

    def hook(cls: type, kind: type) -> Any:
        # A class that somebody derives from a drop-in class has its own subclasses.
        return issubclass(kind, theirs) if "__subclasshook__" in vars(cls) else NotImplemented

    return classmethod(hook)


class GradScaler(scaler.GradScaler, metaclass=ABCMeta):
    """`torch.amp.GradScaler`."""

    __subclasshook__ = _subclasses_of(torch.amp.GradScaler)


class CudaGradScaler(scaler.GradScaler, TorchCudaGradScaler, metaclass=ABCMeta):
    """`torch.cuda.amp.GradScaler`, which takes no device."""

    __subclasshook__ = _subclasses_of(TorchCudaGradScaler)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__("cuda", *args, **settings)


class CpuGradScaler(scaler.GradScaler, TorchCpuGradScaler, metaclass=ABCMeta):
    """`torch.cpu.amp.GradScaler`, which takes no device."""

    __subclasshook__ = _subclasses_of(TorchCpuGradScaler)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__("cpu", *args, **settings)


CLASSES: dict[str, type] = {
    "torch.GradScaler": GradScaler,
    "torch.amp.GradScaler": GradScaler,
    "torch.amp.grad_scaler.GradScaler": GradScaler,
    "torch.cuda.amp.GradScaler": CudaGradScaler,
    "torch.cuda.amp.grad_scaler.GradScaler": CudaGradScaler,
    "torch.cpu.amp.GradScaler": CpuGradScaler,
    "torch.cpu.amp.grad_scaler.GradScaler": CpuGradScaler,
}
"""What torch's names are inside."""

if torch.distributed.is_available():
    from torch.distributed.fsdp import sharded_grad_scaler

    class ShardedGradScaler(
        fsdp_scaler.ShardedGradScaler, sharded_grad_scaler.ShardedGradScaler, metaclass=ABCMeta
    ):
        """`torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`."""

        __subclasshook__ = _subclasses_of(sharded_grad_scaler.ShardedGradScaler)

    CLASSES[f"{sharded_grad_scaler.__name__}.ShardedGradScaler"] = ShardedGradScaler
