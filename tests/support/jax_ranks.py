"""One of two processes that train together; prints what its steps did.

Its arguments are the address of the first one, and its own number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradscale as gs
from gradscale.jax import outcome_of, scale_of, scaled, scaled_value_and_grad


def main(address: str, rank: int) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    optimizer = scaled(optax.sgd(0.1), gs.Dynamic(init_scale=256.0), clip_norm=1.0)

    def loss_fn(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(x @ w - 1.0))

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        _, grads = scaled_value_and_grad(loss_fn)(scale_of(state), w, x)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.zeros(3)
    state = optimizer.init(w)
    for number in range(4):
        mine = np.full((2, 3), rank + 1.0, np.float32)
        if number == 2 and rank == 1:
            mine[0, 0] = np.inf
        sharding = NamedSharding(mesh, PartitionSpec("batch"))
        x = jax.make_array_from_process_local_data(sharding, mine)
        w, state = step(w, state, x)
        outcome = outcome_of(state)
        print(bool(outcome.applied), float(outcome.scale), w.tolist(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
