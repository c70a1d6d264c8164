"""Events and the run log of compiled steps, on the host: only where they are asked for."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gradscale import __version__
from gradscale.errors import SettingError, caller_level
from gradscale.jax.measurement import format_of
from gradscale.jax.optimizer import Record
from gradscale.monitor import (
    Event,
    Move,
    Step,
    StepRecord,
    Tracker,
    as_on_stuck,
    stuck_message,
    verdict,
)
from gradscale.monitor.findings import RecordRules
from gradscale.policy import Policy, as_policy
from gradscale.runlog import VERSION, RunLog, finding_line
from gradscale.runlog.writer import MAX_STEPS

LOGGED = (
    "applied",
    "loss_finite",
    "skipped_in_a_row",
    "scale",
    "grad_norm",
    "amax",
    "headroom",
)
"""What the log has of an outcome."""
_RECENT = 64
"""Numbers of steps that are remembered: every shard may tell of a step."""


class Monitor:
    """Listens to the steps of `scaled(..., on_step=monitor)`: events, and a run log.

        monitor = Monitor(policy, "runs/first", on_event=lambda event: print(event))
        optimizer = scaled(optax.adamw(3e-4), policy, on_step=monitor)
        ...
        monitor.flush()

    Steps are told by a callback of JAX, in their order, while the next ones run; inside `vmap` the
    members cannot be told apart. `gradscale report runs/first` reads the log, as it does those of
    other engines.

    Args:
        policy: The policy of the optimizer.
        path: The folder of the run; None writes no log.
        on_event: Called with every `Event`.
        on_stuck: After `stuck_after` skipped steps in a row: "warn" or "ignore".
        stuck_after: How many skipped steps in a row are too many.
        max_steps: How many applied steps the log keeps, evenly; skipped ones are all kept.
        settings: Further settings of the run for the first line of the log.
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
        self._policy = as_policy(policy)
        self._format, self._on_event = format_of(self._policy), on_event
        if as_on_stuck(on_stuck) == "raise":
            raise SettingError(
                "on_stuck must be 'warn' or 'ignore', got 'raise': an error in a callback would "
                "not end the step. Read outcome_of(opt_state).skipped_in_a_row instead."
            )
        self._warns = on_stuck == "warn"
        self._tracker = Tracker(stuck_after)
        self._rules = RecordRules(stuck_after=stuck_after)
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._log: RunLog | None = None
        if path is None:
            return
        rank, world = jax.process_index(), jax.process_count()
        self._log = RunLog(path, rank, max_steps=max_steps)
        known = {"policy": repr(self._policy), "format": self._format.name}
        self._log.write(
            {
                "kind": "run",
                "version": VERSION,
                "gradscale": __version__,
                "engine": f"jax {jax.__version__}",
                "rank": rank,
                "world_size": world,
                "time": time.time(),
                "settings": {
                    **known,
                    "device": jax.default_backend(),
                    "stuck_after": stuck_after,
                    **(settings or {}),
                },
            }
        )

    @property
    def history(self) -> list[tuple[int, float, str]]:
        """(step, scale, name) of the last events, oldest first."""
        return list(self._tracker.history)

    def __call__(self, record: Record) -> None:
        """Takes a record, as numbers or arrays on the host."""
        number, outcome = int(record.step), record.outcome
        if number in self._recent:
            return
        self._recent.append(number)
        floor = getattr(self._policy, "min_scale", 0.0)
        values = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in outcome._asdict().items()
            if value is not None
        }
        move = Move(0, values["scale"], float(record.scale), float(floor))
        step = Step(
            0, values["applied"], values["loss_finite"], values["skipped_in_a_row"], outcome
        )
        events = self._tracker.events(StepRecord(number, float(record.scale), (step,), (move,)))
        if self._log is not None:
            loss = None if record.value is None else float(record.value)
            self._write(number, move, values, loss, events)
        for event in events:
            if event.name == "stuck" and self._warns:
                why = self._verdict(values)
                message = stuck_message(values["skipped_in_a_row"], values["scale"], why)
                warnings.warn(message, stacklevel=caller_level())
            if self._on_event is not None:
                self._on_event(event)

    def flush(self) -> None:
        """Waits for the steps that are still running, and for the disk."""
        jax.effects_barrier()
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Flushes and closes the log; later steps are no longer written."""
        self.flush()
        if self._log is not None:
            self._log.close()

    def _verdict(self, values: Mapping[str, Any]) -> str:
        """Why a step was skipped."""
        return verdict(
            applied=values["applied"],
            finite=values["finite"],
            scale=values["scale"],
            loss_finite=values["loss_finite"],
            floor=getattr(self._policy, "min_scale", 0.0),
            format=self._format,
            skipped_in_a_row=values["skipped_in_a_row"],
        )

    def _write(
        self,
        number: int,
        move: Move,
        values: Mapping[str, Any],
        loss: float | None,
        events: list[Event],
    ) -> None:
        """Writes the lines of a step to the log: the step, its events, what was found."""
        step = {"optimizer": 0} | {name: values[name] for name in LOGGED}
        if not values["applied"]:
            step |= {"verdict": self._verdict(values), "culprits": []}
        line: dict[str, Any] = {
            "kind": "step",
            "step": number,
            "time": time.time(),
            "scale": move.after,
            **({} if loss is None else {"loss": loss}),
            "steps": [step],
            "moves": [list(move)] if move.before != move.after else [],
        }
        lines = [line]
        for event in events:
            made = {"kind": "event", "step": number, "name": event.name, "scale": event.scale}
            lines.append({**made, "loss_id": event.loss_id})
        rank = jax.process_index() if jax.process_count() > 1 else None
        found = self._rules.take(line)
        lines += [finding_line(finding._replace(rank=rank)) for finding in found]
        for each in lines:
            self._log.write(each)  # type: ignore[union-attr]
