"""A saved state of every policy, for the tests of checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradscale.checkpoints.format import Saved
from gradscale.policy import (
    Dynamic,
    DynamicState,
    Headroom,
    HeadroomState,
    Histogram,
    HistogramState,
    LogMax,
    LogMaxState,
    Off,
    Policy,
    ScaleState,
    State,
    Static,
)

DYNAMIC = Dynamic(
    init_scale=1000.1,
    growth_factor=4.5,
    backoff_factor=0.25,
    growth_interval=7,
    hysteresis=3,
    min_scale=0.7,
    max_scale=2.0**70,
    slow_growth_above=3.0,
    exact=False,
)
BOUNDS = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 64.0, "format": "bfloat16"}
HEADROOM = Headroom(**BOUNDS, margin=3, memory=5, forget=6, pause=7, spikes="skip")
LOGMAX = LogMax(**BOUNDS, decay=0.5, slow_decay=0.75, deviations=2.0)
HISTOGRAM = Histogram(**BOUNDS, threshold=0.25, interval=3)
# A policy without a default value, and a state that is not its first: one line for each.
EXAMPLES: dict[str, tuple[Policy, State]] = {
    "Off": (Off(), ScaleState(1.0)),
    "Static": (Static(init_scale=1000.1, exact=False), ScaleState(2.5)),
    "Dynamic": (DYNAMIC, DynamicState(scale=16.5, good_steps=5, bad_steps=2)),
    "Headroom": (HEADROOM, HeadroomState(8.0, -3, 4, -70, 5, 6, 7, 1, 2, 9, 11, 12, 13)),
    "LogMax": (LOGMAX, LogMaxState(8.0, -2.5, -3.25, 0.5, 0.75, 0.125)),
    "Histogram": (HISTOGRAM, HistogramState(8.0, 3)),
}


def saved_of(name: str) -> Saved:
    """The example of a policy, as an engine would save it."""
    policy, state = EXAMPLES[name]
    others = ((1, {**state._asdict(), "scale": 3.5}), ("penalty", state._asdict()))
    counters, skipped = {"bad_losses": 9, "more": 1}, (3, 0, 5)
    settings = dataclasses.asdict(policy)
    return Saved(name, settings, state._asdict(), counters, others, skipped_in_a_row=skipped)


def not_plain(value: Any, where: str = "") -> list[str]:
    """Where something is neither a number, a string, None nor a list or dict of such by strings."""
    if type(value) is list:
        return [found for i, v in enumerate(value) for found in not_plain(v, f"{where}.{i}")]
    if type(value) is dict:
        odd = [f"{where}: the key {key!r}" for key in value if type(key) is not str]
        return odd + [found for k, v in value.items() for found in not_plain(v, f"{where}.{k}")]
    return [] if type(value) in {str, int, float, bool, type(None)} else [f"{where}: {value!r}"]
