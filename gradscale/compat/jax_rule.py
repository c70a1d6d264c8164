"""The rule of `gradscale.Dynamic` over the fields that jmp, Flax and mpx have.

Their objects hold a scale and a counter, and functions return new ones, so a step here is a pure
function of both. Settings are checked under the names that the other library gives them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.errors import SettingError
from gradscale.formats import FLOAT32
from gradscale.policy import Dynamic, DynamicState, GradStats
from gradscale.policy.settings import as_count, as_number, as_scale

LOWEST = FLOAT32.smallest_normal
"""The floor where none is given: below it XLA flushes a float32 scale to zero."""


@functools.cache
def rule(growth: float, backoff: float, interval: int, ceiling: float = FLOAT32.max) -> Dynamic:
    """The policy with these settings, which need not be powers of two, as in the other libraries.

    Its floor is `LOWEST`: `advance` has the one that the caller set, which may be traced.
    """
    return Dynamic(
        init_scale=LOWEST,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=LOWEST,
        max_scale=ceiling,
        exact=False,
    )


@functools.partial(jax.jit, static_argnums=0, inline=True)  # outside of jit: 40 calls otherwise
def advance(
    policy: Dynamic, scale: Any, counter: Any, stats: GradStats, floor: Any = LOWEST
) -> tuple[jax.Array, jax.Array]:
    """Scale (float32) and counter (int32) after a step; the floor is for steps that lower it."""
    held = DynamicState(
        jnp.asarray(scale, jnp.float32), jnp.asarray(counter, jnp.int32), jnp.int32(0)
    )
    moved = policy.update(held, stats, jnp)
    is_lowered = jnp.logical_not(stats.finite) & stats.loss_finite
    floor = jnp.maximum(jnp.asarray(floor, jnp.float32), jnp.float32(LOWEST))
    return jnp.where(is_lowered, jnp.maximum(moved.scale, floor), moved.scale), moved.good_steps


def boolean_scalar(name: str, value: Any) -> jax.Array:
    """`value` as an array, or a SettingError if it is not one bool."""
    array = jnp.asarray(value)
    if array.ndim or array.dtype != jnp.bool_:
        raise SettingError(
            f"{name}: expected boolean scalar, got {array.dtype} of shape {array.shape}."
        )
    return array


def whole(name: str, value: Any) -> int:
    """`value` as a whole number >= 1; 2e3 is one too, as files of settings have it."""
    number = as_number(name, value)
    return as_count(name, int(number) if number.is_integer() else value)


def factor(name: str, value: Any, above: float, below: float) -> float:
    """`value` as it is if it is a Python number between two others, else as one."""
    number = as_number(name, value)
    if not above < number < below:
        raise SettingError(f"{name} must be > {above:g} and < {below:g}, got {number}.")
    return value if isinstance(value, int | float) else number


def lower_bound(name: str, value: Any) -> float:
    """`value` as the floor of a scale: 0 (no floor) or more."""
    number = as_number(name, value)
    if not 0 <= number <= FLOAT32.max:
        raise SettingError(f"{name} must be >= 0 and finite, got {number}.")
    return number


def is_traced(value: Any) -> bool:
    """Whether `value` is known only when the compiled function runs."""
    return isinstance(value, jax.core.Tracer)


def check_scales(name: str, value: Any) -> None:
    """Raises a SettingError unless every number in `value` can be a scale; waits for the device.

    What is traced, or partly on devices of other processes, is not read.
    """
    if is_traced(value) or not getattr(value, "is_fully_addressable", True):
        return
    for number in np.ravel(np.asarray(value)):
        as_scale(name, number, exact=False)


def concrete(value: Any, dtype: Any) -> Any:
    """A Python number as a 0-dim NumPy array of `dtype`; everything else as it is.

    In `jit` a Python number is weakly typed and what a step returns is not, so that the second call
    would compile the step once more. orbax restores no NumPy scalars.
    """
    return np.asarray(value, dtype) if isinstance(value, int | float) else value
