"""A scale per block of a model."""

import warnings
from typing import Any

from gradscale.torch.blocks.rule import BlockPolicy
from gradscale.torch.blocks.scales import BlockScales

__all__ = ["BlockPolicy", "BlockScales"]


def __getattr__(name: str) -> Any:
    """`BlockPolicy` by its old name, with a DeprecationWarning."""
    if name == "Placing":
        warnings.warn("Placing is called BlockPolicy now.", DeprecationWarning, stacklevel=2)
        return BlockPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
