"""Keras: `fit` in mixed_float16 with gradscale's LossScaleOptimizer, on any backend.

One batch of every epoch overflows: its step is skipped, the scale is lowered, and the callback
counts it. The environment variable KERAS_BACKEND selects tensorflow, jax or torch.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import gradscale as gs
from gradscale.keras import LossScaleOptimizer, Monitor

EPOCHS = 8
BATCH = 32


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(256, 8)).astype("float32")
    targets = np.sin(inputs[:, :1]) + inputs[:, 1:2]
    inputs[5 * BATCH] = 1e6  # infinite in float16
    return inputs, targets


def network() -> Any:
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(1, dtype="float32"),  # so that the loss is float32
        ]
    )


def main() -> None:
    # The conversion to NumPy in Keras 3.15 triggers a deprecation warning of NumPy.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    inputs, targets = data()
    model = network()
    policy = gs.Dynamic(growth_interval=100)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-2), policy=policy, clip_norm=5.0)
    model.compile(optimizer, loss="mse")

    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(Path(folder) / "run")  # `gradscale report` reads it
        options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
        history = model.fit(inputs, targets, callbacks=[monitor], **options).history
        monitor.close()

    # The mean loss of an epoch in Keras includes the infinite loss.
    fine = np.delete(np.arange(len(inputs)), 5 * BATCH)
    loss = model.evaluate(inputs[fine], targets[fine], verbose=0)
    print(f"backend {keras.backend.backend()}, loss {loss:.3g}")
    for epoch in range(EPOCHS):
        scale, skipped = history["scale"][epoch], history["skipped"][epoch]
        print(f"epoch {epoch}: scale {scale:g}, skipped {skipped}")

    if history["skipped"] != [1] * EPOCHS:
        raise SystemExit("One step in every epoch should have been skipped.")
    if not loss < 0.2:
        raise SystemExit("The network has not learned.")


if __name__ == "__main__":
    main()
