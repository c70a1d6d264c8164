"""Flax NNX with the optax wrapper, a run log and a checkpoint.

The log is written by an optional callback on the host, and read by `gradscale report`. The scale is
saved as plain numbers, which the PyTorch engine can load as well.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gradscale as gs
from gradscale.jax import (
    Monitor,
    load_state_dict,
    scale_of,
    scaled,
    scaled_value_and_grad,
    state_dict,
)
from gradscale.runlog import read

STEPS = 100


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        # Flax casts: weights are float32, matrix products float16, and norms compute in float32.
        self.first = nnx.Linear(8, 32, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.LayerNorm(32, dtype=jnp.float16, rngs=rngs)
        self.second = nnx.Linear(32, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.norm(jnp.tanh(self.first(x))))


def main() -> None:
    graph, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    policy = gs.Headroom()
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(policy, Path(folder) / "run")
        optimizer = scaled(optax.adamw(0.02), policy, clip_norm=1.0, on_step=monitor)

        def loss_fn(params: Any, inputs: Any) -> Any:
            outputs = nnx.merge(graph, params)(inputs).astype(jnp.float32)
            return jnp.mean(jnp.square(outputs - jnp.sum(inputs, axis=1, keepdims=True)))

        @jax.jit
        def step(params: Any, opt_state: Any, inputs: Any) -> Any:
            loss, grads = scaled_value_and_grad(loss_fn)(scale_of(opt_state), params, inputs)
            updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
            return optax.apply_updates(params, updates), opt_state, loss

        opt_state = optimizer.init(params)
        losses = []
        for key in jax.random.split(jax.random.key(1), STEPS):
            inputs = jax.random.normal(key, (64, 8))
            params, opt_state, loss = step(params, opt_state, inputs)
            losses.append(loss)
        monitor.close()
        logged = read(Path(folder) / "run")

    saved = json.dumps(state_dict(policy, opt_state))
    fresh = load_state_dict(policy, optimizer.init(params), json.loads(saved))
    print(f"loss {float(losses[0]):.3g} -> {float(losses[-1]):.3g}")
    print(f"scale {float(scale_of(fresh)):g}, saved in {len(saved)} bytes of JSON")
    print(f"{len(logged.steps)} steps in the log, events {monitor.history}")

    if not losses[-1] < 0.1 * losses[0] or len(logged.steps) != STEPS:
        raise SystemExit("The network has not learned, or not all steps were logged.")
    if float(scale_of(fresh)) != float(scale_of(opt_state)):
        raise SystemExit("The scale was not restored.")


if __name__ == "__main__":
    main()
