"""Events and the run log of compiled steps, on the host: only where they are asked for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gradscale import __version__
from gradscale.errors import SettingError
from gradscale.jax.measurement import format_of
from gradscale.jax.optimizer import Record
from gradscale.monitor import Event, as_on_stuck
from gradscale.policy import Policy, as_policy
from gradscale.runlog import Recorder
from gradscale.runlog.writer import MAX_STEPS

_RECENT = 64
"""Numbers of steps that are remembered: every shard may tell of a step."""


class Monitor:
    """Receives the steps of `scaled(..., on_step=monitor)`: events, and a run log.

        monitor = Monitor(policy, "runs/first", on_event=lambda event: print(event))
        optimizer = scaled(optax.adamw(3e-4), policy, on_step=monitor)
        ...
        monitor.flush()

    A callback of JAX sends the steps in order, while later ones run; inside `vmap` the members
    cannot be distinguished. `gradscale report runs/first` reads the log, as for other engines.

    Args:
        policy: The policy of the optimizer.
        path: The folder of the run; None writes no log.
        on_event: Called with every `Event`.
        on_stuck: After `stuck_after` consecutive skipped steps: "warn" or "ignore".
        stuck_after: Number of consecutive skipped steps after which the run is stuck.
        max_steps: Number of applied steps to keep, evenly thinned; all skipped steps are kept.
        settings: Additional settings of the run for the first line of the log.
    """

    def __init__(
        self,
        policy: Policy | str,
        path: str | os.PathLike[str] | None = None,
        *,
        on_event: Callable[[Event], object] | None = None,
        on_stuck: str = "warn",
        stuck_after: int = 50,
        max_steps: int = MAX_STEPS,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        policy = as_policy(policy)
        if as_on_stuck(on_stuck) == "raise":
            raise SettingError(
                "on_stuck must be 'warn' or 'ignore', got 'raise': an exception in a callback "
                "would not stop the training. Check outcome_of(opt_state).skipped_in_a_row "
                "instead."
            )
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._recorder = Recorder(
            float(getattr(policy, "min_scale", 0.0)),
            format_of(policy),
            on_event=on_event,
            on_stuck=on_stuck,
            stuck_after=stuck_after,
        )
        if path is not None:
            self._recorder.log_to(
                path,
                version=__version__,
                engine=f"jax {jax.__version__}",
                rank=jax.process_index(),
                world_size=jax.process_count(),
                settings={
                    "policy": repr(policy),
                    "device": jax.default_backend(),
                    **(settings or {}),
                },
                max_steps=max_steps,
            )

    @property
    def history(self) -> list[tuple[int, float, str]]:
        """The last events as (step, scale, event name), oldest first."""
        return self._recorder.history

    def __call__(self, record: Record) -> None:
        """Takes a record, as numbers or arrays on the host."""
        number, outcome = int(record.step), record.outcome
        if number in self._recent:
            return
        self._recent.append(number)
        values = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in outcome._asdict().items()
            if value is not None
        }
        loss = None if record.value is None else float(record.value)
        self._recorder.take(number, float(record.scale), values, outcome=outcome, loss=loss)

    def flush(self) -> None:
        """Waits for the steps that are still running, and for the disk.

        Call it before you go back to an earlier state: steps of the same numbers are then recorded
        again. Without it they are taken for steps that other shards have told of already.
        """
        jax.effects_barrier()
        self._recent.clear()
        self._recorder.flush()

    def close(self) -> None:
        """Flushes and closes the log; later steps are not written."""
        self.flush()
        self._recorder.close()
