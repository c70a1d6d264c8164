"""`tf.keras.mixed_precision` of TensorFlow 2 over the rules of gradscale, for Keras 3.

    from gradscale.compat import tf_keras as mixed_precision

    mixed_precision.set_global_policy("mixed_float16")
    optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.Adam())

    with tf.GradientTape() as tape:
        loss = loss_fn(model(x, training=True), y)
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

Keras 3 has neither `get_scaled_loss` nor `get_unscaled_gradients`. docs/move/keras.md lists the
differences.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

try:
    import keras
except ImportError as error:
    raise ImportError(
        'gradscale.compat.tf_keras needs Keras: pip install "gradscale[keras]".', name="keras"
    ) from error

from keras.mixed_precision import Policy, global_policy, set_global_policy

from gradscale import policy as rules
from gradscale.errors import SettingError, caller_level
from gradscale.keras import optimizer as engine
from gradscale.keras import replicas
from gradscale.keras.measurement import Found, divided, either
from gradscale.policy.settings import as_flag

__all__ = ["LossScaleOptimizer", "Policy", "global_policy", "set_global_policy"]


class _Passes(threading.local):
    """How far each optimizer has come, on this thread: every replica has a thread of its own."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """`_SCALED` after `get_scaled_loss`, `_BY_FIT` after `scale_loss`."""
        self.found: weakref.WeakKeyDictionary[Any, Found] = weakref.WeakKeyDictionary()
        """What `get_unscaled_gradients` found since the last step, in all of its calls."""


_SCALED, _BY_FIT = "scaled", "by fit"
_passes = _Passes()
"""Not an attribute: optimizers are copied and saved."""


@keras.saving.register_keras_serializable(package="gradscale.tf_keras")
class LossScaleOptimizer(engine.LossScaleOptimizer):
    """The class of TensorFlow 2: `apply_gradients` takes gradients that were unscaled before.

    `fit` works as well. `apply` is that of Keras 3 and takes scaled gradients.

    Args:
        inner_optimizer: The optimizer of Keras to wrap.
        dynamic: Whether the scale moves.
        initial_scale: The first scale; 2**15 if `dynamic` and not given.
        dynamic_growth_steps: Finite steps in a row after which the scale is doubled; 2000 if
            `dynamic` and not given.
        policy: The rule that moves the scale, or its name, in place of the three settings above.
        clip_norm: The largest norm of all unscaled gradients together.
        kwargs: Arguments of Keras' class, such as `name`.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        policy: rules.Policy | str | None = None,
        clip_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        settings: dict[str, Any] = {"policy": policy}
        if not as_flag("dynamic", dynamic):
            if initial_scale is None or dynamic_growth_steps is not None or policy is not None:
                raise SettingError(
                    "dynamic=False requires initial_scale and does not allow dynamic_growth_steps "
                    f"or policy, got initial_scale={initial_scale!r}, "
                    f"dynamic_growth_steps={dynamic_growth_steps!r} and policy={policy!r}."
                )
            settings["policy"] = rules.Static(float(initial_scale), exact=False)
        else:
            settings |= {} if initial_scale is None else {"initial_scale": initial_scale}
            if dynamic_growth_steps is not None:
                settings["dynamic_growth_steps"] = dynamic_growth_steps
        super().__init__(inner_optimizer, clip_norm=clip_norm, **settings, **kwargs)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(self.policy, rules.Static | rules.Off)

    @property
    def loss_scale(self) -> Any:
        """float32: the scale."""
        return keras.ops.copy(self.dynamic_scale)

    @property
    def dynamic_counter(self) -> Any:
        """int32: finite steps in a row since the scale last moved; None if it does not move."""
        return keras.ops.copy(self.step_counter) if self.dynamic else None

    def get_scaled_loss(self, loss: Any) -> Any:
        """`loss` times the scale, in float32; of a function, one that returns its scaled result."""
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        _passes.of[self] = _SCALED
        return super().scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """`grads` divided by the scale; None where there is none."""
        if keras.backend.backend() == "tensorflow":
            return replicas.unconverted(lambda: self._unscaled(list(grads)))
        return self._unscaled(list(grads))

    def scale_loss(self, loss: Any) -> Any:
        """The same as `get_scaled_loss`, for `fit`, which hands over scaled gradients."""
        _passes.of[self] = _BY_FIT
        return super().scale_loss(loss)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Applies gradients from `get_unscaled_gradients`, or skips the step; moves the scale.

        Returns:
            The number of steps that were applied.
        """
        if not experimental_aggregate_gradients:
            raise SettingError(
                "experimental_aggregate_gradients must be True, got False: Keras 3 always sums the "
                "gradients of replicas."
            )
        pairs = list(grads_and_vars)
        grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
        before, found = _passes.of.pop(self, None), _passes.found.pop(self, None)
        if before is _SCALED:
            warnings.warn(
                "apply_gradients() expects unscaled gradients, but get_unscaled_gradients() was "
                "not called after get_scaled_loss(). Call it with the gradients of the scaled "
                "loss.",
                stacklevel=caller_level(),
            )
        if before is _BY_FIT:
            self._apply(grads, variables)
        else:
            found = found if found is not None and _is_present(found) else None
            self._apply(grads, variables, unscaled=engine.Unscaled(found))
        return self.iterations

    def minimize(
        self,
        loss: Any | Callable[[], Any],
        var_list: Any,
        grad_loss: Any = None,
        name: str | None = None,
        tape: Any = None,
    ) -> Any:
        """Scales the loss, takes its gradients, unscales and applies them. On TensorFlow only.

        Args:
            loss: A function that returns the loss, or a tensor that was computed under `tape`.
            var_list: The variables, or a function that returns them.
            grad_loss: The gradient of the scaled loss, if it is not 1.
            name: Not used.
            tape: The tape of a tensor.
        """
        import tensorflow as tf

        if not callable(loss) and tape is None:
            raise ValueError("`tape` is required when a `Tensor` loss is passed.")
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            scaled = self.get_scaled_loss(loss() if callable(loss) else loss)
        variables = var_list() if callable(var_list) else var_list
        grads = tape.gradient(scaled, variables, grad_loss)
        return self.apply_gradients(zip(self.get_unscaled_gradients(grads), variables, strict=True))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """The optimizer that `get_config` describes, here or of TensorFlow 2."""
        config = {name: value for name, value in config.items() if value is not None}
        return super().from_config(config, custom_objects)

    def _unscaled(self, grads: list[Any]) -> list[Any]:
        scale = keras.ops.copy(self.dynamic_scale)
        known = self._trainable_variables if self.built else []
        if len(known) != len(grads):
            # The variables are not given; gradients have the types of float32 variables.
            known = grads
        pairs = [(g, v) for g, v in zip(grads, known, strict=True) if g is not None]
        found, before = self._found(pairs, scale), _passes.found.get(self)
        if before is not None and _is_present(before):
            # Gradients of several backward passes, or of several groups of variables.
            found = either(before, found)
        _passes.of.pop(self, None)
        _passes.found[self] = found
        return [None if g is None else divided(g, scale) for g in grads]


def _is_present(found: Found) -> bool:
    """Whether what was found can be used here: a traced function may have returned since."""
    if keras.backend.backend() != "tensorflow":
        return True
    return all(replicas.is_present(value) for value in found)
