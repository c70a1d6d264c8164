"""The Keras engine: `LossScaleOptimizer` for Keras 3 on TensorFlow, JAX or torch.

    model.compile(LossScaleOptimizer(keras.optimizers.Adam(1e-3), policy="headroom"), loss="mse")

It replaces `keras.optimizers.LossScaleOptimizer` and takes the same arguments.
"""

try:
    import keras as _keras  # noqa: F401
except ImportError as error:
    raise ImportError('gradscale.keras needs Keras: pip install "gradscale[keras]".') from error

from gradscale.keras.checkpoint import load_policy, load_state_dict, state_dict
from gradscale.keras.monitor import Monitor
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.monitor import Event, Outcome

__all__ = [
    "Event",
    "LossScaleOptimizer",
    "Monitor",
    "Outcome",
    "load_policy",
    "load_state_dict",
    "state_dict",
]
