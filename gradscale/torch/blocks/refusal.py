"""The error of a compiled model whose torch would compile the wrong weights.

It is raised when the compiled function runs. Imported while compiling, since it loads Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradscale.errors import SettingError
from gradscale.torch.features import untraced

_RULE = "BlockScales in a compiled function need torch 2.5 or later"


def _refuse_graph() -> None:
    raise SettingError(
        f"{_RULE}, and this is torch {torch.__version__}. Call the model without torch.compile."
    )


refuse_graph: Callable[[], None] = untraced(_refuse_graph, _RULE)
"""Raises a SettingError; the compiler does not trace it."""
