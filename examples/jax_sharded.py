"""Data sharded over four devices, in both ways of JAX: automatically over a mesh, and by shard_map.

Without accelerators, four virtual CPU devices are used. At step 10 one device has an overflow in
its part of the batch: all devices skip that step, and the scale stays the same on all of them.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import gradscale as gs
from gradscale.jax import (
    applies,
    init,
    outcome_of,
    scale_of,
    scaled,
    scaled_value_and_grad,
    select,
    update,
    value_and_grad,
)

STEPS = 60
BAD_STEP = 10
POLICY = gs.Dynamic(init_scale=2.0**12, growth_interval=20)


def loss_fn(params: Any, inputs: Any) -> Any:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    outputs = jnp.tanh(inputs.astype(jnp.float16) @ half["w1"]) @ half["w2"]
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - jnp.sum(inputs, 1, keepdims=True)))


def main() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("batch",))
    shared, split = PartitionSpec(), PartitionSpec("batch")
    keys = jax.random.split(jax.random.key(0), 2 + STEPS)
    params = {"w1": jax.random.normal(keys[0], (8, 32)) / 3, "w2": jnp.zeros((32, 1))}
    params = jax.device_put(params, NamedSharding(mesh, shared))

    # 1. Automatic: jit partitions the computation by the placement of the arrays.
    optimizer = scaled(optax.sgd(0.1), POLICY)

    @jax.jit
    def step(params: Any, opt_state: Any, inputs: Any) -> Any:
        _, grads = scaled_value_and_grad(loss_fn)(scale_of(opt_state), params, inputs)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # 2. Manual: axis_name averages the gradients and combines the overflow flags over the shards.
    def shard_step(params: Any, state: Any, inputs: Any) -> Any:
        differentiate = value_and_grad(loss_fn, POLICY, axis_name="batch")
        (_, grads), stats = differentiate(state, params, inputs)
        stats = stats._replace(loss_finite=True)  # as above, where no loss is given
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return select(applies(stats), new, params), update(POLICY, state, stats)

    specs = (shared, shared, split)
    by_hand = jax.jit(jax.shard_map(shard_step, mesh=mesh, in_specs=specs, out_specs=shared))

    ours, opt_state = params, optimizer.init(params)
    theirs, state = params, init(POLICY)
    skipped = []
    for number, key in enumerate(keys[2:]):
        inputs = np.array(jax.random.normal(key, (64, 8)))
        if number == BAD_STEP:
            inputs[50] = np.inf  # on the last device
        placed = jax.device_put(inputs, NamedSharding(mesh, split))
        ours, opt_state = step(ours, opt_state, placed)
        theirs, state = by_hand(theirs, state, placed)
        if not outcome_of(opt_state).applied:
            skipped.append(number)

    first, last = (float(loss_fn(p, jax.random.normal(keys[2], (64, 8)))) for p in (params, ours))
    scales = {float(shard.data) for shard in state.scale.addressable_shards}
    print(f"loss {first:.3g} -> {last:.3g} on {len(state.scale.addressable_shards)} devices")
    print(f"skipped {skipped}, scale {float(scale_of(opt_state)):g}, by hand {scales}")
    if skipped != [BAD_STEP] or scales != {float(scale_of(opt_state))} or not last < 0.1 * first:
        raise SystemExit("The devices have different scales, or the network has not learned.")
    if not np.allclose(ours["w1"], theirs["w1"], atol=1e-3):
        raise SystemExit("The results of the two ways differ.")


if __name__ == "__main__":
    main()
