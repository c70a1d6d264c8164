"""JAX with optax: one wrapper around the optimizer unscales, checks, clips, steps or skips.

The network computes in float16 and its weights are float32. The batch of step 30 overflows: the
step is skipped, and the moments and the schedule of the optimizer stay as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradscale as gs
from gradscale.jax import Precision, outcome_of, scale_of, scaled, scaled_value_and_grad

STEPS = 100
BAD_STEP = 30


def first_weights(key: Any) -> dict[str, Any]:
    keys = jax.random.split(key)
    return {
        "w1": jax.random.normal(keys[0], (8, 32)) / 8**0.5,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(keys[1], (32, 1)) / 32**0.5,
    }


@Precision(compute="float16").wrap
def loss_fn(params: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    error = hidden @ params["w2"] - targets
    # In float32, because the mean of squares of float16 numbers can overflow float16.
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


def main() -> None:
    policy = gs.Dynamic(init_scale=2.0**12, growth_interval=20)
    rate = optax.cosine_decay_schedule(0.03, STEPS)
    optimizer = scaled(optax.adamw(rate), policy, clip_norm=1.0)

    # The scale is an array in the state, so a change of the scale does not recompile the step.
    @jax.jit
    def step(params: Any, opt_state: Any, inputs: Any, targets: Any) -> Any:
        differentiate = scaled_value_and_grad(loss_fn)
        loss, grads = differentiate(scale_of(opt_state), params, inputs, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = first_weights(jax.random.key(0))
    opt_state = optimizer.init(params)
    losses = []
    for number, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
        inputs = jax.random.normal(key, (64, 8))
        targets = jnp.sum(inputs, axis=1, keepdims=True) * (3000.0 if number == BAD_STEP else 1.0)
        params, opt_state, loss = step(params, opt_state, inputs, targets)

        # Reading an outcome waits for the device; a real loop does so only occasionally.
        outcome = outcome_of(opt_state)
        if outcome.applied:
            losses.append(float(loss))
        else:
            print(f"step {number} skipped at scale {float(outcome.scale):g}, loss {loss:.3g}")

    moved = int(opt_state.inner_state[0].count)  # of Adam
    print(f"{len(losses)} of {STEPS} steps applied, loss {losses[0]:.3g} -> {losses[-1]:.3g}")
    print(f"scale {float(scale_of(opt_state)):g}")

    if len(losses) != STEPS - 1 or moved != len(losses):
        raise SystemExit("The wrong steps were skipped or counted.")
    if not losses[-1] < 0.1 * losses[0]:
        raise SystemExit("The network has not learned.")


if __name__ == "__main__":
    main()
