"""A CUDA graph without CUDA: operations that are recorded once, and run again without Python.

As in a real graph, every tensor that was made in the capture stays where it is and is written anew
by every replay, and what Python decided in the capture is decided for good. Other than in a real
one, the operations also run in the capture: it is the first replay.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscale.torch.grads import dispatch


class CpuGraph(TorchDispatchMode):
    """Captures what runs in its `with` block, where gradscale takes the CPU for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> CpuGraph:
        for name, module in list(sys.modules.items()):
            if name.startswith("gradscale.torch"):
                for question, answer in (("capturing", True), ("readable", False)):
                    if hasattr(module, question):
                        self._patches.setattr(module, question, lambda *_, told=answer: told)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("A value was read while a graph was captured.")
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, _tensors(made)))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        """Runs all of it once more, on the very same tensors."""
        for func, args, kwargs, made in self._calls:
            again = _tensors(func(*args, **kwargs))
            for old, new in zip(made, again, strict=True):
                if old.data_ptr() != new.data_ptr():  # else it was in place, or a view
                    old.copy_(new)


def _tensors(made: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def keep_in_tensors(scaler: Any) -> None:
    """Has a new scaler on the CPU keep its state in tensors, as on a GPU, and use no kernels."""
    with dispatch.use("triton"):
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
