"""DeepMind's jmp over the rules of gradscale: `import gradscale.compat.jmp as jmp`.

    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15))

    def train_step(params, loss_scale, batch):
        grads = jax.grad(scaled_loss)(params, loss_scale, batch)  # loss_scale.scale(loss)
        grads = loss_scale.unscale(grads)
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        params = jmp.select_tree(grads_finite, apply_optimizer(params, grads), params)
        return params, loss_scale

All public names of jmp are here, and its trajectories. docs/move/jmp-flax-mpx.md has what differs.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

try:
    import jax
except ImportError as error:
    raise ImportError(
        'gradscale.compat.jmp needs JAX: pip install "gradscale[jax]".', name="jax"
    ) from error

import jax.numpy as jnp
import numpy as np

from gradscale.compat import jax_rule
from gradscale.compat.jax_trees import all_finite, is_array, select
from gradscale.errors import SettingError, caller_level
from gradscale.formats import FLOAT32
from gradscale.policy import GradStats, Off, room_below

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]


@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale of 1: trees come back as they are."""

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return int(Off.init_scale)

    def scale(self, tree: Any) -> Any:
        """`tree` itself."""
        return tree

    def unscale(self, tree: Any) -> Any:
        """`tree` itself."""
        return tree

    def adjust(self, grads_finite: Any) -> NoOpLossScale:
        """This object."""
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never moves. It has no leaves, so `jit` takes it as a constant."""

    loss_scale: Any

    def __post_init__(self) -> None:
        if is_array(self.loss_scale) and not jax_rule.is_traced(self.loss_scale):
            # A NumPy scalar has a hash, which constants of a compiled function need.
            vars(self)["loss_scale"] = np.asarray(self.loss_scale)[()]

    def scale(self, tree: Any) -> Any:
        """`tree`, every leaf multiplied by `loss_scale`."""
        jax_rule.check_scales("loss_scale", self.loss_scale)
        return jax.tree_util.tree_map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree: Any) -> Any:
        """`tree`, every leaf divided by `loss_scale`."""
        jax_rule.check_scales("loss_scale", self.loss_scale)
        return jax.tree_util.tree_map(lambda x: x / self.loss_scale, tree)

    def adjust(self, grads_finite: Any) -> StaticLossScale:
        """This object."""
        return self


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that `gradscale.Dynamic` moves.

        if grads_finite:
            counter += 1
            if counter >= period:
                counter = 0
                loss_scale = loss_scale * factor, if that is finite in the format of loss_scale
        else:
            counter = 0
            loss_scale = max(loss_scale / factor, min_loss_scale)

    The leaves are `loss_scale`, which keeps its format, and `counter`; the others are settings.

    >>> scale = DynamicLossScale(jnp.float32(8.0), period=2, min_loss_scale=0.25)
    >>> scale = scale.adjust(jnp.bool_(True)).adjust(jnp.bool_(True))
    >>> float(scale.loss_scale), float(scale.adjust(jnp.bool_(False)).loss_scale)
    (16.0, 8.0)
    """

    loss_scale: Any
    """The loss is multiplied by this."""
    counter: Any = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    """Consecutive finite steps since the scale last grew (int32)."""
    period: int = 2000
    """The scale grows on the step that makes so many."""
    factor: float = 2
    """What it is multiplied or divided by."""
    min_loss_scale: Any = dataclasses.field(default_factory=lambda: np.float32(1.0))
    """The floor; 0 means the smallest normal number of the format of `loss_scale`."""

    def __post_init__(self) -> None:
        floor = _floating("min_loss_scale", self.min_loss_scale)
        if not jax_rule.is_traced(floor):
            floor = np.float32(jax_rule.lower_bound("min_loss_scale", floor))
        settings = {
            "loss_scale": _floating("loss_scale", self.loss_scale),
            "counter": jax_rule.concrete(self.counter, np.int32),
            "period": jax_rule.whole("period", self.period),
            "factor": jax_rule.factor("factor", self.factor, 1.0, FLOAT32.max),
            "min_loss_scale": floor,
        }
        jax_rule.check_scales("loss_scale", settings["loss_scale"])
        vars(self).update(settings)

    def scale(self, tree: Any) -> Any:
        """`tree`, every leaf multiplied by `loss_scale`."""
        return jax.tree_util.tree_map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree: Any) -> Any:
        """`tree`, every leaf divided by `loss_scale`.

        **In float16 small gradients are lost here** if `loss_scale` is float16 too: where they are,
        cast them before, or give a `loss_scale` in float32.
        """
        return jax.tree_util.tree_map(lambda x: x / self.loss_scale, tree)

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """The loss scale after a step with gradients that were finite, or not."""
        finite = jax_rule.boolean_scalar("grads_finite", grads_finite)
        held = jnp.asarray(self.loss_scale)
        limits, before = jnp.finfo(held.dtype), held.astype(jnp.float32)
        rule = jax_rule.rule(self.factor, 1 / self.factor, self.period)
        floor = jnp.maximum(
            jnp.asarray(self.min_loss_scale, jnp.float32), jnp.float32(limits.smallest_normal)
        )
        scale, counter = jax_rule.advance(rule, held, self.counter, GradStats(finite), floor)
        # In float32: compiled code may compute in more than float16, where nothing overflows.
        room = min(room_below(self.factor), float(limits.max) / self.factor)
        scale = jnp.where(finite & (before > room), before, scale)
        moved = {"loss_scale": scale.astype(held.dtype), "counter": counter}
        return self._with(vars(self) | moved)

    @classmethod
    def _with(cls, fields: dict[str, Any]) -> DynamicLossScale:
        """An object with these fields; none is read, since JAX may put anything there."""
        made = object.__new__(cls)
        vars(made).update(fields)
        return made

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The leaves, and the settings; a floor that was traced is a leaf."""
        leaves, settings = (self.loss_scale, self.counter), (self.period, self.factor)
        if isinstance(self.min_loss_scale, np.generic):
            return leaves, (*settings, self.min_loss_scale)
        return (*leaves, self.min_loss_scale), settings

    @classmethod
    def tree_unflatten(cls, settings: tuple[Any, ...], leaves: tuple[Any, ...]) -> DynamicLossScale:
        """The object with these parts."""
        loss_scale, counter, *traced = leaves
        names = (field.name for field in dataclasses.fields(cls))
        period, factor, *constant = settings
        values = (loss_scale, counter, period, factor, *traced, *constant)
        return cls._with(dict(zip(names, values, strict=True)))


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale

for _constant in (NoOpLossScale, StaticLossScale):
    jax.tree_util.register_pytree_node(_constant, lambda self: ((), self), lambda self, _: self)


def _floating(name: str, value: Any) -> Any:
    """`value`, as float32 if it is a Python number, or after a warning if not floating."""
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(
            f"Expected floating type for {name}, got {dtype}. It is taken as float32.",
            stacklevel=caller_level(),
        )
        return jnp.asarray(value, jnp.float32)
    return jax_rule.concrete(value, np.float32)


def select_tree(pred: Any, a: Any, b: Any) -> Any:
    """`a` where the boolean scalar `pred` is true, else `b`, leaf by leaf."""
    return select(pred, a, b, lambda leaf: True)


_NAMES = {
    "full": jnp.float32,
    "f32": jnp.float32,
    "float32": jnp.float32,
    "f16": jnp.float16,
    "float16": jnp.float16,
    "bf16": jnp.bfloat16,
    "bfloat16": jnp.bfloat16,
    "f64": jnp.float64,
    "float64": jnp.float64,
}
_KEYS = {"p": "params", "c": "compute", "o": "output"}


@dataclasses.dataclass(frozen=True)
class Policy:
    """The formats of parameters, computation and output.

    >>> policy = get_policy("params=full,compute=f16")
    >>> str(policy), policy.cast_to_compute({"w": jnp.ones(1)})["w"].dtype.name
    ('p=full,c=f16,o=f16', 'float16')
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def cast_to_param(self, x: Any) -> Any:
        """The tree `x` with floating arrays in `param_dtype`."""
        return _cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: Any) -> Any:
        """The tree `x` with floating arrays in `compute_dtype`."""
        return _cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: Any) -> Any:
        """The tree `x` with floating arrays in `output_dtype`."""
        return _cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """This policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        formats = (self.param_dtype, self.compute_dtype, self.output_dtype)
        names = (_short_name(dtype) for dtype in formats)
        return ",".join(f"{key}={name}" for key, name in zip(_KEYS, names, strict=True))


def _short_name(dtype: Any) -> str:
    wanted = jnp.dtype(dtype)
    known = (name for name, named in _NAMES.items() if jnp.dtype(named) == wanted)
    return next(known, wanted.name)


def get_policy(policy_name: str) -> Policy:
    """The policy that a string describes.

    "half" is one format for everything; "c=f16" or "compute=f16" sets one of p(arams), c(ompute)
    and o(utput), separated by commas. Parameters are float32 unless set, computation has the format
    of parameters, and output that of computation.
    """
    if "=" not in policy_name:
        dtype = _dtype_named(policy_name)
        return Policy(dtype, dtype, dtype)
    found: dict[str, Any] = {}
    for part in policy_name.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        key = _KEYS.get(key, key)
        if key not in _KEYS.values():
            raise SettingError(
                f"Unknown key '{key}' in '{policy_name}': it must be 'params', 'compute' or "
                "'output', or the first letter of one."
            )
        found[key] = _dtype_named(value)
    params = found.get("params", jnp.float32)
    compute = found.get("compute", params)
    return Policy(params, compute, found.get("output", compute))


def _dtype_named(name: str) -> Any:
    dtype = half_dtype() if name.strip() == "half" else _NAMES.get(name.strip())
    if dtype is None:
        raise SettingError(f"Unknown dtype '{name}': it must be one of half, {', '.join(_NAMES)}.")
    return dtype


def half_dtype() -> Any:
    """bfloat16 on TPUs, else float16."""
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def cast_to_half(tree: Any) -> Any:
    """`tree` with floating arrays in `half_dtype()`."""
    return _cast_floating(tree, half_dtype())


def cast_to_full(tree: Any) -> Any:
    """`tree` with floating arrays in float32."""
    return _cast_floating(tree, jnp.float32)


def _cast_floating(tree: Any, dtype: Any) -> Any:
    def cast(x: Any) -> Any:
        return x.astype(dtype) if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree_util.tree_map(cast, tree)
