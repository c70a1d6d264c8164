"""A wrapper for optax optimizers: unscales, checks, clips, steps or skips, and moves the scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradscale.errors import SettingError
from gradscale.jax.gradients import applies, described, init, is_number, select, update
from gradscale.jax.measurement import Axes, all_of, format_of, is_float, measure, unscale
from gradscale.jax.outcome import outcome_from
from gradscale.jax.state import ScaledState, first_state, pack
from gradscale.monitor import Outcome
from gradscale.policy import Policy, as_policy
from gradscale.policy.losses import with_patience
from gradscale.policy.settings import as_number


class Record(NamedTuple):
    """What one step did, for a function on the host."""

    step: Any
    """int32: the number of the step, from 1."""
    scale: Any
    """float32: the scale after the step."""
    outcome: Outcome
    """The outcome of the step."""
    value: Any = None
    """The loss; None if it was not passed."""


def scaled(
    optimizer: Any,
    policy: Policy | str,
    clip_norm: float | None = None,
    *,
    sharded_over: Axes = None,
    keep_dtype: bool = False,
    on_step: Callable[[Record], None] | None = None,
) -> Any:
    """Returns an optax optimizer that takes scaled gradients and skips those that are not finite.

        optimizer = scaled(optax.adamw(3e-4), "headroom", clip_norm=1.0)
        opt_state = optimizer.init(params)

        loss, grads = scaled_value_and_grad(loss_fn)(scale_of(opt_state), params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)

    It is a `GradientTransformationExtraArgs`. Its `update` also takes `value`, the unscaled loss:
    if it is not finite, the step is skipped and the scale does not move. Further arguments are
    passed on to `optimizer`.

    A skipped step does not change the state of `optimizer`, including its counters and schedules,
    and its updates are zeros that change no bit of a parameter. The scale moves after every step.
    Wrap the whole chain, not a part of it, so that no transformation sees skipped steps.
    That includes `optax.MultiSteps`: `scaled(optax.MultiSteps(...), policy)` leaves out gradients
    that are not finite and sums the others.

    Args:
        optimizer: An optax `GradientTransformation`.
        policy: The policy that moves the scale, or its name.
        clip_norm: Largest norm of the unscaled gradients; larger ones are scaled down to it.
        sharded_over: Mapped axes (of `shard_map` or `pmap`) over which each shard has parameters of
            its own. Not needed if all shards have the same gradients, or with automatic sharding.
        keep_dtype: Pass the gradients to `optimizer` in their own types, not in float32.
        on_step: Called on the host with a `Record` of every step, such as a `Monitor`; None sends
            nothing to the host.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError('scaled() needs optax: pip install "gradscale[jax]".') from error

    policy = as_policy(policy)
    format = format_of(policy)
    inner: Any = optax.with_extra_args_support(optimizer)
    longest = None if clip_norm is None else as_number("clip_norm", clip_norm)
    if longest is not None and not 0 < longest < float("inf"):
        raise SettingError(f"clip_norm must be finite and > 0, got {clip_norm!r}.")

    def first(params: Any) -> ScaledState:
        return first_state(inner.init(params), init(policy))

    def step(
        updates: Any, state: ScaledState, params: Any = None, **extra: Any
    ) -> tuple[Any, ScaledState]:
        if not _is_scaled(state):
            raise SettingError(
                f"state must be one that init() of this optimizer has returned, got {type(state)}. "
                "The state of the optimizer inside is its inner_state: "
                "init(params)._replace(inner_state=...)."
            )
        scale, counts, value = state.scale, state.counts, extra.get("value")
        if value is not None and not is_number(value):
            raise SettingError(f"value must be the loss, one number, got {described(value)}.")
        stats = measure(updates, scale, policy, keep_dtype=keep_dtype, sharded_over=sharded_over)
        if value is not None:
            stats = stats._replace(loss_finite=all_of(jnp.isfinite(value), sharded_over))
        applied = applies(stats)
        grads = unscale(updates, scale)
        if longest is not None:
            grads = _shortened(grads, longest, stats.norm, sharded_over)
        if keep_dtype:  # after the clipping, whose factor may be too small for float16
            grads = jax.tree.map(_like, grads, updates)
        new, inner_state = inner.update(grads, state.inner_state, params, **extra)
        told, bad_losses = with_patience(stats, counts.bad_losses, jnp)
        outcome = outcome_from(stats, applied, scale, counts.skipped_in_a_row, format)
        moved = pack(
            select(applied, inner_state, state.inner_state),
            update(policy, state.policy_state(policy), told),
            outcome,
            counts.steps + 1,
            bad_losses,
        )
        if on_step is not None:
            record = Record(counts.steps + 1, moved.scale, moved.outcome, value)
            jax.debug.callback(on_step, record)
        return jax.tree.map(lambda leaf: _kept_if(applied, leaf), new), moved

    return optax.GradientTransformationExtraArgs(first, step)


def scale_of(opt_state: Any) -> Any:
    """Returns the scale in an optimizer's state, at any depth (float32)."""
    return scaled_state(opt_state).scale


def outcome_of(opt_state: Any) -> Outcome:
    """Returns the outcome of the last step in an optimizer's state, at any depth."""
    return scaled_state(opt_state).outcome


def scaled_state(opt_state: Any) -> ScaledState:
    """The one `ScaledState` in a state, or a SettingError."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: _is_scaled(node) or _is_sum(node))
    if any(_is_sum(node) for node in nodes):
        raise SettingError(
            "optax.MultiSteps must be inside scaled(), as scaled(optax.MultiSteps(optimizer, n), "
            "policy), got a state of MultiSteps around it. After one overflow its sum of gradients "
            "is NaN for ever: it is reset by multiplying it by zero."
        )
    found = [node for node in nodes if _is_scaled(node)]
    if len(found) != 1:
        raise SettingError(
            f"An optimizer's state must have one scale, got {len(found)} in {type(opt_state)}. "
            + ("Wrap the whole optimizer in scaled()." if found else "Is it wrapped in scaled()?")
        )
    return found[0]


def replaced(opt_state: Any, state: ScaledState) -> Any:
    """`opt_state` with `state` in the place of its `ScaledState`."""
    scaled_state(opt_state)
    put = lambda leaf: state if _is_scaled(leaf) else leaf  # noqa: E731
    return jax.tree.map(put, opt_state, is_leaf=_is_scaled)


def _is_scaled(node: Any) -> bool:
    return isinstance(node, ScaledState)


def _is_sum(node: Any) -> bool:
    """Whether `node` is the state of `optax.MultiSteps` around `scaled`."""
    return hasattr(node, "acc_grads") and any(
        _is_scaled(leaf) for leaf in jax.tree.leaves(node, is_leaf=_is_scaled)
    )


def _shortened(grads: Any, longest: float, norm: Any, axes: Axes) -> Any:
    """`grads` times what makes their norm, which is `norm`, at most `longest`."""
    floats = [leaf for leaf in jax.tree.leaves(grads) if is_float(leaf)]
    limit = jnp.full_like(norm, longest)
    factor = limit / jnp.maximum(_norm_of(axes, floats, norm), limit)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype) if is_float(g) else g, grads)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm_of(axes: Axes, grads: list[Any], norm: Any) -> Any:
    """`norm`, with the derivatives of the norm of `grads`, which are not read for its value."""
    return norm


@_norm_of.defjvp
def _derivative_of_norm(axes: Axes, values: Any, tangents: Any) -> tuple[Any, Any]:
    (grads, norm), (moves, _) = values, tangents
    pairs = zip(grads, moves, strict=True)
    total = sum((jnp.sum((g.conj() * move).real, dtype=norm.dtype) for g, move in pairs), norm * 0)
    total = total if axes is None else jax.lax.psum(total, axes)
    return _norm_of(axes, grads, norm), total / jnp.where(norm > 0, norm, jnp.ones_like(norm))


def _like(grad: Any, update: Any) -> Any:
    """`grad` in the type of `update`."""
    return grad.astype(update.dtype) if is_float(update) else grad


def _kept_if(applied: Any, update: Any) -> Any:
    """`update`, or what leaves a parameter as it is: -0.0, since -0.0 + 0.0 is 0.0."""
    zeros = jnp.zeros_like(update)
    return jnp.where(applied, update, -zeros if is_float(update) else zeros)
