"""A callback for `fit`: scale, skipped steps and headroom among the logs, events, a run log."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
from keras import ops

from gradscale import __version__
from gradscale.errors import SettingError
from gradscale.formats import FLOAT16, Format
from gradscale.keras.measurement import format_of
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.monitor import Event
from gradscale.runlog import Recorder
from gradscale.runlog.writer import MAX_STEPS


class Monitor(keras.callbacks.Callback):
    """Reports the steps of a `LossScaleOptimizer` while `fit` runs.

        model.fit(x, y, callbacks=[Monitor("runs/first")])

    The logs of an epoch get `scale` (at the end of the epoch), `skipped` (number of skipped steps
    in it) and `headroom` (the smallest of its applied steps, in binades); so do `History`,
    `CSVLogger` and other callbacks after it in the list. `gradscale report runs/first` reads the
    run log.

    Reading the outcome waits for the device after every batch. With `steps_per_execution` the
    callback runs after several steps: the log has the last of them, `skipped` counts all.

    Args:
        path: The folder of the run; None writes no log.
        on_event: Called with every `Event`.
        on_stuck: After `stuck_after` consecutive skipped steps: "warn", "raise" (which ends `fit`
            with a `StuckError`) or "ignore".
        stuck_after: Number of consecutive skipped steps after which the run is stuck.
        max_steps: Number of applied steps to keep, evenly thinned; all skipped steps are kept.
        settings: Additional settings of the run for the first line of the log.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        on_event: Callable[[Event], object] | None = None,
        on_stuck: str = "warn",
        stuck_after: int = 50,
        max_steps: int = MAX_STEPS,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._path, self._max_steps, self._settings = path, max_steps, dict(settings or {})
        self._make: Callable[[float, Format], Recorder] = partial(
            Recorder, on_event=on_event, on_stuck=on_stuck, stuck_after=stuck_after
        )
        self._make(0.0, FLOAT16)  # Wrong settings are found here rather than in fit().
        self._recorder: Recorder | None = None
        self._skipped, self._skipped_before, self._headroom = 0, 0, math.inf

    @property
    def history(self) -> list[tuple[int, float, str]]:
        """The last events as (step, scale, event name), oldest first."""
        return [] if self._recorder is None else self._recorder.history

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the log, if this is the first training."""
        optimizer = self._optimizer()
        self._skipped_before = self._skipped = optimizer._last().on_host().skipped
        if self._recorder is not None:
            return
        policy = optimizer.policy
        floor = float(getattr(policy, "min_scale", 0.0))
        self._recorder = self._make(floor, format_of(policy))
        self._recorder.restore(optimizer._last().on_host().outcome.skipped_in_a_row)
        if self._path is not None:
            backend = keras.backend.backend()
            self._recorder.log_to(
                self._path,
                version=__version__,
                engine=f"keras {keras.__version__}, {backend}",
                rank=int(os.environ.get("RANK", "0")),
                world_size=int(os.environ.get("WORLD_SIZE", "1")),
                settings={"policy": repr(policy), **self._settings},
                max_steps=self._max_steps,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Resets the counters of the epoch."""
        self._skipped_before, self._headroom = self._skipped, math.inf

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Records the last step. **Waits for the device**."""
        optimizer = self._optimizer()
        outcome, number, self._skipped = optimizer._last().on_host()
        if outcome.applied:
            self._headroom = min(self._headroom, outcome.headroom)
        if self._recorder is not None:
            scale = _number(optimizer.dynamic_scale)
            self._recorder.take(number, scale, outcome._asdict(), outcome=outcome)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds values to the logs of the epoch."""
        if logs is not None:
            logs["scale"] = _number(self._optimizer().dynamic_scale)
            logs["skipped"] = self._skipped - self._skipped_before
            logs["headroom"] = self._headroom

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the disk."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Flushes and closes the log; later steps are not written."""
        if self._recorder is not None:
            self._recorder.close()

    def _optimizer(self) -> LossScaleOptimizer:
        """The optimizer of the model, with the present values of its variables."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            raise SettingError(
                "Monitor needs a model whose optimizer is a gradscale.keras.LossScaleOptimizer, "
                f"got {type(optimizer).__module__}.{type(optimizer).__name__}. Pass "
                "LossScaleOptimizer(optimizer) to compile()."
            )
        return optimizer


def _number(variable: Any) -> float:
    return float(ops.convert_to_numpy(ops.copy(variable)))
