"""DynamicScale over several devices: `axis_name`, and what XLA partitions by itself."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import functools, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from gradscale.compat.flax import DynamicScale

mesh = Mesh(np.asarray(jax.devices()), ("batch",))
shard_map = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map

def step(dynamic_scale, weight, batch, axis_name=None):
    def loss_fn(weight):
        return jnp.mean(batch * weight)
    moved, finite, loss, grad = dynamic_scale.value_and_grad(loss_fn, axis_name=axis_name)(weight)
    return moved, finite, grad

mapped = functools.partial(step, axis_name="batch")

def by_pmap(dynamic_scale, weight, batch):
    split = jnp.asarray(batch).reshape(4, 2)
    found = jax.pmap(mapped, "batch", in_axes=(None, None, 0))(dynamic_scale, weight, split)
    for leaf in jax.tree.leaves(found):  # the members agree
        np.testing.assert_array_equal(leaf, np.full(4, leaf[0]))
    return jax.tree.map(lambda leaf: leaf[0], found)

stepped = {"pmap": by_pmap, "automatic": jax.jit(step)}
start = DynamicScale(scale=2.0**10, growth_interval=1, fin_steps=0)
weight = jnp.float32(1)
batch = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("batch")))
for name, run in stepped.items():
    moved, finite, grad = run(start, weight, batch)
    assert (bool(finite), float(grad), float(moved.scale)) == (True, 3.5, 2.0**11), name
    # One member's gradient overflows by the scale, 2**125 * 2**10; the loss does not.
    big = batch.at[7].set(2.0**125)
    moved, finite, grad = run(start, weight, big)
    assert (bool(finite), float(moved.scale)) == (False, 2.0**9), name
    # One member's loss is not finite: no member moves its scale.
    moved, finite, grad = run(start, weight, batch.at[7].set(jnp.nan))
    assert (bool(finite), float(moved.scale), int(moved.fin_steps)) == (False, 2.0**10, 0), name

# Each member its own scale, and gradients of its own.
own = jax.jit(
    shard_map(
        lambda scale, weight, batch: DynamicScale(scale=scale[0])
        .value_and_grad(lambda weight: jnp.sum(weight * batch))(weight)
        .dynamic_scale.scale[None],
        mesh=mesh,
        in_specs=(P("batch"), P("batch"), P("batch")),
        out_specs=P("batch"),
    )
)
starts, steep = [2.0**4, 2.0**4, 2.0**5, 2.0**6], [1.0, 2.0**125, 1.0, 1.0]
scales = own(jnp.asarray(starts), jnp.ones(4), jnp.asarray(steep))
assert scales.tolist() == [2.0**4, 2.0**3, 2.0**5, 2.0**6], scales
print("done")
"""


def test_members_decide_together() -> None:
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, env={**os.environ, **four}, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
