"""Which types a model is stored and computed in: casts of pytrees, with norms left in float32."""

from __future__ import annotations

import functools
import operator
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

    Parameters are stored in `params` and cast inside the function that is differentiated, so their
    gradients have that type too; in float32 the parameters are the master weights.

    In a pytree (parameters of Flax Linen, states of NNX, dictionaries, Equinox modules), everything
    below a key or a class whose name contains one of `keep` stays in `params`, and so do running
    statistics: Linen's `batch_stats`, NNX' `BatchStat` and Equinox' `State`, in float16 of which
    small changes would be lost. The layers of Equinox, Linen and NNX then compute their norms in
    float32, except for Equinox' BatchNorm, which needs an input in float32. Flax modules that are
    created with `dtype=precision.compute` cast by themselves, with norms in float32, and their
    parameters need no cast.
    """

    params: Any = "float32"
    """The type of parameters."""
    compute: Any = "float16"
    """The type of computations."""
    output: Any = "float32"
    """The type of results."""
    keep: tuple[str, ...] = ("norm",)
    """Parts of names, in lower case, of what stays in `params`."""

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
        """Returns `tree` with all floating-point leaves in the type of parameters."""
        return jax.tree.map(lambda leaf: _cast(leaf, self.params), tree)

    def cast_to_compute(self, tree: Any) -> Any:
        """Returns `tree` with floating-point leaves in the type of computations, except `keep`."""

        def kept(node: Any) -> bool:
            kind = _kind(node)
            return self._keeps(kind.__name__) or _is_state(kind)

        def cast(path: Any, node: Any) -> Any:
            keeps = kept(node) or any(self._keeps(_name(key)) for key in path)
            dtype = self.params if keeps else self.compute
            return jax.tree.map(lambda part: _cast_whole(part, dtype), node, is_leaf=_is_variable)

        return jax.tree_util.tree_map_with_path(
            cast, tree, is_leaf=lambda node: kept(node) or _is_variable(node)
        )

    def cast_to_output(self, tree: Any) -> Any:
        """Returns `tree` with all floating-point leaves in the type of results."""
        return jax.tree.map(lambda leaf: _cast(leaf, self.output), tree)

    def wrap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fun` with its arguments cast to `compute` and its result cast to `output`."""

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            cast = self.cast_to_compute
            named = {name: cast(value) for name, value in kwargs.items()}
            return self.cast_to_output(fun(*map(cast, args), **named))

        return call

    def _keeps(self, name: str) -> bool:
        return any(part in name.lower() for part in (*self.keep, *_STATISTICS))


_STATISTICS = ("batch_stats", "batchstat")
"""Linen's collection and NNX' class of running statistics, in lower case."""


def _kind(node: Any) -> type:
    """The class of `node`; that of the variable whose state it is, in Flax 0.10."""
    kind = type(node)
    return node.type if kind.__name__ == "VariableState" else kind


def _is_state(kind: type) -> bool:
    """Whether `kind` is Equinox' `State`, which has no names of what is in it."""
    return kind.__name__ == "State" and kind.__module__.startswith("equinox.")


def _is_variable(node: Any) -> bool:
    """Whether `node` is an NNX `Variable`."""
    return any(
        base.__name__ == "Variable" and base.__module__.startswith("flax.nnx")
        for base in type(node).__mro__
    )


def _cast_whole(part: Any, dtype: Any) -> Any:
    """`part`, an array or a `Variable`, in `dtype`; if nothing is cast, not a copy.

    NNX modules write statistics and counters of random numbers into their variables, which the
    caller has to see.
    """
    new = jax.tree.map(lambda leaf: _cast(leaf, dtype), part)
    same = map(operator.is_, jax.tree.leaves(new), jax.tree.leaves(part))
    return part if all(same) else new


def _cast(leaf: Any, dtype: Any) -> Any:
    """`leaf` in `dtype` if it is an array of real floating-point numbers."""
    real = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    done = not real or (isinstance(leaf, jax.Array) and leaf.dtype == dtype)
    return leaf if done else jnp.asarray(leaf, dtype=dtype)


def _name(key: Any) -> str:
    """The name of a key of a path; empty if it is a number."""
    return str(getattr(key, "key", getattr(key, "name", "")))
