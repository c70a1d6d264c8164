"""The PyTorch engine."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError('gradscale.torch needs PyTorch: pip install "gradscale[torch]".') from error

from gradscale.torch.events import Event
from gradscale.torch.joining import JoinableStep
from gradscale.torch.outcome import Culprit, StepOutcome
from gradscale.torch.precision import MixedPrecision
from gradscale.torch.reducing import average_in_float16
from gradscale.torch.scaler import GradScaler
from gradscale.torch.sharded import ShardedGradScaler

__all__ = [
    "Culprit",
    "Event",
    "GradScaler",
    "JoinableStep",
    "MixedPrecision",
    "ShardedGradScaler",
    "StepOutcome",
    "average_in_float16",
]
