"""The policies: rules that move the scale, each written once for all frameworks.

A policy is a frozen dataclass of settings with two pure functions: `init` returns the first state,
`update` the state after a step. They use only operations that have the same names in numpy, torch,
jax.numpy and keras.ops. A state is float32 and int32 everywhere. `goes_by` are the fields of
`GradStats` that `update` needs besides the flags.
"""

from __future__ import annotations

from gradscale.policy.arrays import room_below, scalars
from gradscale.policy.constant import Off, ScaleState, Static
from gradscale.policy.dynamic import Dynamic, DynamicState, Lengthening, for_pretraining
from gradscale.policy.headroom import LONE, Headroom, HeadroomState, for_short_runs
from gradscale.policy.histogram import Histogram, HistogramState
from gradscale.policy.logmax import LogMax, LogMaxState
from gradscale.policy.registry import (
    NAMES,
    POLICIES,
    Policy,
    State,
    as_policy,
    policy_or_settings,
)
from gradscale.policy.settings import MAX_SCALE, MIN_SCALE, DefaultBound
from gradscale.policy.stats import GradStats

__all__ = [
    "LONE",
    "MAX_SCALE",
    "MIN_SCALE",
    "NAMES",
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
    "as_policy",
    "for_pretraining",
    "for_short_runs",
    "policy_or_settings",
    "room_below",
    "scalars",
]
