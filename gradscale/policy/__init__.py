"""The rules that move the scale, each written once.

A policy is frozen settings and two pure functions: `init` gives the first state, `update` the state
after a step. The functions use only operations that numpy, torch, jax.numpy and keras.ops spell
alike, so one text serves every framework. A state is float32 and int32 everywhere.
"""

from __future__ import annotations

from gradscale.policy.arrays import room_below, scalars
from gradscale.policy.dynamic import Dynamic, DynamicState, Lengthening, for_pretraining
from gradscale.policy.headroom import Headroom, HeadroomState, for_short_runs
from gradscale.policy.histogram import Histogram, HistogramState
from gradscale.policy.logmax import LogMax, LogMaxState
from gradscale.policy.settings import MAX_SCALE, MIN_SCALE, DefaultBound
from gradscale.policy.stats import GradStats
from gradscale.policy.still import Off, ScaleState, Static

__all__ = [
    "MAX_SCALE",
    "MIN_SCALE",
    "POLICIES",
    "DefaultBound",
    "Dynamic",
    "DynamicState",
    "GradStats",
    "Headroom",
    "HeadroomState",
    "Histogram",
    "HistogramState",
    "Lengthening",
    "LogMax",
    "LogMaxState",
    "Off",
    "Policy",
    "ScaleState",
    "State",
    "Static",
    "for_pretraining",
    "for_short_runs",
    "room_below",
    "scalars",
]

Policy = Off | Static | Dynamic | Lengthening | Headroom | LogMax | Histogram
State = ScaleState | DynamicState | HeadroomState | LogMaxState | HistogramState
POLICIES: dict[str, type[Policy]] = {
    policy.__name__: policy
    for policy in (Off, Static, Dynamic, Lengthening, Headroom, LogMax, Histogram)
}
"""Every policy by its name, as checkpoints spell it."""
