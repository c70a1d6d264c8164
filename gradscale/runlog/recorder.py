"""Events and log lines of steps, for the monitors of engines: plain numbers.

An engine brings the numbers of a step to the host, in its own way, and hands them to `take()`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from gradscale.errors import StuckError, caller_level
from gradscale.formats import Format
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
from gradscale.runlog.lines import VERSION, finding_line
from gradscale.runlog.writer import MAX_STEPS, RunLog

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


class Recorder:
    """Converts steps to events and to lines of a run log, and reports a run that is stuck.

    Args:
        floor: The smallest scale that the policy allows.
        format: The narrowest format of the backward pass.
        on_event: Called with every `Event`.
        on_stuck: After `stuck_after` consecutive skipped steps: "warn", "raise" or "ignore".
        stuck_after: Number of consecutive skipped steps after which the run is stuck.
    """

    def __init__(
        self,
        floor: float,
        format: Format,
        *,
        on_event: Callable[[Event], object] | None = None,
        on_stuck: str = "warn",
        stuck_after: int = 50,
    ) -> None:
        self._floor, self._format = floor, format
        self._on_event, self._on_stuck = on_event, as_on_stuck(on_stuck)
        self._tracker = Tracker(stuck_after)
        self._rules = RecordRules(stuck_after=stuck_after)
        self._log: RunLog | None = None
        self._rank: int | None = None

    @property
    def history(self) -> list[tuple[int, float, str]]:
        """The last events as (step, scale, event name), oldest first."""
        return list(self._tracker.history)

    def restore(self, skipped_in_a_row: int) -> None:
        """Starts with this number of consecutive skipped steps, of an earlier run."""
        self._tracker.restore((skipped_in_a_row,))

    def log_to(
        self,
        path: str | os.PathLike[str],
        *,
        version: str,
        engine: str,
        rank: int = 0,
        world_size: int = 1,
        settings: Mapping[str, Any],
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Writes every further step to the folder `path`.

        Args:
            path: The folder of the run.
            version: The version of gradscale.
            engine: The framework and its version.
            rank: The number of this process.
            world_size: The number of processes.
            settings: The settings of the run for the first line of the log.
            max_steps: Number of applied steps to keep, evenly thinned; all skipped steps are kept.
        """
        self._log = RunLog(path, rank, max_steps=max_steps)
        self._rank = rank if world_size > 1 else None
        self._log.write(
            {
                "kind": "run",
                "version": VERSION,
                "gradscale": version,
                "engine": engine,
                "rank": rank,
                "world_size": world_size,
                "time": time.time(),
                "settings": {
                    "format": self._format.name,
                    "stuck_after": self._tracker.stuck_after,
                    **settings,
                },
            }
        )

    def take(
        self,
        number: int,
        scale: float,
        values: Mapping[str, Any],
        *,
        outcome: Any = None,
        loss: float | None = None,
    ) -> None:
        """Takes one step: writes it to the log, then delivers its events.

        Args:
            number: The number of the step, from 1.
            scale: The scale after the step.
            values: The fields of the outcome as plain numbers, by name.
            outcome: The outcome that events get.
            loss: The loss of the step; None if it is unknown.

        Raises:
            StuckError: Too many consecutive steps were skipped, and `on_stuck` is "raise".
        """
        move = Move(0, values["scale"], scale, self._floor)
        skipped = values["skipped_in_a_row"]
        step = Step(0, values["applied"], values["loss_finite"], skipped, outcome)
        events = self._tracker.events(StepRecord(number, scale, (step,), (move,)))
        if self._log is not None:
            for line in self._lines(number, move, values, loss, events):
                self._log.write(line)
        for event in events:
            if self._on_event is not None:
                self._on_event(event)
            if event.name == "stuck" and self._on_stuck != "ignore":
                message = stuck_message(skipped, values["scale"], self._verdict(values))
                if self._on_stuck == "raise":
                    raise StuckError(message)
                warnings.warn(message, stacklevel=caller_level())

    def flush(self) -> None:
        """Waits for the disk."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Flushes and closes the log; later steps are not written."""
        if self._log is not None:
            self._log.close()

    def _verdict(self, values: Mapping[str, Any]) -> str:
        """Why a step was skipped."""
        return verdict(
            applied=values["applied"],
            finite=values["finite"],
            scale=values["scale"],
            loss_finite=values["loss_finite"],
            floor=self._floor,
            format=self._format,
            skipped_in_a_row=values["skipped_in_a_row"],
        )

    def _lines(
        self,
        number: int,
        move: Move,
        values: Mapping[str, Any],
        loss: float | None,
        events: list[Event],
    ) -> list[dict[str, Any]]:
        """The lines of a step: the step, its events, what was found."""
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
        found = self._rules.take(line)
        return lines + [finding_line(finding._replace(rank=self._rank)) for finding in found]
