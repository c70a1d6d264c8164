"""What a compiled function leaves to ordinary Python: calls that no graph can hold.

Without `fullgraph=True` they are a graph break and work as ever; with it, the compiler's error
quotes the reason given here. Only a compiler loads this file, because it loads the compiler.
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
    """What the method called `name` hands back."""
    return getattr(scaler, name)(*args, **kwargs)


call: Callable[..., Any] = torch.compiler.disable(_call, reason=REASON)
"""`_call`, with everything that it calls hidden from the compiler."""
