"""What torch has only from some version on, one name each, with the version that brought it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

COMPILES_OPERATORS = hasattr(torch.Tag, "cudagraph_unsafe")
"""Whether an operator that works on the host can be kept out of the CUDA graphs of torch.compile,
and may change lists of its arguments (torch 2.8)."""
OPERATOR_TAGS: dict[str, Any] = (
    {"tags": (torch.Tag.cudagraph_unsafe,)} if COMPILES_OPERATORS else {}
)
"""Settings of such an operator."""

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether a gradient may have another format than its weight (torch 2.10)."""

TRACES_REPLACED_WEIGHTS = torch.__version__ >= "2.5"
"""Whether a compiled model uses the weights that a hook has given it, and not those that it had
when it was compiled (torch 2.5). The setting that says so is in Dynamo, which takes a second to
import, and later versions warn of it."""

ADAM_TAKES_DECOUPLED = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
"""Whether Adam has the setting that makes it AdamW (torch 2.7)."""


@functools.cache  # a process has the same one as long as it runs
def accelerator() -> str | None:
    """The kind of accelerator that this torch is built for, None for a build for the CPU.

    Without `torch.accelerator` (torch 2.6) it is the one that there is. With it, that is not asked:
    the question can start CUDA, and then a process may not fork.
    """
    if not hasattr(torch, "accelerator"):
        there = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
        return next((kind for kind in there if there[kind].is_available()), None)
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where there is none
        return None
    return None if found is None else found.type


def untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function`, which compilers do not trace; torch says why in a graph break from 2.8 on."""
    says = "reason" in inspect.signature(torch.compiler.disable).parameters
    return torch.compiler.disable(function, **({"reason": reason} if says else {}))
