"""Which types a model is stored and computed in: casts of pytrees, with norms left in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradscale.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The types of parameters, of computations and of results.

        precision = Precision(compute="float16")
        loss_fn = precision.wrap(loss_fn)          # loss_fn(params, batch)

    Parameters are kept in `params` and cast inside the function that is differentiated. So their
    gradients come back in that type, and with float32 they are the master weights.

    In a pytree (parameters of Flax Linen, states of NNX, plain dictionaries, Equinox modules) all
    below a key or a class whose name contains one of `keep` stays in `params`: the layers of
    Equinox, Linen and NNX compute their norms in float32 then. Flax modules cast by themselves,
    norms in float32 included, where they are built with `dtype=precision.compute`; then their
    parameters need no cast.
    """

    params: Any = "float32"
    compute: Any = "float16"
    output: Any = "float32"
    keep: tuple[str, ...] = ("norm",)
    """Parts of names, in lower case."""

    def __post_init__(self) -> None:
        for name in ("params", "compute", "output"):
            value = getattr(self, name)
            try:
                dtype = None if value is None else jnp.dtype(value)  # numpy's default is float64
            except TypeError:
                dtype = None
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise SettingError(f"{name} must be a floating-point type, got {value!r}.")
            object.__setattr__(self, name, dtype)
        if not isinstance(self.keep, tuple):
            raise SettingError(f"keep must be a tuple of strings, got {self.keep!r}.")

    def cast_to_params(self, tree: Any) -> Any:
        """`tree` with all floating-point leaves in the type of parameters."""
        return jax.tree.map(lambda leaf: _cast(leaf, self.params), tree)

    def cast_to_compute(self, tree: Any) -> Any:
        """`tree` with floating-point leaves in the type of computations, but for what is kept."""

        def cast(path: Any, node: Any) -> Any:
            if self._keeps(type(node).__name__) or any(self._keeps(_name(key)) for key in path):
                return jax.tree.map(lambda leaf: _cast(leaf, self.params), node)
            return _cast(node, self.compute)

        kept = lambda node: self._keeps(type(node).__name__)  # noqa: E731
        return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=kept)

    def cast_to_output(self, tree: Any) -> Any:
        """`tree` with all floating-point leaves in the type of results."""
        return jax.tree.map(lambda leaf: _cast(leaf, self.output), tree)

    def wrap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` with its arguments cast to the type of computations, and its result to its own."""

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            cast = self.cast_to_compute
            named = {name: cast(value) for name, value in kwargs.items()}
            return self.cast_to_output(fun(*map(cast, args), **named))

        return call

    def _keeps(self, name: str) -> bool:
        return any(part in name.lower() for part in self.keep)


def _cast(leaf: Any, dtype: Any) -> Any:
    """`leaf` in `dtype` if it is an array of real floating-point numbers."""
    real = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.asarray(leaf, dtype=dtype) if real else leaf


def _name(key: Any) -> str:
    """The name of a key of a path; empty if it is a number."""
    return str(getattr(key, "key", getattr(key, "name", "")))
