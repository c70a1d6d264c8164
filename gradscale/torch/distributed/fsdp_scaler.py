"""torch's name for a scaler of sharded parameters."""

from __future__ import annotations

from typing import Any

from gradscale.torch.distributed.groups import WORLD, Shards
from gradscale.torch.scaler import GradScaler


class ShardedGradScaler(GradScaler):
    """A replacement for `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`.

        scaler = ShardedGradScaler(process_group=group)

    For ranks that hold shards in plain tensors, as FSDP1 does.

    Args:
        backoff_factor: As in torch, before `growth_factor` in the order of arguments.
        process_group: The ranks that decide together; None: all ranks.
        **settings: The keyword-only arguments of `GradScaler`.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            groups=Shards(WORLD if process_group is None else process_group),
            **settings,
        )
        self._pipeline.consensus.groups.has_losses = True  # of their own data
