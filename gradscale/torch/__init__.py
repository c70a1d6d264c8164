"""The PyTorch engine."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError('gradscale.torch needs PyTorch: pip install "gradscale[torch]".') from error

from gradscale.monitor import Event
from gradscale.torch.distributed.comm_hooks import average_in_float16
from gradscale.torch.distributed.fsdp_scaler import ShardedGradScaler
from gradscale.torch.distributed.groups import Shards
from gradscale.torch.distributed.join import JoinableStep
from gradscale.torch.inspect import Examination, Inspector, examine
from gradscale.torch.mixed_precision import MixedPrecision
from gradscale.torch.replacement import replace
from gradscale.torch.scaler import GradScaler
from gradscale.torch.telemetry.blame import Culprit
from gradscale.torch.telemetry.outcome import StepOutcome

__all__ = [
    "Culprit",
    "Event",
    "Examination",
    "GradScaler",
    "Inspector",
    "JoinableStep",
    "MixedPrecision",
    "ShardedGradScaler",
    "Shards",
    "StepOutcome",
    "average_in_float16",
    "examine",
    "replace",
]
