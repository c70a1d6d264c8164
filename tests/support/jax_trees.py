"""Comparison of pytrees."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def same(a: Any, b: Any) -> bool:
    """Whether two pytrees have the same structure, types and bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    arrays = (map(np.asarray, jax.tree.leaves(tree)) for tree in (a, b))
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(*arrays, strict=True)
    )
