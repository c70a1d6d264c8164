"""Flax' DynamicScale over the rules of gradscale: `from gradscale.compat.flax import DynamicScale`.

    dynamic_scale = DynamicScale()

    @jax.jit
    def train_step(dynamic_scale, params, batch):
        grad_fn = dynamic_scale.value_and_grad(loss_fn)
        dynamic_scale, finite, loss, grads = grad_fn(params, batch)
        params = jax.tree.map(functools.partial(jnp.where, finite), step(params, grads), params)
        return dynamic_scale, params, loss

All public names of `flax.training.dynamic_scale` are here. docs/move/jmp-flax-mpx.md has what
differs. Flax need not be installed; where it is, its `serialization` knows this class.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

try:
    import jax
except ImportError as error:
    raise ImportError(
        'gradscale.compat.flax needs JAX: pip install "gradscale[jax]".', name="jax"
    ) from error

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradscale.compat import jax_rule
from gradscale.compat.jax_trees import STANDARD, measured, widened
from gradscale.errors import StateError
from gradscale.formats import FLOAT32

__all__ = ["DynamicScale", "DynamicScaleResult"]


class DynamicScaleResult(NamedTuple):
    """What a function made by `DynamicScale.value_and_grad` returns."""

    dynamic_scale: DynamicScale
    """The one for the next step."""
    finite: Any
    """bool: every gradient element is finite; if not, skip the step."""
    aux: Any
    """The loss as the function returned it, in float32; with `has_aux` a pair of it and the aux."""
    grad: Any
    """The gradients without the scale, in float32."""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """A scale that `gradscale.Dynamic` moves, and the gradients of functions under it.

        if the loss is not finite:
            nothing changes
        elif the scaled gradients are finite:
            fin_steps += 1
            if fin_steps >= growth_interval:
                fin_steps = 0
                scale *= growth_factor
        else:
            fin_steps = 0
            scale = max(scale * backoff_factor, minimum_scale)

    The leaves are `fin_steps` and `scale`; the others are settings.

    >>> dynamic_scale = DynamicScale(growth_interval=1)
    >>> dynamic_scale, finite, loss, grad = dynamic_scale.value_and_grad(lambda x: x**2)(3.0)
    >>> bool(finite), float(loss), float(grad), float(dynamic_scale.scale)
    (True, 9.0, 6.0, 131072.0)
    """

    growth_factor: float = 2.0
    """What the scale is multiplied by when it grows."""
    backoff_factor: float = 0.5
    """What it is multiplied by after gradients that were not finite."""
    growth_interval: int = 2000
    """It grows on the step that makes so many consecutive finite ones."""
    fin_steps: Any = 0
    """Consecutive finite steps since the scale last grew (int32)."""
    scale: Any = 65536.0
    """The loss is multiplied by this (float32)."""
    minimum_scale: float | None = FLOAT32.smallest_normal
    """The floor; None or 0 means the smallest normal float32 number."""

    def __post_init__(self) -> None:
        floor = self.minimum_scale
        if floor is not None:
            floor = jax_rule.lower_bound("minimum_scale", floor)
        checked = {
            "growth_factor": jax_rule.factor("growth_factor", self.growth_factor, 1.0, FLOAT32.max),
            "backoff_factor": jax_rule.factor("backoff_factor", self.backoff_factor, 0.0, 1.0),
            "growth_interval": jax_rule.whole("growth_interval", self.growth_interval),
            "fin_steps": jax_rule.concrete(self.fin_steps, np.int32),
            "scale": jax_rule.concrete(self.scale, np.float32),
            "minimum_scale": floor,
        }
        jax_rule.check_scales("scale", checked["scale"])
        vars(self).update(checked)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Any = None,
    ) -> Callable[..., DynamicScaleResult]:
        """`jax.value_and_grad` with the loss multiplied by `scale`, and the gradients divided.

        Args:
            fun: A function whose result is a scalar loss, or with `has_aux` a pair of it and more.
            argnums: The positional arguments to differentiate by.
            has_aux: Whether `fun` returns a pair.
            axis_name: The mapped axis, or axes, of `pmap` or `shard_map` over which gradients are
                averaged; the members decide together. Leave it out where XLA partitions the step.

        Returns:
            A function of the arguments of `fun` that returns a `DynamicScaleResult`.
        """
        scale = jnp.asarray(self.scale, jnp.float32)

        @functools.wraps(fun)
        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
            loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
            # The loss itself is kept: the scaled one may be infinite where it is not.
            with STANDARD():
                return scale * loss, (loss, aux)

        differentiated = jax.value_and_grad(scaled, argnums, has_aux=True)

        def value_and_grad(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            (_, (loss, aux)), grads = differentiated(*args, **kwargs)
            grads, loss_finite = jax.tree_util.tree_map(widened, grads), jnp.isfinite(loss)
            if axis_name is not None:
                grads = lax.pmean(grads, axis_name)
                # One member's loss that is not finite makes all gradients so.
                loss_finite = lax.pmin(loss_finite.astype(jnp.int32), axis_name) > 0
            grads, stats = measured(grads, scale, loss_finite)
            rule = jax_rule.rule(self.growth_factor, self.backoff_factor, self.growth_interval)
            moved = jax_rule.advance(rule, scale, self.fin_steps, stats, self.minimum_scale or 0.0)
            loss = widened(loss)
            return DynamicScaleResult(
                self._with(scale=moved[0], fin_steps=moved[1]),
                stats.fits,
                (loss, aux) if has_aux else loss,
                grads,
            )

        return value_and_grad

    def replace(self, **updates: Any) -> DynamicScale:
        """A copy with other fields."""
        return dataclasses.replace(self, **updates)

    def _with(self, **leaves: Any) -> DynamicScale:
        """A copy with other leaves; they are not read, since JAX may put anything there."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), **leaves)
        return made

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Any]:
        """The leaves with their names, and the settings."""
        keyed = ((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in _LEAVES)
        return tuple(keyed), tuple(getattr(self, name) for name in _SETTINGS)

    @classmethod
    def tree_unflatten(cls, settings: Any, leaves: Sequence[Any]) -> DynamicScale:
        """The object with these parts."""
        made = object.__new__(cls)
        vars(made).update(zip(_LEAVES + _SETTINGS, (*leaves, *settings), strict=True))
        return made


_LEAVES = ("fin_steps", "scale")
_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval", "minimum_scale")


def _state_dict(dynamic_scale: DynamicScale) -> dict[str, Any]:
    """The leaves by name, as Flax writes its own class."""
    return {name: getattr(dynamic_scale, name) for name in _LEAVES}


def _restored(dynamic_scale: DynamicScale, state: dict[str, Any]) -> DynamicScale:
    """`dynamic_scale` with the leaves of `state`, from here or from Flax."""
    if sorted(state) != sorted(_LEAVES):
        raise StateError(
            f"The state of a DynamicScale must have {' and '.join(_LEAVES)}, got {sorted(state)}."
        )
    return dynamic_scale.replace(**state)


try:
    from flax import serialization
except ImportError:
    pass  # Its checkpoints are for those who have it.
else:
    serialization.register_serialization_state(DynamicScale, _state_dict, _restored)
