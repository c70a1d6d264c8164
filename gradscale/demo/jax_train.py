"""The runs of the demo with the JAX engine: the same network, first weights and batches.

torch's GradScaler cannot scale for JAX, so its two runs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import Tensor

from gradscale.demo.train import (
    LEARNING_RATE,
    PROBE_EVERY,
    RUNS,
    Run,
    Step,
    batches,
    build,
    check,
    compare,
)
from gradscale.errors import SettingError
from gradscale.jax import outcome_of, scale_of, scaled, scaled_value_and_grad

JAX_RUNS = tuple(run for run in RUNS if run.policy is not None)
DECAY = 1e-2
"""The weight decay that torch's AdamW has by default."""
EXACTLY = {"xla_allow_excess_precision": False}
"""Else XLA leaves out roundings to float16 on the CPU, and the run without a scale would learn."""


def redraw(weights: Any, images: Any) -> Any:
    """The loss of the network with `weights`, computed in their format up to the pixels."""
    drawn = images.astype(weights[0].dtype)
    for i in range(0, len(weights), 2):
        drawn = drawn @ weights[i].T + weights[i + 1]
        if i < len(weights) - 2:
            drawn = jax.nn.sigmoid(drawn)
    return jnp.mean(jnp.square(drawn.astype(jnp.float32) - images))


def train(run: Run, images: Tensor, steps: int, seed: int) -> Iterator[Step]:
    """Trains a new network on `images` and yields every step as it is taken."""
    check(steps, seed)
    if run.policy is None:
        raise SettingError(f"run must have a policy of gradscale to train in JAX, got {run.name}.")
    dtype = jnp.float16 if run.dtype is torch.float16 else jnp.float32
    masters = [jnp.asarray(weight.detach().numpy()) for weight in build(seed).parameters()]
    optimizer = scaled(optax.adamw(LEARNING_RATE, weight_decay=DECAY), run.policy)
    opt_state = optimizer.init(masters)

    def cast(weights: Any) -> Any:
        return [weight.astype(dtype) for weight in weights]

    def step(masters: Any, opt_state: Any, batch: Any) -> Any:
        differentiate = scaled_value_and_grad(lambda weights: redraw(cast(weights), batch))
        loss, grads = differentiate(scale_of(opt_state), masters)
        updates, opt_state = optimizer.update(grads, opt_state, masters, value=loss)
        empty = ~jnp.stack([grad.any() for grad in grads]).any()
        return optax.apply_updates(masters, updates), opt_state, loss, empty

    def probe(masters: Any, scale: Any, batch: Any) -> Any:
        """The gradients of the weights that compute, scaled, and of the masters."""
        _, halves = scaled_value_and_grad(redraw)(scale, cast(masters), batch)
        return halves, jax.grad(redraw)(masters, batch)

    compiled = jax.jit(step, compiler_options=EXACTLY)
    compiled_probe = jax.jit(probe, compiler_options=EXACTLY)
    for index, images_of_step in enumerate(batches(run, images, steps, seed)):
        batch = jnp.asarray(images_of_step.numpy())
        found = None
        if run.dtype is torch.float16 and index % PROBE_EVERY == 0:
            found = compiled_probe(masters, scale_of(opt_state), batch)
        masters, opt_state, loss, empty = compiled(masters, opt_state, batch)
        outcome = outcome_of(opt_state)
        lost = None
        if found is not None and bool(outcome.applied):
            # Copies, because torch warns of memory that it must not write to.
            lost = compare(*([torch.tensor(jax.device_get(g)) for g in some] for some in found))
        yield Step(float(loss), float(outcome.scale), bool(outcome.applied), bool(empty), lost)
