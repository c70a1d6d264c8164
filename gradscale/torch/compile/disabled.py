"""A call that the compiler does not look into; imported when a function is being compiled.

Not before, because it loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REASON = (
    "Of a GradScaler, scale() compiles, and apply() with the optimizers of gradscale.torch.optim "
    "(one or a list of them; parameters that are plain tensors, limits that are numbers, "
    "zero_grad=True, no closure). Everything else is a graph break: leave out fullgraph=True, or "
    "call it outside of the compiled function."
)


def _call(scaler: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """What the method called `name` returns."""
    return getattr(scaler, name)(*args, **kwargs)


call: Callable[..., Any] = torch.compiler.disable(_call, reason=REASON)
"""`_call`, with everything that it calls hidden from the compiler."""
