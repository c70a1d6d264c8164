"""Loss scaling for mixed-precision training: policies for every framework; imports none of them."""

from gradscale.errors import CallOrderError, SettingError, StateError, StuckError
from gradscale.formats import FORMATS, Format
from gradscale.policy import (
    Dynamic,
    DynamicState,
    GradStats,
    Headroom,
    HeadroomState,
    Histogram,
    HistogramState,
    Lengthening,
    LogMax,
    LogMaxState,
    Off,
    Policy,
    ScaleState,
    State,
    Static,
    for_pretraining,
    for_short_runs,
)

__version__ = "0.2.0"

__all__ = [
    "FORMATS",
    "CallOrderError",
    "Dynamic",
    "DynamicState",
    "Format",
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
    "SettingError",
    "State",
    "StateError",
    "Static",
    "StuckError",
    "__version__",
    "for_pretraining",
    "for_short_runs",
]
