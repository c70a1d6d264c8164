"""Steps of a Keras optimizer as is usual with the backend: compiled where it can be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import pytest

from gradscale.keras import LossScaleOptimizer
from gradscale.policy import GradStats

BACKEND = keras.backend.backend()


def quick(items: Iterable[Any], count: int) -> list[Any]:
    """`items` as parameters. With JAX, which compiles for each, only `count` of them always run."""
    items = list(items)
    if BACKEND != "jax":
        return items
    return items[:count] + [pytest.param(item, marks=pytest.mark.soak) for item in items[count:]]


def array(value: Any) -> Any:
    """A tensor or variable as a NumPy array."""
    return keras.ops.convert_to_numpy(keras.ops.copy(value)).copy()


def arrays(variables: Iterable[Any]) -> list[Any]:
    """The values of variables."""
    return [array(variable) for variable in variables]


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two lists of arrays are the same to the bit."""
    pairs = zip(first, second, strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


class Steps:
    """Applies gradients to variables by `optimizer`: compiled, or one operation after the other."""

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], *, compiled: bool = True, loss: bool = False
    ) -> None:
        self.optimizer, self.variables = optimizer, list(variables)
        self._loss = loss
        optimizer.build(self.variables)
        self._step = self._plainly
        if compiled and BACKEND == "jax":
            import jax

            self._pure = jax.jit(self._stateless)
            self._step = self._purely
        elif compiled and BACKEND == "tensorflow":
            import tensorflow as tf

            self._step = tf.function(self._plainly)

    def __call__(self, gradients: Sequence[Any], loss: float = 1.0) -> None:
        tensors = [keras.ops.convert_to_tensor(each) for each in gradients]
        self._step(tensors, keras.ops.convert_to_tensor(loss, "float32"))

    def _plainly(self, gradients: Any, loss: Any) -> None:
        more = {"loss": loss} if self._loss else {}
        self.optimizer.apply(gradients, self.variables, **more)

    def _stateless(self, values: Any, gradients: Any, weights: Any, loss: Any) -> Any:
        more = {"loss": loss} if self._loss else {}
        return self.optimizer.stateless_apply(values, gradients, weights, **more)

    def _purely(self, gradients: Any, loss: Any) -> None:
        weights = [variable.value for variable in self.variables]
        values = [variable.value for variable in self.optimizer.variables]
        weights, values = self._pure(values, gradients, weights, loss)
        for variable, value in zip(self.variables, weights, strict=True):
            variable.assign(value)
        for variable, value in zip(self.optimizer.variables, values, strict=True):
            variable.assign(value)


def plain_stats(gradients: Sequence[Any], *, loss: float = 1.0, fits: bool = True) -> GradStats:
    """What a policy is given of float32 gradients, in plain numbers."""
    flat = np.concatenate([np.ravel(each) for each in gradients])
    finite = bool(np.isfinite(flat).all())
    amax = float(np.abs(flat).max()) if finite else math.inf
    exponent = math.frexp(amax)[1] if finite else 0
    return GradStats(
        finite=finite, amax=amax, exponent=exponent, loss_finite=math.isfinite(loss), fits=fits
    )


def state_of(optimizer: LossScaleOptimizer) -> Any:
    """The state of the policy, as plain numbers."""
    state, _ = optimizer._layout.read(optimizer._values())
    return type(state)(*(array(value).item() for value in state))


def scale_of(optimizer: Any) -> float:
    """The scale."""
    return float(array(optimizer.dynamic_scale))
