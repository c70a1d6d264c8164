"""Gradients of a scaled loss as pure functions: `value_and_grad`, `grad`, `update`, `select`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradscale.errors import SettingError
from gradscale.jax.measurement import Axes, all_of, is_float, measure, unscale, widened
from gradscale.policy import GradStats, Policy, State, as_policy

T = TypeVar("T")


def init(policy: Policy | str) -> State:
    """Returns the first state of `policy`, as arrays.

    Raises:
        SettingError: Its scale can be above 2**126. XLA flushes the reciprocal to zero, and with it
            all unscaled gradients.
    """
    policy = as_policy(policy)
    if getattr(policy, "max_scale", policy.init_scale) > 2.0**126:
        raise SettingError(f"The scale must be at most 2**126 in JAX, got {policy!r}.")
    return policy.init(jnp)


def update(policy: Policy | str, state: State, stats: GradStats) -> State:
    """Returns the state of `policy` after a step with these `stats`: moves the scale."""
    policy = as_policy(policy)
    check_state(policy, state)
    return policy.update(state, stats, jnp)  # type: ignore[arg-type]


def check_state(policy: Policy, state: Any) -> None:
    """Raises a SettingError if `state` is not one of `policy`."""
    if type(state) is not type(policy.init()):
        raise SettingError(f"policy must be that of the {type(state).__name__}, got {policy!r}.")


def applies(stats: GradStats) -> Array:
    """Returns whether a step with these `stats` is applied rather than skipped (bool)."""
    return jnp.asarray(stats.finite) & stats.fits & stats.loss_finite


def select(condition: Any, new: T, old: T) -> T:
    """Returns the leaves of `new` where `condition` (bool) is true, otherwise those of `old`.

    Leaves keep the types of `old`, so that a compiled step is traced once. Leaves that are neither
    arrays nor numbers, such as the functions of a module, are those of `old`.
    """

    def one(after: Any, before: Any) -> Any:
        if not hasattr(before, "dtype") and not isinstance(before, bool | int | float | complex):
            return before
        before, after = jnp.asarray(before), jnp.asarray(after)
        after = after if after.dtype == before.dtype else after.astype(before.dtype)
        return jnp.where(condition, after, before)

    return jax.tree.map(one, new, old)


def scaled_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad(fun)` with gradients that are multiplied by a scale.

        loss, grads = scaled_value_and_grad(loss_fn)(scale_of(opt_state), params, batch)

    The returned function takes the scale as its first argument. It returns the unscaled value,
    which the scale cannot make overflow, and the scaled gradients.

    Args:
        fun: Returns a loss, and auxiliary data if `has_aux`. If the loss is float16, the backward
            pass starts in float16, where scales from 2**16 on are infinite: return float32.
        argnums: Which arguments to differentiate with respect to.
        has_aux: Whether `fun` returns auxiliary data.
        **options: Further arguments of `jax.value_and_grad`, such as `allow_int`.
    """

    def value_and_scaled_grad(scale: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not is_number(scale):
            raise SettingError(
                "The first argument must be the scale, such as scale_of(opt_state), and those of "
                f"the function follow it, got {described(scale)}."
            )
        scale = lax.stop_gradient(jnp.asarray(scale, dtype=jnp.float32))

        def scaled_fun(*args: Any) -> tuple[Array, Any]:
            returned = fun(*args, **kwargs)
            pair = returned if has_aux else (returned, None)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"{getattr(fun, '__name__', 'fun')} must return a pair of a loss and anything "
                    f"else, because has_aux is True, got {pair!r}."
                )
            value = jnp.asarray(pair[0])
            if not jnp.issubdtype(value.dtype, jnp.floating) or value.shape != ():
                raise TypeError(
                    f"{getattr(fun, '__name__', 'fun')} must return a floating-point loss, got "
                    f"{value.dtype} of shape {value.shape}. With has_aux=True it must return a "
                    "pair of the loss and any other output."
                )
            wide = widened(value)
            result = (value, pair[1]) if has_aux else value
            return wide * scale.astype(wide.dtype), result

        differentiate = jax.value_and_grad(scaled_fun, argnums, has_aux=True, **options)
        (_, result), grads = differentiate(*args)
        return result, grads

    return value_and_scaled_grad


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy | str,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: Axes = None,
    sharded_over: Axes = None,
    keep_dtype: bool = False,
    **options: Any,
) -> Callable[..., tuple[tuple[Any, Any], GradStats]]:
    """Returns `jax.value_and_grad(fun)` through a scaled loss, which also returns `GradStats`.

        step = value_and_grad(loss_fn, policy)
        (loss, grads), stats = step(state, params, batch)
        params = select(applies(stats), optimizer_step(params, grads), params)
        state = update(policy, state, stats)

    The returned function takes a state of the policy as its first argument. The value is unscaled.
    The gradients are unscaled, in float32, or float64 where the parameters are.

    Args:
        fun: Returns a loss, preferably in float32, and auxiliary data if `has_aux`.
        policy: The policy that moves the scale, or its name.
        argnums: Which arguments to differentiate with respect to.
        has_aux: Whether `fun` returns auxiliary data.
        axis_name: Mapped axes (of `shard_map`, `pmap`, `vmap`) over which the loss is a mean:
            gradients are averaged over them. The value is that of this shard.
        sharded_over: Mapped axes over which each shard has parameters of its own: gradients are not
            reduced, and all shards get the same statistics.
        keep_dtype: Keep gradients in the types of their parameters. In float16, small gradients
            become zero when they are unscaled.
        **options: Further arguments of `jax.value_and_grad`, such as `allow_int`.
    """
    policy = as_policy(policy)
    inner = scaled_value_and_grad(fun, argnums, has_aux, **options)
    places = tuple(argnums) if isinstance(argnums, Sequence) else (operator.index(argnums),)
    average, share = _names(axis_name), _names(sharded_over)

    def f(state: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, Any], GradStats]:
        if average:
            # JAX sums the gradients of parameters that all shards have in common, where it knows
            # that they do. That is not the mean, so each shard gets parameters of its own.
            chosen = {place % len(args) for place in places}
            args = tuple(
                jax.tree.map(lambda x: _varying(x, average), arg) if i in chosen else arg
                for i, arg in enumerate(args)
            )
        if not hasattr(state, "scale"):
            raise SettingError(
                "The first argument must be the state of the policy, such as init(policy), and "
                f"those of the function follow it, got {described(state)}."
            )
        result, grads = inner(state.scale, *args, **kwargs)
        if average:
            grads = jax.tree.map(lambda g: _mean(g, average, keep_dtype), grads)
        stats = measure(
            grads, state.scale, policy, keep_dtype=keep_dtype, sharded_over=share or None
        )
        value = lax.stop_gradient(result[0] if has_aux else result)
        loss_finite = all_of(jnp.isfinite(value), (*average, *share) or None)
        grads = unscale(grads, state.scale, keep_dtype=keep_dtype)
        return (result, grads), stats._replace(loss_finite=loss_finite)

    return f


def grad(
    fun: Callable[..., Any],
    policy: Policy | str,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., tuple[Any, GradStats]]:
    """Returns `value_and_grad` without the value.

    The returned function returns `grads, stats`, or `(grads, aux), stats` if `has_aux`.
    """
    inner = value_and_grad(fun, policy, argnums, has_aux, **options)

    def f(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, GradStats]:
        (result, grads), stats = inner(state, *args, **kwargs)
        return ((grads, result[1]) if has_aux else grads), stats

    return f


def is_number(value: Any) -> bool:
    """Whether `value` is one number: of Python, or an array without dimensions."""
    return isinstance(value, int | float) or (hasattr(value, "dtype") and value.shape == ())


def described(value: Any) -> str:
    """What an error says of an argument in the wrong place."""
    return f"an array of shape {value.shape}" if hasattr(value, "shape") else repr(type(value))


def _names(axes: Axes) -> tuple[str, ...]:
    """The names of mapped axes as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _mean(leaf: Any, axes: tuple[str, ...], keep_dtype: bool) -> Any:
    """The mean of a scaled gradient over shards, in float32 or in its own type."""
    if not is_float(leaf):
        return leaf
    mean = lax.pmean(widened(leaf), axes)
    return mean.astype(leaf.dtype) if keep_dtype else mean


def _varying(leaf: Any, axes: tuple[str, ...]) -> Any:
    """`leaf` as an array of which each shard has its own, so that JAX sums no gradients of it."""
    if not is_float(leaf):
        return leaf
    # Nothing is summed over the axes of vmap, for which pcast fails, in jit much later.
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for axis in (axis for axis in axes if axis in manual):
        with contextlib.suppress(ValueError):  # it varies already
            if hasattr(lax, "pcast"):
                leaf = lax.pcast(leaf, axis, to="varying")
            else:  # before jax 0.9
                leaf = lax.pvary(leaf, axis)  # type: ignore[attr-defined]
    return leaf
