"""The whole of mixed precision in one object."""

from gradscale.torch.mixed_precision.mixed import MixedPrecision
from gradscale.torch.mixed_precision.modes import LEVELS, MODES, Mode

__all__ = ["LEVELS", "MODES", "MixedPrecision", "Mode"]
