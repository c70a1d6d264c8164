"""Step records, events and diagnosis: plain Python, shared by every engine.

An engine brings numbers to the host as `StepRecord`s. `Tracker` turns them into events; `verdict`
and `stuck_message` say in words why steps were skipped. Nothing here waits, warns or raises for a
skipped step: delivery is up to the engine.
"""

from __future__ import annotations

from gradscale.monitor.diagnosis import EXPLANATIONS, replay_message, stuck_message, verdict
from gradscale.monitor.events import EVENTS, ON_STUCK, Event, Tracker, as_event_name, as_on_stuck
from gradscale.monitor.outcome import Outcome
from gradscale.monitor.records import Move, Step, StepRecord

__all__ = [
    "EVENTS",
    "EXPLANATIONS",
    "ON_STUCK",
    "Event",
    "Move",
    "Outcome",
    "Step",
    "StepRecord",
    "Tracker",
    "as_event_name",
    "as_on_stuck",
    "replay_message",
    "stuck_message",
    "verdict",
]
