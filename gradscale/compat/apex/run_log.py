"""A run log of one loss: a line for every backward pass, with what Apex' calls make known of it."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gradscale import __version__
from gradscale.monitor import Move, Step, StepRecord, Tracker, verdict
from gradscale.monitor.findings import RecordRules
from gradscale.runlog import VERSION, RunLog, finding_line

Listener = Callable[[dict[str, Any]], object]

_logs: weakref.WeakKeyDictionary[Any, PassLog] = weakref.WeakKeyDictionary()
"""The log of every scale that has one. Not an attribute: scales are copied and pickled."""
on_first: Callable[[Any], object] | None = None
"""Called with a scale before its first pass is noted, by programs that run other people's scripts:
Apex makes scales that nobody uses."""


def log_to(scaler: Any, path: str | os.PathLike[str] | Listener) -> None:
    """Writes what every pass of `scaler` does to the folder `path`, or calls it with each line."""
    # amp is for one process or for DDP's, and a launcher says which of them this is.
    rank, world = (
        int(os.environ.get(name, str(n))) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    if scaler not in _logs:
        _logs[scaler] = PassLog()
    write: Listener = path if callable(path) else RunLog(path, rank).write
    _logs[scaler].listeners.append(write)
    write(
        {
            "kind": "run",
            "version": VERSION,
            "gradscale": __version__,
            "engine": f"torch {torch.__version__}, apex.amp of gradscale",
            "rank": rank,
            "world_size": world,
            "time": time.time(),
            "settings": {"policy": repr(scaler.policy), "format": "float16"},
        }
    )


def note(scaler: Any, before: float, finite: bool, fits: bool) -> None:
    """Logs a pass, if `scaler` has a log."""
    log = _logs.get(scaler)
    if log is None and on_first is not None:
        log = _logs[scaler] = PassLog()
        on_first(scaler)
    if log is not None:
        log.note(scaler, before, finite, fits)


class PassLog:
    """Turns passes into lines."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._number = 0
        self._skipped = 0
        self._tracker = Tracker()
        self._rules = RecordRules()

    def note(self, scaler: Any, before: float, finite: bool, fits: bool) -> None:
        """Logs a pass that has moved the scale from `before` to what it is."""
        self._number += 1
        applied, after = finite and fits, scaler.loss_scale()
        floor = getattr(scaler.policy, "min_scale", 0.0)
        self._skipped = 0 if applied else self._skipped + 1
        step: dict[str, Any] = {
            "optimizer": 0,
            "applied": applied,
            "loss_finite": True,
            "skipped_in_a_row": self._skipped,
            "scale": before,
        }
        if not applied:
            step["verdict"] = verdict(
                applied=False,
                finite=finite,
                scale=before,
                floor=floor,
                skipped_in_a_row=self._skipped,
            )
        move = Move(0, before, after, floor)
        line = {
            "kind": "step",
            "step": self._number,
            "time": time.time(),
            "scale": after,
            "steps": [step],
            "moves": [list(move)] if before != after else [],
        }
        record = StepRecord(self._number, after, (Step("pass", applied),), (move,))
        events = [
            {
                "kind": "event",
                "step": e.step,
                "name": e.name,
                "scale": e.scale,
                "loss_id": e.loss_id,
            }
            for e in self._tracker.events(record)
        ]
        found = [finding_line(finding) for finding in self._rules.take(line)]
        for each in (line, *events, *found):
            for write in self.listeners:
                write(each)
