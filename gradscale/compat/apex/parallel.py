"""`apex.parallel`: torch's data parallelism and batch norms over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import SyncBatchNorm

from gradscale.compat.apex.optimizers import refuse, without_equal
from gradscale.errors import SettingError, caller_level
from gradscale.torch.optim.master_bits import flatten, unflatten

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

_IGNORED = {
    "message_size": 10000000,
    "delay_allreduce": False,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "allreduce_always_fp32": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average_split_factor": None,
    "gradient_predivide_factor": 1.0,
    "prof": False,
}
"""What changes how fast Apex' is, but not what it computes, with Apex' defaults."""


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, made from Apex' arguments.

    Args:
        module: A model on one device.
        settings: Apex': what only matters to speed is ignored, with a warning that names it.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        known = {*_IGNORED, "gradient_average", "shared_param"}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise SettingError(
                f"DistributedDataParallel takes Apex' settings ({', '.join(sorted(known))}), got "
                f"{', '.join(unknown)}. Use torch.nn.parallel.DistributedDataParallel for torch's "
                "settings."
            )
        refuse(
            "DistributedDataParallel",
            gradient_average=(settings.get("gradient_average", True), True),
        )
        ignored = [name for name, usual in _IGNORED.items() if settings.get(name, usual) != usual]
        if ignored:
            warnings.warn(
                f"torch's DistributedDataParallel has no {', '.join(ignored)}; ignored.",
                stacklevel=caller_level(),
            )
        devices = {param.device for param in module.parameters()}
        alone = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
        super().__init__(module, device_ids=[alone] if alone.type == "cuda" else None)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """`module`, with batch norms that take their statistics over all ranks.

    `channel_last` is not needed: torch's take any layout.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """The group of `group_size` ranks that this rank is in; None, which is all, for 0."""
    if group_size == 0:
        return None
    size = torch.distributed.get_world_size()
    if group_size < 0 or size % group_size:
        raise SettingError(
            f"group_size must divide the number of ranks, {size}, got {group_size!r}."
        )
    return torch.distributed.new_subgroups(group_size)[0]


@torch.no_grad()
def flat_dist_call(tensors: Iterable[Tensor], call: Any, extra_args: Any = None) -> None:
    """Has `call` (a collective) change `tensors`, all of a format at once; averages all_reduce."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        flat = flatten(same)
        call(flat, *(extra_args or ()))
        if call is torch.distributed.all_reduce:
            flat /= torch.distributed.get_world_size()
        for tensor, part in zip(same, unflatten(flat, same), strict=True):
            tensor.copy_(part)


Reducer = without_equal(
    "Reducer", "Call torch.distributed.all_reduce on the gradients, or use DistributedDataParallel."
)
