"""Models in half formats, and the masters of their weights, for any optimizer."""

from gradscale.torch.master.casting import Inside, cast, lift
from gradscale.torch.master.masters import Masters

__all__ = ["Inside", "Masters", "cast", "lift"]
