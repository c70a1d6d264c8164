"""Equinox with the pure functions value_and_grad, select and update: an ensemble under vmap.

Modules are pytrees. Their arrays are cast to float16 inside the loss, except for those of
LayerNorm, and the float32 arrays outside are the master weights. Three members train at once under
vmap, and every member has its own scale.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import gradscale as gs
from gradscale.jax import Precision, applies, init, select, update, value_and_grad

STEPS = 100
MEMBERS = 3
POLICY = gs.Headroom()
PRECISION = Precision(compute="float16")


class Network(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(8, 32, key=keys[0])
        self.norm = eqx.nn.LayerNorm(32)
        self.second = eqx.nn.Linear(32, 1, key=keys[1])

    def __call__(self, x: Any) -> Any:
        # The norm computes in float32; its result is cast to the type of the input.
        hidden = self.norm(jnp.tanh(self.first(x))).astype(x.dtype)
        return self.second(hidden)


def main() -> None:
    networks = eqx.filter_vmap(Network)(jax.random.split(jax.random.key(0), MEMBERS))
    params, rest = eqx.partition(networks, eqx.is_inexact_array)
    optimizer = optax.adamw(0.02)

    @PRECISION.wrap
    def loss_fn(params: Any, inputs: Any, targets: Any) -> Any:
        outputs = jax.vmap(eqx.combine(params, rest))(inputs)
        return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets.astype(jnp.float32)))

    def step(params: Any, opt_state: Any, state: Any, inputs: Any, targets: Any) -> Any:
        (loss, grads), stats = value_and_grad(loss_fn, POLICY)(state, params, inputs, targets)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = eqx.apply_updates(params, updates), new_opt_state
        params, opt_state = select(applies(stats), new, (params, opt_state))
        return params, opt_state, update(POLICY, state, stats), loss

    ensemble = eqx.filter_jit(jax.vmap(step, in_axes=(0, 0, 0, None, None)))
    opt_state = jax.vmap(optimizer.init)(params)
    states = jax.vmap(lambda _: init(POLICY))(jnp.arange(MEMBERS))
    losses = []
    for key in jax.random.split(jax.random.key(1), STEPS):
        inputs = jax.random.normal(key, (64, 8))
        targets = jnp.sum(inputs, axis=1, keepdims=True)
        params, opt_state, states, loss = ensemble(params, opt_state, states, inputs, targets)
        losses.append(loss)

    for member in range(MEMBERS):
        scale = float(states.scale[member])
        begin, end = float(losses[0][member]), float(losses[-1][member])
        print(f"member {member}: loss {begin:.3g} -> {end:.3g}, scale {scale:g}")
        if not end < 0.1 * begin:
            raise SystemExit("A member has not learned.")
    if {leaf.dtype.name for leaf in jax.tree.leaves(params)} != {"float32"}:
        raise SystemExit("The master weights should be float32.")


if __name__ == "__main__":
    main()
