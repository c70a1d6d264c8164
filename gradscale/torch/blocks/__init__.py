"""A scale per block of a model."""

from gradscale.torch.blocks.rule import Placing
from gradscale.torch.blocks.scales import BlockScales

__all__ = ["BlockScales", "Placing"]
