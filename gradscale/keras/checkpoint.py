"""Checkpoints of a scale as plain numbers: the JSON that every engine reads and writes.

Files of Keras (`.keras`, weights of an optimizer) have the scale in them and need nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras import ops

from gradscale.checkpoints.numbers import Counts, load_policy, restored, written
from gradscale.keras.optimizer import LossScaleOptimizer

__all__ = ["load_policy", "load_state_dict", "state_dict"]


def state_dict(optimizer: LossScaleOptimizer) -> dict[str, Any]:
    """Returns the checkpoint of the scale: numbers, strings and dicts. **Waits for the device**."""
    state, last = optimizer._layout.read(optimizer._values())
    fields = {name: _number(value) for name, value in state._asdict().items()}
    skipped = _number(last.outcome.skipped_in_a_row)
    return written(
        optimizer.policy, fields, Counts(skipped, _number(last.steps), _number(last.bad_losses))
    )


def load_state_dict(optimizer: LossScaleOptimizer, saved: Mapping[str, Any]) -> None:
    """Loads the numbers of a checkpoint of any engine or of another known system.

    The settings stay those of the optimizer's policy; `load_policy` reads those of the checkpoint.
    If the checkpoint has another policy, only the scale is loaded.

    Raises:
        StateError: The checkpoint cannot be read.
    """
    layout = optimizer._layout
    numbers, counts = restored(optimizer.policy, saved)
    state, last = layout.read(optimizer._values())
    pairs = zip(state, numbers, strict=True)
    state = type(state)(*(ops.full_like(tensor, number) for tensor, number in pairs))
    flags, skipped = last.ints[:4], last.ints[7:]
    counted = ops.convert_to_tensor(list(counts), dtype="int32")
    ints = ops.concatenate([flags, counted, skipped])
    optimizer._assign(layout.write(state, last._replace(ints=ints)))


def _number(value: Any) -> Any:
    return ops.convert_to_numpy(value).item()
