"""A call that the compiler does not trace; imported while compiling, since it loads Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradscale.torch.features import untraced

REASON = (
    "Of the methods of GradScaler, only scale() can be compiled, and apply() with the optimizers "
    "of gradscale.torch.optim (one or a list of them; parameters that are plain tensors, limits "
    "that are numbers, zero_grad=True, no closure), from torch 2.8 on. All other methods are "
    "graph breaks. Remove fullgraph=True, or call the method outside of the compiled function."
)


def _call(scaler: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(scaler, name)(*args, **kwargs)


call: Callable[..., Any] = untraced(_call, REASON)
"""Calls a method of a scaler by its name; the compiler does not trace it."""
