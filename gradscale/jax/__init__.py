"""The JAX engine: pure functions over pytrees, and a wrapper for optax optimizers.

    optimizer = scaled(optax.adamw(3e-4), gradscale.Headroom(), clip_norm=1.0)

The scale is an array in a state that the caller carries, so a step is compiled once however the
scale moves. The functions have no state of their own and read nothing back to the host.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError('gradscale.jax needs JAX: pip install "gradscale[jax]".') from error

from gradscale.jax.checkpoint import load_policy, load_state_dict, state_dict
from gradscale.jax.gradients import (
    applies,
    grad,
    init,
    scaled_value_and_grad,
    select,
    update,
    value_and_grad,
)
from gradscale.jax.measurement import measure, unscale
from gradscale.jax.monitor import Monitor
from gradscale.jax.optimizer import outcome_of, scale_of, scaled
from gradscale.jax.precision import Precision
from gradscale.jax.state import ScaledState
from gradscale.monitor import Event, Outcome

__all__ = [
    "Event",
    "Monitor",
    "Outcome",
    "Precision",
    "ScaledState",
    "applies",
    "grad",
    "init",
    "load_policy",
    "load_state_dict",
    "measure",
    "outcome_of",
    "scale_of",
    "scaled",
    "scaled_value_and_grad",
    "select",
    "state_dict",
    "unscale",
    "update",
    "value_and_grad",
]
