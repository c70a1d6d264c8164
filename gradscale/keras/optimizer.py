"""LossScaleOptimizer: unscales, checks, clips, steps or skips, and moves the scale by a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from gradscale.checkpoints.policies import policy_of, settings_of, state_of
from gradscale.checkpoints.saved import Saved
from gradscale.errors import SettingError, StateError
from gradscale.keras import replicas
from gradscale.keras.measurement import (
    Found,
    Gradient,
    applies,
    divided,
    dtype_of,
    format_of,
    joined,
    measured,
    placed,
    stats_from,
    stored_format,
)
from gradscale.keras.variables import Last, Layout
from gradscale.monitor import Outcome
from gradscale.policy import POLICIES, Dynamic, GradStats, Policy, as_policy
from gradscale.policy.losses import with_patience
from gradscale.policy.settings import as_count, as_number, as_scale, given, listed

INITIAL_SCALE = 2.0**15
"""Keras' default."""
GROWTH_STEPS = 2000
"""Keras' default."""


class Unscaled(NamedTuple):
    """Marks gradients that the caller has unscaled."""

    found: Found | None = None
    """What was found in the scaled ones, on this replica; None where it is not known."""


@keras.saving.register_keras_serializable(package="gradscale")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Wraps a Keras optimizer: scales the loss, and skips steps that are not finite.

        adam = keras.optimizers.Adam(1e-3)
        model.compile(LossScaleOptimizer(adam, policy="headroom", clip_norm=1.0), loss="mse")

    It is a subclass of Keras' class, so `compile` does not wrap it again. A skipped step changes
    neither `inner_optimizer` nor the variables of the model. Under `tf.distribute`, a gradient that
    is not finite on one replica skips the step on all of them.

    Args:
        inner_optimizer: The optimizer to wrap.
        initial_scale: Keras' name for `init_scale` of `Dynamic`; used without a `policy`.
        dynamic_growth_steps: Keras' name for its `growth_interval`.
        name: The name of the optimizer.
        policy: The policy that moves the scale, or its name; None: `Dynamic` with the two settings
            above, which need not be powers of two.
        clip_norm: Largest norm of all unscaled gradients together; larger ones are scaled down.
            With `gradient_accumulation_steps` the gradients of each micro-batch are clipped; use
            `global_clipnorm` of `inner_optimizer` to clip their mean.
        **kwargs: Arguments of Keras' class that are in its configurations.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = INITIAL_SCALE,
        dynamic_growth_steps: int = GROWTH_STEPS,
        name: str | None = None,
        *,
        policy: Policy | str | None = None,
        clip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        chosen = _chosen(policy, initial_scale, dynamic_growth_steps)
        growth_steps = getattr(chosen, "growth_interval", GROWTH_STEPS)
        _check_inner(inner_optimizer)
        super().__init__(inner_optimizer, chosen.init_scale, growth_steps, name, **kwargs)
        self.policy = chosen
        """The rule that moves the scale."""
        self.clip_norm = None if clip_norm is None else as_number("clip_norm", clip_norm)
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise SettingError(f"clip_norm must be finite and > 0, got {clip_norm!r}.")
        self._is_keras_rule = policy is None
        self._layout = Layout(chosen)
        specs = self._layout.specs(chosen.init())
        self._names = [spec.name for spec in specs]
        # Not in build(): a function that is traced before would scale by a constant ever after.
        for name, dtype, first in specs:
            made = self.add_variable(
                shape=(len(first),) if isinstance(first, list) else (),
                dtype=dtype,
                # The initializer Constant takes one number only.
                initializer=lambda shape, dtype, first=first: ops.convert_to_tensor(first, dtype),
                aggregation="none",
                name=name,
            )
            setattr(self, name, made)

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the variables of the inner optimizer for the variables of a model."""
        if self.built:
            return
        self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)

    def apply(
        self, grads: Sequence[Any], trainable_variables: Any = None, *, loss: Any = None
    ) -> None:
        """Unscales `grads`, applies them to the variables or skips the step, and moves the scale.

        Args:
            grads: Gradients of the scaled loss, one for each variable; None is ignored.
            trainable_variables: The variables; None: those that the optimizer was built with.
            loss: The unscaled loss. If it is passed and not finite, the step is skipped and the
                scale does not move.
        """
        self._apply(grads, trainable_variables, loss)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
        *,
        loss: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the values of the model's and of the optimizer's variables after `apply`.

        Args:
            optimizer_variables: The values of `variables`.
            grads: Gradients of the scaled loss.
            trainable_variables: The values of the model's variables.
            loss: The unscaled loss, as for `apply`.
        """
        lengths = (len(optimizer_variables), len(trainable_variables))
        wrong = self.built and lengths != (len(self.variables), len(self._trainable_variables))
        if wrong or not self.built or keras.backend.backend() == "tensorflow":
            # Raises Keras' error.
            return keras.optimizers.Optimizer.stateless_apply(
                self, optimizer_variables, grads, trainable_variables
            )
        own = len(self._variables)
        inner, begin = list(optimizer_variables[own:]), own - len(self._names)
        values, model = list(optimizer_variables[begin:own]), list(trainable_variables)
        stats, small = self._read(list(grads), self._trainable_variables, values, loss)
        model, inner = ops.cond(
            applies(stats),
            lambda: tuple(map(list, self.inner_optimizer.stateless_apply(inner, small, model))),
            lambda: (model, inner),
        )
        moved = self._moved(stats, values)
        return list(model), [*optimizer_variables[:begin], *moved, *inner]

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the scale: in float32, or float64 if the loss is."""
        if dtype_of(loss) in ("float16", "bfloat16"):
            loss = ops.cast(loss, "float32")
        return ops.multiply(loss, self.dynamic_scale)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the last step, as tensors. Reading one on the host waits for the device.

        Inside a compiled function, and while `fit` runs on JAX, variables have older values: read
        it in a callback, whose `model` has the current ones.
        """
        return self._last().outcome

    @property
    def num_steps(self) -> Any:
        """int32: number of steps, applied or skipped."""
        return self._last().steps

    @property
    def num_skipped(self) -> Any:
        """int32: number of skipped steps."""
        return self._last().ints[7]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all `variables`, including those of the inner optimizer.

        Raises:
            StateError: The weights are not those of such an optimizer; nothing was set.
        """
        if not self.built:
            super().set_weights(weights)  # Raises Keras' error.
        weights = list(weights)
        shapes = [tuple(getattr(weight, "shape", ())) for weight in weights]
        known = [tuple(variable.shape) for variable in self.variables]
        if shapes != known:
            raise StateError(
                f"set_weights() needs {len(known)} arrays with the shapes of optimizer.variables, "
                f"got {len(shapes)}, whose shapes are not the same. Pass the weights of an "
                "optimizer with the same policy, inner optimizer and model."
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` of this class or of Keras' class stored.

        If it was saved with another policy, the scale is all that is taken over of its state.
        """
        inner, own = self.inner_optimizer.variables, len(self._variables)
        shapes = [tuple(store[str(place)].shape) for place in range(len(store.keys()))]
        known = [tuple(variable.shape) for variable in self.variables]
        begin, same = len(shapes) - len(inner), shapes == known
        is_ours = begin > 4 and shapes[begin - 2 : begin] == known[own - 2 : own]
        inner_fits = self.built and shapes[begin:] == known[own:]
        if same or not inner_fits or not (is_ours or begin == 4):
            super().load_own_variables(store)  # Warns if it skips them.
            if same:
                self.dynamic_scale.assign(self._loaded(scale=self.dynamic_scale).scale)
            return
        # Iteration, learning rate, step counter, scale, the rest of ours, inner variables.
        values = [ops.convert_to_tensor(store[str(place)][...]) for place in range(len(shapes))]
        fields = {"scale": values[3]} if is_ours else {"good_steps": values[2], "scale": values[3]}
        for name, dtype, number in self._layout.specs(self._loaded(**fields)):
            getattr(self, name).assign(ops.convert_to_tensor(number, dtype))
        pairs = [*zip(self._variables[:2], values, strict=False)]
        pairs += zip(inner, values[begin:], strict=True)
        if is_ours:
            last = values[begin - 2 : begin]
            pairs += zip((self.outcome_floats, self.outcome_ints), last, strict=True)
        for variable, value in pairs:
            variable.assign(ops.cast(value, variable.dtype))

    def _loaded(self, **fields: Any) -> Any:
        """The state of the policy with these `fields` of a file, in plain numbers."""
        numbers = {
            name: ops.convert_to_numpy(ops.copy(each)).item() for name, each in fields.items()
        }
        return state_of(numbers, self.policy, strict=False)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as Keras writes them to files."""
        config: dict[str, Any] = super().get_config()
        if not self._is_keras_rule:
            del config["initial_scale"], config["dynamic_growth_steps"]
            settings = {
                name: float(value) if isinstance(value, float) else value
                for name, value in settings_of(self.policy).items()
            }
            name = keras.saving.get_registered_name(type(self.policy))
            config["policy"] = {"name": name, "settings": settings}
        if self.clip_norm is not None:
            config["clip_norm"] = self.clip_norm
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the optimizer described by `get_config` of this class or of Keras' class.

        Args:
            config: The configuration.
            custom_objects: Classes by name; that of the policy, if it is not one of gradscale's.
        """
        config = dict(config)
        rule = config.get("policy")
        if isinstance(rule, Mapping):
            name = rule["name"]
            kind = keras.saving.get_registered_object(name, custom_objects, POLICIES)
            if kind is None:
                raise StateError(
                    f"The policy of the optimizer that was saved must be one of gradscale's, got "
                    f"{name!r}. Pass the class of your own policy: "
                    f"keras.saving.load_model(path, custom_objects={{{name!r}: {name}}})."
                )
            saved = Saved(name, dict(rule["settings"]), {}, {})
            config["policy"] = policy_of(saved, Dynamic(), {name: kind})
        return super().from_config(config, custom_objects)

    def _last(self) -> Last:
        return Last(*map(ops.copy, (self.step_counter, self.outcome_floats, self.outcome_ints)))

    def _values(self) -> list[Any]:
        """The values of the variables of this class."""
        # Copies: on torch a value is the storage of the variable, which the next step overwrites.
        return [ops.copy(getattr(self, name)) for name in self._names]

    def _assign(self, values: Iterable[Any]) -> None:
        for name, value in zip(self._names, values, strict=True):
            getattr(self, name).assign(value)

    def _apply(
        self,
        grads: Sequence[Any],
        variables: Any,
        loss: Any = None,
        unscaled: Unscaled | None = None,
    ) -> None:
        """Applies gradients; `unscaled` if the caller has unscaled them already."""
        grads = list(grads)
        if not grads:
            return
        on_tensorflow = keras.backend.backend() == "tensorflow"
        if variables is not None:
            variables = list(variables)
        if not self.built:
            if variables is None:
                raise ValueError(
                    "When passing `grads` without `variables`, the optimizer must already be built "
                    "on a list of variables. Call `optimizer.build(trainable_variables)` first."
                )
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        if on_tensorflow:
            replicas.check_context()
            replicas.unconverted(lambda: self._step(grads, variables, loss, unscaled))
        else:
            self._step(grads, variables, loss, unscaled)

    def _step(self, grads: list[Any], variables: Any, loss: Any, unscaled: Unscaled | None) -> None:
        values = self._values()
        known = variables if variables is not None else self._trainable_variables
        stats, small = self._read(grads, known, values, loss, unscaled)
        applied, moved = applies(stats), self._moved(stats, values)
        if keras.backend.backend() == "tensorflow":
            replicas.run(self._inner_step, self._assign, applied, moved, small, variables)
            return
        if bool(applied):
            self._inner_step(small, variables)
        self._assign(moved)

    def _inner_step(self, grads: list[Any], variables: Any) -> None:
        self.inner_optimizer.apply(grads, trainable_variables=variables)

    def _read(
        self,
        grads: list[Any],
        variables: Sequence[Any],
        values: list[Any],
        loss: Any,
        unscaled: Unscaled | None = None,
    ) -> tuple[GradStats, list[Any]]:
        """What the gradients are like, and they themselves, unscaled and clipped."""
        if len(grads) != len(variables):
            raise SettingError(
                f"grads must have one entry for each variable, got {len(grads)} for "
                f"{len(variables)} variables. Pass None where there is no gradient."
            )
        scale = self._layout.read(values)[0].scale
        held = scale if unscaled is None else ops.full_like(scale, 1.0)
        fine = scale >= scale
        loss_finite = fine if loss is None else fine & ops.all(ops.isfinite(loss))
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        found = placed(self._found(pairs, held), scale, held)
        if unscaled is not None and unscaled.found is not None:
            found = joined(found, unscaled.found)
        if keras.backend.backend() == "tensorflow" and replicas.count() > 1:
            # Every replica has gradients of its own, and the inner optimizer sums them.
            norm = ops.full_like(found.norm, float("nan"))
            if self.clip_norm is not None:
                sums = replicas.summed([g for g, _ in pairs])
                in_all = [(g, v) for g, (_, v) in zip(sums, pairs, strict=True)]
                norm = placed(self._found(in_all, held), scale, held).norm
            found, loss_finite = replicas.agreed(found._replace(norm=norm), loss_finite)
        stats = stats_from(found, loss_finite)
        divisor = held
        if self.clip_norm is not None:
            one = ops.full_like(stats.norm, 1.0)
            divisor = held * ops.maximum(stats.norm / ops.full_like(one, self.clip_norm), one)
        small = [
            g if g is None or self._overwrite_variable_with_gradient(v) else divided(g, divisor)
            for g, v in zip(grads, variables, strict=True)
        ]
        return stats, small

    def _found(self, pairs: Iterable[tuple[Any, Any]], held: Any) -> Found:
        """What is found in gradients of this replica, which have the scale `held`."""
        sparse = keras.backend.backend() == "tensorflow"
        return measured(
            [
                Gradient(
                    replicas.values_of(g) if sparse else ops.convert_to_tensor(g, sparse=False),
                    stored_format(v),
                    not self._overwrite_variable_with_gradient(v),
                )
                for g, v in pairs
            ],
            held,
        )

    def _moved(self, stats: GradStats, values: list[Any]) -> list[Any]:
        """The values of the variables of this class after a step with these `stats`."""
        state, last = self._layout.read(values)
        seen, bad_losses = with_patience(stats, last.bad_losses, ops)
        after = last.after(stats, applies(stats), state.scale, bad_losses, format_of(self.policy))
        return self._layout.write(self.policy.update(state, seen, ops), after)


def _check_inner(optimizer: Any) -> None:
    """Raises a SettingError if `optimizer` cannot be wrapped."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        named = f" Pass keras.optimizers.get({optimizer!r})." if isinstance(optimizer, str) else ""
        raise SettingError(
            "inner_optimizer must be a Keras optimizer such as keras.optimizers.Adam(), got "
            f"{optimizer!r}.{named}"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        kind = type(optimizer)
        raise SettingError(
            "inner_optimizer must not be a LossScaleOptimizer, because gradients would be divided "
            f"by both scales, got {kind.__module__}.{kind.__name__}. Pass its inner_optimizer."
        )


def _chosen(policy: Any, initial_scale: Any, growth_steps: Any) -> Policy:
    """The policy for the arguments of the constructor; a SettingError if there are too many."""
    if policy is None:
        scale = as_scale("initial_scale", initial_scale, exact=False)
        steps = as_count("dynamic_growth_steps", growth_steps)
        return Dynamic(init_scale=scale, growth_interval=steps, exact=False)
    chosen = as_policy(policy)
    own: dict[str, Any] = {}
    if initial_scale != INITIAL_SCALE:
        own["init_scale"] = initial_scale
    if growth_steps != GROWTH_STEPS:
        own["growth_interval"] = growth_steps
    if own:
        call = f"gs.{type(chosen).__name__}({listed({**given(chosen), **own})})"
        raise SettingError(
            "Pass either policy or Keras' initial_scale and dynamic_growth_steps, got "
            f"policy={chosen!r}, initial_scale={initial_scale!r} and "
            f"dynamic_growth_steps={growth_steps!r}. To set them in the policy, pass policy={call}."
        )
    return chosen
