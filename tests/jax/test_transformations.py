"""A step under JAX' transformations: compiled once, nothing sent to the host, shards that agree."""

from __future__ import annotations

import math
import operator
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
from jax_trees import same

RESTLESS = gs.Dynamic(init_scale=2.0**8, growth_interval=3)
SUPPORT = Path(__file__).parents[1] / "support"
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def weights() -> dict[str, Any]:
    return {"w": jnp.linspace(-1.0, 1.0, 8).reshape(4, 2), "b": jnp.zeros(2)}


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"] + p["b"]) - 0.5))


def step_of(optimizer: Any, traces: list[int] | None = None) -> Any:
    """A step; each time that JAX traces it, a number is added to `traces`."""

    def step(p: Any, opt_state: Any, x: Any) -> Any:
        if traces is not None:
            traces.append(1)
        loss, grads = scaled_value_and_grad(loss_fn)(scale_of(opt_state), p, x)
        updates, opt_state = optimizer.update(grads, opt_state, p, value=loss)
        return optax.apply_updates(p, updates), opt_state, loss

    return step


@pytest.mark.parametrize("policy", [RESTLESS, gs.Headroom(pause=1, memory=2)], ids=["d", "h"])
def test_thousand_steps_are_traced_once_and_send_nothing_to_the_host(policy: Any) -> None:
    traces: list[int] = []
    optimizer = scaled(optax.adam(0.01), policy, clip_norm=1.0)
    step = jax.jit(step_of(optimizer, traces), donate_argnums=(0, 1))
    p, batches = weights(), [jnp.asarray(X), jnp.asarray(X).at[0, 0].set(1e30)]
    batches[1] = batches[1] * 1e30  # not finite: the scale falls
    state, scales = jax.jit(optimizer.init)(p), []
    with jax.transfer_guard("disallow"):
        for i in range(1000):
            p, state, _ = step(p, state, batches[i % 10 == 9])
            scales.append(jnp.copy(scale_of(state)))
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert len({float(scale) for scale in scales}) > 1
    text = step.lower(p, state, batches[0]).compile().as_text()
    assert "callback" not in text
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed"):
        step(p, state, np.asarray(X))  # which would have to be sent


def test_donated_buffers_are_used_and_change_nothing() -> None:
    optimizer = scaled(optax.adam(0.1), RESTLESS)
    kept, given = jax.jit(step_of(optimizer)), jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    p, state = weights(), optimizer.init(weights())
    q, other = jax.tree.map(jnp.copy, (p, state))
    for _ in range(3):  # warnings are errors: every buffer is used
        p, state, _ = kept(p, state, X)
        before = q["w"]
        q, other, _ = given(q, other, X)
        assert before.is_deleted()
    assert same((p, state), (q, other))


# Several devices. One of four shards has an overflow: all skip.

MESH = PartitionSpec("batch")
POISON = np.where(np.arange(8)[:, None] == 5, np.inf, X).astype(np.float32)


def mesh(name: str = "batch") -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), (name,))


def whole(x: Any) -> Any:
    """Parameters and state after one step of one device."""
    state = init(RESTLESS)
    (_, grads), stats = jax.jit(value_and_grad(loss_fn, RESTLESS))(state, weights(), x)
    new = jax.tree.map(lambda p, g: p - g, weights(), grads)
    stats = stats._replace(loss_finite=True)  # a bad input has an infinite loss as well
    return select(applies(stats), new, weights()), update(RESTLESS, state, stats)


def shard_step(p: Any, state: Any, x: Any) -> Any:
    """The same step of a shard."""
    (_, grads), stats = value_and_grad(loss_fn, RESTLESS, axis_name="batch")(state, p, x)
    new = jax.tree.map(lambda p, g: p - g, p, grads)
    stats = stats._replace(loss_finite=True)
    return select(applies(stats), new, p), update(RESTLESS, state, stats)


def near(a: Any, b: Any) -> bool:
    """Whether numbers are the same up to the order of a sum of 8 float32 numbers."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, rtol=8 * 2.0**-24, atol=8 * 2.0**-24) for x, y in pairs)


def test_nearness_finds_a_sum_in_place_of_a_mean() -> None:
    assert near(weights(), weights())
    assert not near(weights(), jax.tree.map(lambda w: w * (1 + 1e-5), weights()))


@pytest.mark.parametrize("x", [X, POISON], ids=["good", "bad"])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_shards_of_shard_map_step_as_one_device(x: Any, check: bool) -> None:
    specs = {"in_specs": (PartitionSpec(), PartitionSpec(), MESH)}
    outs = PartitionSpec() if check else MESH
    # Unchecked, every shard returns what it has, so that all can be compared.
    lift = (lambda tree: tree) if check else lambda tree: jax.tree.map(lambda v: v[None], tree)
    step = jax.shard_map(
        lambda *args: lift(shard_step(*args)), mesh=mesh(), out_specs=outs, check_vma=check, **specs
    )
    found = jax.jit(step)(weights(), init(RESTLESS), x)
    if not check:
        first, *others = (jax.tree.map(operator.itemgetter(i), found) for i in range(4))
        assert all(same(other, first) for other in others)
        found = first
    assert near(found, whole(x))
    assert float(found[1].scale) == 2.0 ** (8 if x is X else 7)


def test_devices_of_pmap_step_as_one() -> None:
    step = jax.pmap(shard_step, axis_name="batch", in_axes=(None, None, 0))
    p, state = step(weights(), init(RESTLESS), X.reshape(4, 2, 4))
    assert near(jax.tree.map(lambda v: v[3], (p, state)), whole(X))
    p, state = step(weights(), init(RESTLESS), POISON.reshape(4, 2, 4))
    assert state.scale.tolist() == [2.0**7] * 4
    assert same(jax.tree.map(lambda v: v[0], p), weights())


@pytest.mark.parametrize("x", [X, POISON], ids=["good", "bad"])
def test_members_of_vmap_with_an_axis_step_as_one_device(x: Any) -> None:
    step = jax.jit(jax.vmap(shard_step, axis_name="batch", in_axes=(None, None, 0)))
    found = step(weights(), init(RESTLESS), x.reshape(4, 2, 4))
    assert near(jax.tree.map(lambda v: v[2], found), whole(x))


def test_shards_with_parameters_of_their_own_share_statistics() -> None:
    # Each of four shards has a quarter of a vector of weights.
    policy = gs.Headroom()
    optimizer = scaled(optax.sgd(1.0), policy, clip_norm=1.0, sharded_over="model")

    def step(w: Any, state: Any, g: Any) -> Any:
        updates, state = optimizer.update({"w": g}, state, {"w": w})
        return w + updates["w"], state

    split = PartitionSpec("model")
    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh("model"),
            in_specs=(split, PartitionSpec(), split),
            out_specs=(split, PartitionSpec()),
        )
    )
    w, scale = jnp.zeros(8), policy.init_scale
    state = optimizer.init({"w": w})
    g = jnp.arange(1.0, 9.0)
    after, state = sharded(w, state, g * scale)
    norm = math.sqrt(sum(i * i for i in range(1, 9)))
    assert float(outcome_of(state).amax) == 8 * scale
    np.testing.assert_allclose(float(outcome_of(state).grad_norm), norm, rtol=1e-6)
    np.testing.assert_allclose(after, -np.arange(1, 9) / norm, rtol=1e-6)
    again, state = sharded(after, state, g.at[6].set(jnp.nan))
    assert same(np.asarray(again), np.asarray(after))
    assert not bool(outcome_of(state).applied)


def test_automatic_sharding_over_a_mesh_needs_nothing() -> None:
    grid = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("batch", "model"))
    place = lambda *names: NamedSharding(grid, PartitionSpec(*names))  # noqa: E731
    optimizer = scaled(optax.adam(0.1), RESTLESS, clip_norm=1.0)
    step = jax.jit(step_of(optimizer))
    p = weights()
    q = {"w": jax.device_put(p["w"], place(None, "model")), "b": jax.device_put(p["b"], place())}
    state, other = optimizer.init(p), jax.jit(optimizer.init)(q)
    for x in (X, POISON, X):
        p, state, _ = step(p, state, x)
        q, other, _ = step(q, other, jax.device_put(x, place("batch", None)))
        # Adam divides by a root of squares: small differences of gradients count for more.
        assert np.allclose(p["w"], q["w"], atol=1e-5)
        assert float(scale_of(state)) == float(scale_of(other))
    assert q["w"].sharding.spec == PartitionSpec(None, "model")
    assert int(other.inner_state[0].count) == 2


def test_two_processes_agree() -> None:
    """Each has half of the batch, and the second one an overflow in its half at the third step."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = [sys.executable, "-W", "error", str(SUPPORT / "jax_ranks.py"), address]
    ranks = [
        subprocess.Popen([*script, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    lines = [out.decode().splitlines() for out, _ in told]
    first, second = ([line for line in each if "Gloo" not in line] for each in lines)
    assert first == second
    assert [line.split()[:2] for line in first] == [
        ["True", "256.0"], ["True", "256.0"], ["False", "256.0"], ["True", "128.0"],
    ]  # fmt: skip
