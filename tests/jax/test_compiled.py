"""What the compiled step is made of: gradients are read to be measured and to step, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _jax_models as models
import jax
import jax.numpy as jnp
import optax
import pytest

import gradscale as gs
from gradscale.jax import scaled

ROOT = Path(__file__).parents[2]
SHAPE = (64, 128)
fused = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="XLA fuses less before jax 0.10.2 (0.10.0 was run)"
)


def compiled(optimizer: Any) -> str:
    """The program of a step of `optimizer`."""
    params = {"w": jnp.zeros(SHAPE)}

    def step(g: Any, state: Any, p: Any) -> Any:
        updates, state = optimizer.update(g, state, p)
        return optax.apply_updates(p, updates), state

    state = jax.eval_shape(optimizer.init, params)
    return jax.jit(step).lower(params, state, params).compile().as_text()


def readers(program: str) -> list[str]:
    """What a program does with the gradient."""
    (found,) = models.readers(program, SHAPE).values()
    return found


def naive(g: Any, state: Any, p: Any = None) -> Any:
    """Unscales, checks and clips one after the other."""
    g = jax.tree.map(lambda leaf: jax.lax.optimization_barrier(leaf / state), g)
    finite = jnp.all(jnp.isfinite(g["w"]))
    factor = jnp.minimum(1.0 / optax.tree.norm(g), 1.0)
    return jax.tree.map(lambda leaf: jnp.where(finite, leaf * factor, 0.0), g), state


@fused
@pytest.mark.parametrize(
    "policy",
    [gs.Dynamic(), gs.Headroom(), gs.Headroom(format="bfloat16")],
    ids=["dynamic", "headroom", "bfloat16"],
)
def test_gradients_are_reduced_as_they_are_and_nothing_of_their_size_is_stored(policy: Any) -> None:
    inner = optax.sgd(0.1, momentum=0.9)
    assert "reduce" not in readers(compiled(inner))
    program = compiled(scaled(inner, policy, clip_norm=1.0))
    # Maximum, minimum and sum of squares: one kernel on a GPU, three loops on a CPU.
    assert readers(program).count("reduce") <= 3
    # The parameters and the momentum, as without scaling.
    assert models.stored(program, SHAPE) == models.stored(compiled(inner), SHAPE) == 2


@fused
def test_array_that_is_stored_in_between_is_found() -> None:
    program = compiled(optax.GradientTransformation(lambda p: jnp.float32(8), naive))
    assert readers(program) == ["array"]  # the reductions read that, not the gradient
    assert models.stored(program, SHAPE) > 1
    assert readers(compiled(optax.clip_by_global_norm(1.0))).count("reduce") == 1


@pytest.mark.gpu
def test_gradients_are_read_once_on_a_gpu() -> None:
    program = "import json, jax_step; print(json.dumps(jax_step.passes()))"
    env = {**os.environ, "JAX_PLATFORMS": "cuda", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    del env["XLA_FLAGS"]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    reduced, stepped = json.loads(done.stdout.splitlines()[-1])
    assert reduced == 1
    assert stepped == 1
