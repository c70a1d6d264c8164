"""A GPT of 25 million parameters in JAX: float16 under Headroom and Dynamic, bfloat16, float32.

Every arm has the same model, float32 parameters, AdamW of optax with clipping by norm and a
learning rate that falls, and the same texts to learn, which are made up (`_jax_models.texts`):

    float32             no scaling; matrix products may use TF32 on a GPU, as is JAX' default
    bfloat16            no scaling
    float16, none       no scaling, and no step is skipped
    float16, dynamic    scaled() with the policy Dynamic
    float16, headroom   scaled() with the policy Headroom

An arm is trained once for every seed, of weights and texts. The arms take turns, `--chunk` steps
each; the time of a step is the median over chunks, synchronised at their ends. The loss is the
mean over the last tenth of the steps, and its noise the deviation over seeds. `--tiny` takes a very
small model, to see that everything runs.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _jax_models as models
import jax
import jax.numpy as jnp
import optax

import gradscale as gs
from gradscale.jax import outcome_of, scale_of, scaled, scaled_value_and_grad

LR, MAX_NORM = 1e-3, 1.0


class Arm(NamedTuple):
    """One way to train."""

    dtype: Any
    policy: Any
    """None: without the wrapper."""


ARMS = {
    "float32": Arm(jnp.float32, None),
    "bfloat16": Arm(jnp.bfloat16, None),
    "float16, none": Arm(jnp.float16, None),
    "float16, dynamic": Arm(jnp.float16, gs.Dynamic()),
    "float16, headroom": Arm(jnp.float16, gs.Headroom()),
}


class Trained:
    """An arm that is being trained, with a compiled step that all seeds use."""

    def __init__(self, arm: Arm, size: models.Size, steps: int) -> None:
        rate = optax.warmup_cosine_decay_schedule(0.0, LR, max(steps // 10, 1), steps)
        adamw = optax.adamw(rate, weight_decay=0.01)
        loss_of = functools.partial(models.gpt_loss, heads=size.heads, dtype=arm.dtype)
        if arm.policy is None:
            self.optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
            differentiate = jax.value_and_grad(loss_of)
        else:
            self.optimizer = scaled(adamw, arm.policy, clip_norm=MAX_NORM)
            by_scale = scaled_value_and_grad(loss_of)
        self.scales = arm.policy is not None
        self.skipped, self.scale = 0, 1.0
        self.times: list[float] = []
        self.losses: list[list[float]] = []

        def step(params: Any, opt_state: Any, tokens: Any) -> Any:
            if self.scales:
                loss, grads = by_scale(scale_of(opt_state), params, tokens)
                updates, opt_state = self.optimizer.update(grads, opt_state, params, value=loss)
                applied = outcome_of(opt_state).applied
            else:
                loss, grads = differentiate(params, tokens)
                updates, opt_state = self.optimizer.update(grads, opt_state, params)
                applied = jnp.bool_(True)
            return optax.apply_updates(params, updates), opt_state, (loss, applied)

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def begin(self, seed: int, size: models.Size) -> None:
        """New weights."""
        self.params = models.gpt(jax.random.key(seed), size)
        self.opt_state = self.optimizer.init(self.params)
        self.losses.append([])

    def run(self, batches: Any) -> None:
        """Takes a step with each of `batches`."""
        found = []
        start = time.perf_counter()
        for tokens in batches:
            self.params, self.opt_state, told = self.step(self.params, self.opt_state, tokens)
            found.append(told)
        jax.block_until_ready(self.params)
        self.times.append((time.perf_counter() - start) * 1e3 / len(found))
        self.losses[-1] += [float(loss) for loss, _ in found]
        self.skipped += sum(not bool(applied) for _, applied in found)
        if self.scales:
            self.scale = float(scale_of(self.opt_state))


def train(
    names: Sequence[str], size: models.Size, batch: int, steps: int, seeds: int, chunk: int
) -> dict[str, Trained]:
    """Trains every arm with every seed, by turns."""
    arms = {}
    for name, arm in ((name, ARMS[name]) for name in names):
        start = time.perf_counter()
        arms[name] = Trained(arm, size, steps)
        arms[name].begin(0, size)
        tokens = models.texts(jax.random.key(0), batch, size.words, size.length + 1)
        arms[name].run([tokens] * 2)
        arms[name] = _forgotten(arms[name])
        print(f"{name}: ready in {time.perf_counter() - start:.0f} s", flush=True)
    for seed in range(seeds):
        key = jax.random.key(seed + 100)
        tokens = models.texts(key, steps * batch, size.words, size.length + 1)
        batches = list(tokens.reshape(steps, batch, size.length + 1))
        for arm in arms.values():
            arm.begin(seed, size)
        for first in range(0, steps, chunk):
            for arm in arms.values():
                arm.run(batches[first : first + chunk])
    return arms


def _forgotten(arm: Trained) -> Trained:
    """`arm`, compiled, without what it has measured meanwhile."""
    arm.times, arm.losses, arm.skipped = [], [], 0
    return arm


def report(arms: dict[str, Trained], parameters: int, results: Path | None) -> None:
    """Prints a line for every arm, and keeps rows where that is wished."""
    base = statistics.median(arms["bfloat16"].times) if "bfloat16" in arms else math.nan
    for name, arm in arms.items():
        ends = [statistics.fmean(losses[-max(len(losses) // 10, 1) :]) for losses in arm.losses]
        noise = statistics.stdev(ends) if len(ends) > 1 else 0.0
        taken = statistics.median(arm.times)
        numbers = {
            "loss": statistics.fmean(ends),
            "noise of the loss": noise,
            "ms": taken,
            "ratio to bfloat16": taken / base,
            "skipped": float(arm.skipped),
            "last scale": arm.scale,
        }
        print(
            f"{name:18} loss {numbers['loss']:.4f} +- {noise:.4f}   {taken:.2f} ms a step, "
            f"{taken / base:.3f} of bfloat16   {arm.skipped} skipped, last scale {arm.scale:g}",
            flush=True,
        )
        if results is not None:
            models.keep(results, "jax_gpt", name, parameters, numbers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=20)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--tiny", action="store_true", help="a very small model")
    parser.add_argument("--results", type=Path, help="CSV file to which rows are added")
    options = parser.parse_args(arguments)
    size = models.GPT_TINY if options.tiny else models.GPT_25M
    parameters = models.count(jax.eval_shape(lambda: models.gpt(jax.random.key(0), size)))
    print(f"{models.device()}, jax {jax.__version__}, gradscale {gs.__version__}")
    print(f"{parameters:,} parameters, {options.steps} steps of {options.batch} x {size.length}")
    arms = train(options.arms, size, options.batch, options.steps, options.seeds, options.chunk)
    report(arms, parameters, options.results)


if __name__ == "__main__":
    main()
