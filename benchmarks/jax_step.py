"""What scaling costs in a compiled JAX step, against Flax' DynamicScale and the arithmetic of jmp.

Parameters are float32 and the model computes in float16; every case has the same model, the same
batch, AdamW of optax, and a state of its own that is donated:

    none             no scaling, and no check
    flax             flax.training.dynamic_scale.DynamicScale, then a selection over parameters and
                     optimizer state, as in the examples of Flax
    jmp              loss times scale, gradients divided by it, all_finite, adjust, select_tree, as
                     in the README of jmp: its arithmetic, written here, because it needs no more
    ours, functions  value_and_grad, select and update of gradscale.jax; Dynamic
    ours, dynamic    the optax wrapper scaled() under Dynamic
    ours, headroom   the same under Headroom

first without clipping, then with clipping by norm: by optax.clip_by_global_norm, and by clip_norm=
of scaled(). A repeat is `--steps` steps between two synchronisations. The cases take turns, repeat
by repeat, beginning with another one each time. What is printed is the median, and the median and
the quartiles of the ratios to flax and to jmp of the same repeat.

For ours it also says how often the compiled program reads a gradient besides the optimizer: on a
GPU, how many kernels. `--tiny` takes very small models, to see that everything runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _jax_models as models
import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import gradscale as gs
from gradscale.jax import (
    applies,
    init,
    scale_of,
    scaled,
    scaled_value_and_grad,
    select,
    update,
    value_and_grad,
)

LR, MAX_NORM = 1e-4, 1.0
SCALE, INTERVAL = 2.0**15, 2000
AGAINST = ("flax", "jmp")
State = Any
Step = Callable[[State, Any], State]


class Model(NamedTuple):
    """What is trained."""

    params: Any
    batch: Any
    loss: Callable[[Any, Any], Any]


def optimizer(clip: bool) -> Any:
    """AdamW, with clipping or without."""
    adamw = optax.adamw(LR)
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw) if clip else adamw


def none(model: Model, clip: bool) -> tuple[State, Step]:
    inner = optimizer(clip)

    def step(state: State, batch: Any) -> State:
        params, opt_state = state
        _, grads = jax.value_and_grad(model.loss)(params, batch)
        updates, opt_state = inner.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return (model.params, inner.init(model.params)), step


def where(condition: Any, new: Any, old: Any) -> Any:
    """`new` or `old`, as users of flax and jmp select."""
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def flax(model: Model, clip: bool) -> tuple[State, Step]:
    inner = optimizer(clip)

    def step(state: State, batch: Any) -> State:
        params, opt_state, scale = state
        scale, finite, _, grads = scale.value_and_grad(model.loss)(params, batch)
        updates, after = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return where(finite, new, params), where(finite, after, opt_state), scale

    scale = DynamicScale(growth_interval=INTERVAL, fin_steps=jnp.int32(0), scale=jnp.float32(SCALE))
    return (model.params, inner.init(model.params), scale), step


def jmp(model: Model, clip: bool) -> tuple[State, Step]:
    inner = optimizer(clip)

    def step(state: State, batch: Any) -> State:
        params, opt_state, scale, counter = state
        grads = jax.grad(lambda p: model.loss(p, batch) * scale)(params)
        inverse = 1 / scale
        grads = jax.tree.map(lambda g: g * inverse, grads)
        finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
        grows = counter == INTERVAL - 1
        higher = jnp.where(grows, jnp.where(jnp.isfinite(scale * 2), scale * 2, scale), scale)
        scale = jnp.where(finite, higher, jnp.maximum(1.0, scale / 2))
        counter = jnp.where(finite & ~grows, counter + 1, 0)
        updates, after = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return where(finite, new, params), where(finite, after, opt_state), scale, counter

    start = (jnp.float32(SCALE), jnp.int32(0))
    return (model.params, inner.init(model.params), *start), step


def functions(model: Model, clip: bool) -> tuple[State, Step]:
    inner, policy = optimizer(clip), gs.Dynamic(init_scale=SCALE, growth_interval=INTERVAL)
    differentiate = value_and_grad(model.loss, policy)

    def step(state: State, batch: Any) -> State:
        params, opt_state, scale = state
        (_, grads), stats = differentiate(scale, params, batch)
        updates, after = inner.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), after
        params, opt_state = select(applies(stats), new, (params, opt_state))
        return params, opt_state, update(policy, scale, stats)

    return (model.params, inner.init(model.params), init(policy)), step


def wrapper(policy: Any, model: Model, clip: bool) -> tuple[State, Step]:
    inner = scaled(optax.adamw(LR), policy, clip_norm=MAX_NORM if clip else None)
    differentiate = scaled_value_and_grad(model.loss)

    def step(state: State, batch: Any) -> State:
        params, opt_state = state
        loss, grads = differentiate(scale_of(opt_state), params, batch)
        updates, opt_state = inner.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return (model.params, inner.init(model.params)), step


DYNAMIC = gs.Dynamic(init_scale=SCALE, growth_interval=INTERVAL)
CASES: dict[str, Callable[[Model, bool], tuple[State, Step]]] = {
    "none": none,
    "flax": flax,
    "jmp": jmp,
    "ours, functions": functions,
    "ours, dynamic": functools.partial(wrapper, DYNAMIC),
    "ours, headroom": functools.partial(wrapper, gs.Headroom()),
}


class Running:
    """A case that is compiled, with its state."""

    def __init__(self, name: str, model: Model, clip: bool) -> None:
        self.state, step = CASES[name](model, clip)
        # Donated, so every case has to have parameters of its own.
        self.state = jax.tree.map(jnp.copy, self.state)
        self.batch = model.batch
        self.step = jax.jit(step, donate_argnums=0)
        self.run(2)

    def run(self, steps: int) -> float:
        """Milliseconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) * 1e3 / steps


def measure(
    name: str, model: Model, clip: bool, repeats: int, steps: int, results: Path | None
) -> None:
    """Times every case, prints, and keeps rows where that is wished."""
    start = time.perf_counter()
    cases = {case: Running(case, model, clip) for case in CASES}
    size, tensors = models.count(model.params), len(jax.tree.leaves(model.params))
    name = f"{name}, {'clipping' if clip else 'no clipping'}"
    took = time.perf_counter() - start
    print(f"{name}: {size:,} parameters in {tensors} tensors, compiled in {took:.0f} s", flush=True)
    times: dict[str, list[float]] = {case: [] for case in cases}
    order = list(cases)
    for turn in range(repeats):
        for case in order[turn % len(order) :] + order[: turn % len(order)]:
            times[case].append(cases[case].run(steps))
    for case, found in times.items():
        numbers = {"ms": statistics.median(found)}
        for other in AGAINST:
            ratios = [mine / theirs for mine, theirs in zip(found, times[other], strict=True)]
            # Half of the ratios are between the other two: how far to believe the median.
            low, middle, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
            numbers[f"ratio to {other}"] = middle
            numbers[f"ratio to {other}, lower quartile"] = low
            numbers[f"ratio to {other}, upper quartile"] = high
        told = f"ms {numbers['ms']:.3f}"
        for other in AGAINST:
            middle, low, high = (value for what, value in numbers.items() if other in what)
            told += f"   ratio to {other} {middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"  {case:16} {told}", flush=True)
        if results is not None:
            models.keep(results, "jax_step", f"{name}, {case}", size, numbers)


def passes(shape: tuple[int, int] = (1024, 1024)) -> tuple[int, int]:
    """How often a step that clips reads a gradient: to reduce it, and to make arrays of it."""
    inner = scaled(optax.adamw(LR), gs.Headroom(), clip_norm=MAX_NORM)
    params = {"w": jnp.zeros(shape)}

    def step(g: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = inner.update(g, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    compiled = jax.jit(step).lower(params, inner.init(params), params).compile()
    (found,) = models.readers(compiled.as_text(), shape).values()
    return found.count("reduce"), found.count("array")


def perceptron(tiny: bool) -> Model:
    layers, width, batch = (3, 8, 4) if tiny else (20, 256, 64)
    keys = jax.random.split(jax.random.key(0))
    loss = functools.partial(models.perceptron_loss, dtype=jnp.float16)
    params = models.perceptron(keys[0], layers, width)
    return Model(params, jax.random.normal(keys[1], (batch, width)), loss)


def gpt(tiny: bool) -> Model:
    size, batch = models.GPT_25M, 32
    if jax.devices()[0].platform == "cpu":
        size, batch = models.Size(layers=2, heads=4, width=256, words=512, length=64), 2
    if tiny:
        size, batch = models.GPT_TINY, 2
    keys = jax.random.split(jax.random.key(0))
    loss = functools.partial(models.gpt_loss, heads=size.heads, dtype=jnp.float16)
    tokens = models.texts(keys[1], batch, size.words, size.length + 1)
    return Model(models.gpt(keys[0], size), tokens, loss)


MODELS = {"perceptron": perceptron, "GPT": gpt}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, help="steps per repeat; default: 20, on a CPU 3")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="very small models")
    parser.add_argument("--results", type=Path, help="CSV file to which rows are added")
    options = parser.parse_args(arguments)
    cpu = jax.devices()[0].platform == "cpu"
    steps = options.steps or (3 if cpu else 20)
    print(f"{models.device()}, jax {jax.__version__}, gradscale {gs.__version__}", flush=True)
    reduced, arrays = passes()
    print(f"a gradient is read by {reduced} reduction(s) and by {arrays} instruction(s) of AdamW")
    for name, clip in itertools.product(options.models, (False, True)):
        model = MODELS[name](options.tiny)
        measure(name, model, clip, options.repeats, steps, options.results)


if __name__ == "__main__":
    main()
