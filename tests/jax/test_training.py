"""Models of four kinds train in float16 as in float32; without a scale they do not.

The loss is so small that float16 has no gradients of it, as those of a deep network can be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import gradscale as gs
from gradscale.jax import Precision, scale_of, scaled, scaled_value_and_grad

STEPS, SEEDS = 50, 4
SMALL = 2.0**-32
X = jax.random.normal(jax.random.key(1), (32, 4))
Y = jnp.sin(jnp.sum(X, axis=1, keepdims=True))
Model = tuple[Any, Callable[[Any, Any], Any]]
"""Parameters, and the function of them and of inputs."""


def plain() -> Model:
    keys = jax.random.split(jax.random.key(0))
    w = {
        "w1": 0.5 * jax.random.normal(keys[0], (4, 16)),
        "w2": 0.5 * jax.random.normal(keys[1], (16, 1)),
    }
    return (
        {**w, "norm": jnp.ones(16)},
        lambda p, x: (
            (jnp.tanh(x @ p["w1"]).astype(p["norm"].dtype) * p["norm"]).astype(x.dtype) @ p["w2"]
        ),
    )


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden = linen.LayerNorm()(jnp.tanh(linen.Dense(16, dtype=x.dtype)(x)))
        return linen.Dense(1, dtype=x.dtype)(hidden.astype(x.dtype))


def linen_model() -> Model:
    return Linen().init(jax.random.key(0), X), Linen().apply


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(4, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.norm(jnp.tanh(self.first(x))).astype(x.dtype))


def nnx_model() -> Model:
    graph, params = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)
    return params, lambda p, x: nnx.merge(graph, p)(x)


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    second: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key)
        self.first, self.norm = eqx.nn.Linear(4, 16, key=keys[0]), eqx.nn.LayerNorm(16)
        self.second = eqx.nn.Linear(16, 1, key=keys[1])

    def __call__(self, x: Any) -> Any:
        return self.second(self.norm(jnp.tanh(self.first(x))).astype(x.dtype))


def equinox_model() -> Model:
    params, rest = eqx.partition(Equinox(jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda p, x: jax.vmap(eqx.combine(p, rest))(x)


MODELS = {"plain": plain, "linen": linen_model, "nnx": nnx_model, "equinox": equinox_model}


def losses(model: Model, dtype: str, *scales: float) -> Any:
    """The losses of an ensemble for each scale: every member begins with other weights."""
    params, apply = model
    precision = Precision(compute=dtype)
    policy = gs.Dynamic(growth_interval=10**6)
    optimizer = scaled(optax.adam(0.02, eps=1e-16), policy)

    @precision.wrap
    def loss_fn(p: Any, x: Any) -> Any:
        error = apply(p, x).astype(jnp.float32) - Y
        return SMALL * jnp.mean(jnp.square(error))

    def step(carry: Any, _: Any) -> Any:
        p, state = carry
        loss, grads = scaled_value_and_grad(loss_fn)(scale_of(state), p, X)
        updates, state = optimizer.update(grads, state, p, value=loss)
        return (optax.apply_updates(p, updates), state), loss / SMALL

    def one(key: Any, scale: Any) -> Any:
        noise = lambda w: w + 0.05 * jax.random.normal(key, w.shape)  # noqa: E731
        p = jax.tree.map(noise, params)
        state = optimizer.init(p)
        state = state._replace(floats=state.floats.at[0].set(scale))
        return jax.lax.scan(step, (p, state), None, STEPS)[1]

    train = jax.jit(jax.vmap(one, in_axes=(0, None)))
    keys = jax.random.split(jax.random.key(7), SEEDS)
    return [np.asarray(train(keys, jnp.float32(scale))) for scale in scales]


@pytest.mark.parametrize(
    "kind",
    # Seconds each, in XLA's compiler. Models of the others learn in tests/compat and examples/.
    [
        "plain",
        "nnx",
        *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("linen", "equinox")),
    ],
)
def test_float16_learns_as_float32_with_a_scale_and_not_at_all_without(kind: str) -> None:
    model = MODELS[kind]()
    (exact,) = losses(model, "float32", 1.0)
    with_scale, without = losses(model, "float16", 2.0**30, 1.0)
    ends, noise = exact[:, -1], float(exact[:, -1].std())
    assert ends.mean() < 0.3 * exact[:, 0].mean()
    assert abs(with_scale[:, -1].mean() - ends.mean()) < noise
    assert without[:, -1].mean() > 0.8 * exact[:, 0].mean()
    # That the comparison can fail, by what it must notice.
    assert abs(without[:, -1].mean() - ends.mean()) > noise


@pytest.mark.parametrize("kind", MODELS)
def test_norms_are_kept_in_float32_and_all_else_is_not(kind: str) -> None:
    params, _ = MODELS[kind]()
    cast = Precision(compute="float16").cast_to_compute(params)
    found = {
        jax.tree_util.keystr(path): leaf.dtype
        for path, leaf in jax.tree_util.tree_leaves_with_path(cast)
    }
    kept = {name for name, dtype in found.items() if dtype == jnp.float32}
    assert kept == {name for name in found if "norm" in name.lower()}
    assert 0 < len(kept) < len(found)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


class LinenStatistics(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.BatchNorm(use_running_average=False, name="bn")(linen.Dense(4)(x))


class NnxStatistics(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.bn = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_running_statistics_are_kept_in_float32_whatever_their_layers_are_named(kind: str) -> None:
    if kind == "linen":
        variables = LinenStatistics().init(jax.random.key(0), X)
        statistics, weights = variables["batch_stats"], variables["params"]["Dense_0"]
        tree = {"batch_stats": statistics, "weights": weights}
    elif kind == "nnx":
        _, statistics, weights = nnx.split(NnxStatistics(nnx.Rngs(0)), nnx.BatchStat, ...)
        tree = {"first": statistics, "weights": weights["dense"]}
    else:
        _, statistics = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")
        tree = {"first": statistics, "weights": Equinox(jax.random.key(0)).first}
    *others, cast = (Precision().cast_to_compute(tree)[name] for name in sorted(tree))
    floating = [
        leaf for leaf in jax.tree.leaves(others) if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    assert [leaf.dtype for leaf in floating] == [jnp.float32] * 2
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(cast, eqx.is_array))} == {
        jnp.dtype("float16")
    }


class NnxDropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.statistics = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = self.dropout(self.statistics(self.first(x))).astype(x.dtype)
        return self.second(hidden)


def test_cast_nnx_module_writes_statistics_and_counters_into_the_one_of_the_caller() -> None:
    model, other = NnxDropout(nnx.Rngs(0)), NnxDropout(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, scaled(optax.adam(0.02), "headroom"), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            half, x = Precision().cast_to_compute((model, X))
            loss = jnp.mean(jnp.square(half(x).astype(jnp.float32) - Y))
            return loss * scale_of(optimizer.opt_state), loss

        (_, loss), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads, value=loss)
        return grads

    grads = step(model, optimizer)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    other(X)  # which writes the same
    (expected, counters), (found, counted) = (
        (nnx.state(m, nnx.BatchStat), nnx.state(m, nnx.RngCount)) for m in (other, model)
    )
    assert [leaf.tolist() for leaf in jax.tree.leaves((counters, counted))] == [1, 1]
    assert any(leaf.any() for leaf in jax.tree.leaves(expected))
    # A tenth of the batch' statistics is added, of outputs of a layer that computes in float16.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2.0**-10), expected, found)


def test_what_is_no_type_is_refused_and_whole_numbers_are_left_alone() -> None:
    for wrong in ("float17", "int32", None):
        with pytest.raises(gs.SettingError, match="compute must be a floating-point type"):
            Precision(compute=wrong)
    with pytest.raises(gs.SettingError, match="keep must be a tuple"):
        Precision(keep="norm")
    precision = Precision(params="bfloat16", compute="float16", keep=("head",))
    tree = {"head": jnp.ones(2), "norm": jnp.ones(2), "count": jnp.arange(2), "name": "x"}
    cast = precision.cast_to_compute(tree)
    assert [cast[name].dtype.name for name in ("head", "norm", "count")] == [
        "bfloat16", "float16", "int32",
    ]  # fmt: skip
    assert cast["name"] == "x"
    assert precision.cast_to_params(tree)["norm"].dtype == jnp.bfloat16
    doubled = precision.wrap(lambda p, *, by: p["norm"] * by)(tree, by=jnp.float32(2))
    assert (doubled.dtype, doubled.tolist()) == (jnp.float32, [2.0, 2.0])
