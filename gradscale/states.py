"""Checkpoints of a scaler: our own format and torch's, as plain numbers.

A checkpoint is torch's five keys, so that torch's own scaler can load it, and a block "gradscale"
that says what those keys cannot. Nothing is said twice: the five keys hold the scale, the two
factors, the interval and the counter of finite steps; the block holds the version, the policy's
name, its other settings, the rest of its state and the engine's counters. `read` checks the form of
everything before anything is used; what values a setting may have is the policy's to say.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradscale.errors import StateError

VERSION = 1
BLOCK = "gradscale"
TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
TORCH_KEYS = ("scale", *TORCH_SETTINGS, "_growth_tracker")
# What torch's keys say of a policy that does not move: torch's scaler then holds the scale still
# too.
_STILL = {"growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 2000}


class Saved(NamedTuple):
    """A checkpoint in plain numbers.

    >>> saved = Saved("Static", {"init_scale": 8.0}, {"scale": 8.0}, {})
    >>> read(write(saved)) == saved
    True
    """

    policy: str | None
    """The name of the policy; None if the checkpoint is torch's, which has but one rule."""
    settings: dict[str, Any]
    """The policy's settings, by name."""
    state: dict[str, Any]
    """The policy's state, by field; it has at least `scale`."""
    counters: dict[str, int]
    """The engine's counters, by name."""


def write(saved: Saved) -> dict[str, Any]:
    """The checkpoint that says `saved`: dicts, strings and numbers, fit for JSON."""
    # A default bound is a float that knows it was not given; here it is a number like any other.
    settings = {k: float(v) if isinstance(v, float) else v for k, v in saved.settings.items()}
    state = dict(saved.state)
    checkpoint = {
        "scale": state.pop("scale"),
        **{name: settings.pop(name, _STILL[name]) for name in TORCH_SETTINGS},
        "_growth_tracker": state.pop("good_steps", 0),
    }
    if saved.policy is None:
        return checkpoint  # it was torch's, and stays so
    block = {
        "version": VERSION,
        "policy": saved.policy,
        "settings": settings,
        "state": state,
        "counters": dict(saved.counters),
    }
    return {**checkpoint, BLOCK: block}


def read(checkpoint: Mapping[str, Any]) -> Saved:
    """What `checkpoint` says, ours or torch's; a StateError if it is neither or is damaged."""
    if not isinstance(checkpoint, Mapping):
        raise StateError(f"The state must be a dict, got {type(checkpoint).__name__}.")
    if not checkpoint:
        raise StateError(
            "The state is empty: it was probably saved by a scaler with enabled=False. Nothing was "
            "loaded; go on with this scaler as it is, or build it with enabled=False as well."
        )
    missing = [key for key in TORCH_KEYS if key not in checkpoint]
    if missing:
        found = sorted(map(str, checkpoint))
        raise StateError(f"The state lacks {', '.join(missing)}; the keys found are {found}.")
    torch_settings = {name: _setting(name, checkpoint[name]) for name in TORCH_SETTINGS}
    scale = _scale(checkpoint["scale"])
    good_steps = _counter("_growth_tracker", checkpoint["_growth_tracker"])
    if BLOCK not in checkpoint and torch_settings == _STILL:
        return Saved("Static", {"init_scale": scale, "exact": False}, {"scale": scale}, {})
    if BLOCK not in checkpoint:
        return Saved(None, torch_settings, {"scale": scale, "good_steps": good_steps}, {})
    policy, settings, state, counters = _read_block(checkpoint[BLOCK])
    if torch_settings != _STILL:
        settings |= torch_settings
        state["good_steps"] = good_steps
    return Saved(policy, settings, {"scale": scale, **state}, counters)


def _read_block(block: Any) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]:
    """The policy's name, settings and further state, and the counters."""
    version = _entry(_dict(BLOCK, block), "version")
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"The state has version {version!r}; this gradscale reads version "
            f"{VERSION}. Load it with the gradscale that wrote it."
        )
    policy = _entry(block, "policy")
    if not isinstance(policy, str):
        raise StateError(f"The state's policy must be a name, got {policy!r}.")
    settings = _dict("settings", _entry(block, "settings"))
    state = _dict("state", _entry(block, "state"))
    counters = _dict("counters", _entry(block, "counters"))
    if "scale" in state:
        raise StateError(f"The state says its scale twice: also in the block {BLOCK!r}.")
    return (
        policy,
        {key: _setting(key, value) for key, value in settings.items()},
        {key: _counter(key, value) for key, value in state.items()},
        {key: _counter(key, value) for key, value in counters.items()},
    )


def _entry(block: Mapping[str, Any], key: str) -> Any:
    if key not in block:
        raise StateError(f"The block {BLOCK!r} of the state lacks {key}.")
    return block[key]


def _dict(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise StateError(f"The state's {key} must be a dict by names, got {value!r}.")
    return value


def _setting(key: str, value: Any) -> Any:
    """`value` as a plain number or bool; which ones will do is the policy's to say."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise StateError(f"The state's {key} must be a number, got {value!r}.") from None


def _scale(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise StateError(
            f"The state's scale must be a finite number > 0, got {value!r}. Nothing was loaded: "
            "the run that saved it had lost its scale, so go on with a new scaler."
        )
    return number


def _counter(key: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < 2**31:
        raise StateError(
            f"The state's {key} must be a whole number from 0 to 2**31 - 1, got {value!r}."
        )
    return number
