"""A small Keras model and its data, for tests of fit()."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

_rng = np.random.default_rng(0)
INPUTS = _rng.normal(size=(256, 8)).astype("float32")
TARGETS = np.sin(INPUTS[:, :1]) + INPUTS[:, 1:2] * INPUTS[:, 2:3]
BATCH = 32


def model(dtype: str = "mixed_float16", units: int = 32) -> Any:
    """A perceptron, the same at every call but for its types."""
    keras.utils.set_random_seed(1)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        return keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(units, activation="gelu"),
                keras.layers.Dense(units, activation="gelu"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)


def fit(made: Any, epochs: int = 12, inputs: Any = INPUTS, **options: Any) -> Any:
    """What `fit` returns."""
    options = {"batch_size": BATCH, "verbose": 0, "shuffle": False, **options}
    return made.fit(inputs, TARGETS, epochs=epochs, **options)
