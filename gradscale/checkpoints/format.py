"""Checkpoints of a scaler as plain numbers: our own format and torch's; other peers' are read.

A checkpoint is torch's five keys, so that torch's own scaler can load it, and a block "gradscale"
with the rest. No number is stored twice: the five keys hold the scale, both factors, the interval
and the counter of finite steps; the block holds the version, the policy's name, its other settings,
the rest of its state, the engine's counters and, where there are any, the states of further losses
and the skipped steps in a row of each optimizer. A policy without factors and interval writes
torch's defaults in their place, with which torch's scaler can go on; they are not read back.

`read` checks the form of everything before anything is used; which values a setting may have is
checked by the policy. A state with neither the five keys nor the block may be another peer's:
`gradscale.checkpoints.peers` recognises those.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradscale.checkpoints import peers
from gradscale.errors import StateError

VERSION = 1
BLOCK = "gradscale"
TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
TORCH_KEYS = ("scale", *TORCH_SETTINGS, "_growth_tracker")
_WITH_TORCH_SETTINGS = ("Dynamic",)
"""The policies that have torch's settings."""
_TORCH_DEFAULTS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
_COUNTING = ("Off", "Static", "Dynamic")
"""The policies whose states are a scale and counters."""


class Saved(NamedTuple):
    """A checkpoint in plain numbers.

    >>> saved = Saved("Static", {"init_scale": 8.0}, {"scale": 8.0}, {})
    >>> read(write(saved)) == saved
    True
    """

    policy: str | None
    """The name of the policy; None if the checkpoint is torch's or another peer's: `Dynamic`."""
    settings: dict[str, Any]
    """The policy's settings, by name; of a peer other than torch only those that it saves."""
    state: dict[str, Any]
    """The policy's state, by field; it has at least `scale`."""
    counters: dict[str, int]
    """The engine's counters, by name."""
    losses: Sequence[tuple[int | str, dict[str, Any]]] = ()
    """The states of losses other than loss 0, as (loss id, fields)."""
    patience: int | None = None
    """How many further overflows in a row lower the scale, of a peer that counts down from a number
    it does not save; else None. `bad_steps` is then `max(hysteresis - patience, 0)`."""
    skipped_in_a_row: Sequence[int] = ()
    """Consecutive skipped steps of each optimizer, in order of first use; empty if not saved."""


def write(saved: Saved) -> dict[str, Any]:
    """The checkpoint of `saved`: dicts, lists, strings and numbers, fit for JSON."""
    # A default bound is a subclass of float, which JSON and pickle should not meet.
    # A setting that is None is its default: earlier versions, which do not have it, read the rest.
    settings = {
        name: float(value) if isinstance(value, float) else value
        for name, value in saved.settings.items()
        if value is not None
    }
    state = dict(saved.state)
    checkpoint = {
        "scale": state.pop("scale"),
        **{name: settings.pop(name, _TORCH_DEFAULTS[name]) for name in TORCH_SETTINGS},
        "_growth_tracker": state.pop("good_steps", 0),
    }
    if saved.policy is None:
        others = (settings, state, saved.losses, saved.skipped_in_a_row)
        lost = any(others) or saved.patience is not None
        if lost or not {*TORCH_SETTINGS} <= {*saved.settings}:
            raise StateError(
                "A state without a policy is written with torch's keys alone, and this one has "
                "other fields, or lacks some: load it into a scaler, and write that scaler's state."
            )
        return checkpoint
    block: dict[str, Any] = {
        "version": VERSION,
        "policy": saved.policy,
        "settings": settings,
        "state": state,
        "counters": dict(saved.counters),
    }
    if saved.losses:
        block["losses"] = [[loss_id, dict(fields)] for loss_id, fields in saved.losses]
    if saved.skipped_in_a_row:
        block["skipped_in_a_row"] = list(saved.skipped_in_a_row)
    return {**checkpoint, BLOCK: block}


def read(checkpoint: Mapping[str, Any]) -> Saved:
    """The contents of `checkpoint`, ours or a peer's; a StateError if it is neither or damaged."""
    if not isinstance(checkpoint, Mapping):
        raise StateError(f"The state must be a dict, got {type(checkpoint).__name__}.")
    if not checkpoint:
        raise StateError(
            "The state is empty: it was probably saved by a scaler with enabled=False. Nothing was "
            "loaded; go on with this scaler as it is, or build it with enabled=False as well."
        )
    missing = [key for key in TORCH_KEYS if key not in checkpoint]
    if missing:
        peer = None if BLOCK in checkpoint else peers.read(checkpoint)
        if peer is not None and peer.static:
            return _static(peer.state["scale"])
        if peer is not None:
            return Saved(None, peer.settings, peer.state, {}, peer.losses, peer.patience)
        found = sorted(map(str, checkpoint))
        raise StateError(f"The state lacks {', '.join(missing)}; the keys found are {found}.")
    torch_settings = {name: _setting(name, checkpoint[name]) for name in TORCH_SETTINGS}
    scale = _scale(checkpoint["scale"])
    good_steps = _counter("_growth_tracker", checkpoint["_growth_tracker"])
    if BLOCK not in checkpoint:
        if torch_settings["growth_factor"] == torch_settings["backoff_factor"] == 1:
            return _static(scale)
        return Saved(None, torch_settings, {"scale": scale, "good_steps": good_steps}, {})
    saved = _read_block(checkpoint[BLOCK])
    settings, state = saved.settings, {"scale": scale, **saved.state}
    if saved.policy in _WITH_TORCH_SETTINGS:
        settings |= torch_settings
        state["good_steps"] = good_steps
    return saved._replace(settings=settings, state=state)


def _static(scale: float) -> Saved:
    """The contents of a checkpoint whose scale never moves."""
    return Saved("Static", {"init_scale": scale, "exact": False}, {"scale": scale}, {})


def _read_block(block: Any) -> Saved:
    """The contents of the block, without those of torch's keys."""
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
    if policy == "Lengthening":  # a policy of its own until it became a setting of Dynamic
        policy, settings = "Dynamic", dict(settings)
        settings["slow_growth_above"] = settings.pop("above", 1.0)
    if "scale" in state:
        raise StateError(f"The state has a second scale, in the block {BLOCK!r}.")
    return Saved(
        policy,
        {key: _setting(key, value) for key, value in settings.items()},
        {key: _field(policy, key, value) for key, value in state.items()},
        {key: _counter(key, value) for key, value in counters.items()},
        _losses(policy, block.get("losses", ())),
        skipped_in_a_row=_skipped(block.get("skipped_in_a_row", ())),
    )


def _skipped(counts: Any) -> tuple[int, ...]:
    """The skipped steps in a row of each optimizer."""
    if not isinstance(counts, list | tuple):
        raise StateError(f"The state's skipped_in_a_row must be a list of numbers, got {counts!r}.")
    return tuple(_counter("skipped_in_a_row", count) for count in counts)


def _losses(policy: str, pairs: Any) -> tuple[tuple[int | str, dict[str, Any]], ...]:
    """The states of further losses."""
    if not isinstance(pairs, list | tuple):
        raise StateError(f"The state's losses must be a list of pairs, got {pairs!r}.")
    losses: dict[int | str, dict[str, Any]] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise StateError(f"The state's losses must be pairs of an id and a dict, got {pair!r}.")
        loss_id, fields = pair
        if type(loss_id) not in {int, str} or loss_id == 0 or loss_id in losses:
            raise StateError(
                "The state's losses must each have an id of its own, a whole number but not 0, or "
                f"a string: got {loss_id!r}."
            )
        try:
            counters = dict(_dict("fields", fields))
            scale = _scale(counters.pop("scale", None))
            rest = {key: _field(policy, key, value) for key, value in counters.items()}
            losses[loss_id] = {"scale": scale, **rest}
        except StateError as error:
            raise StateError(f"The state's losses, id {loss_id!r}: {error}") from None
    return tuple(losses.items())


def _entry(block: Mapping[str, Any], key: str) -> Any:
    if key not in block:
        raise StateError(f"The block {BLOCK!r} of the state lacks {key}.")
    return block[key]


def _dict(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise StateError(f"The state's {key} must be a dict by names, got {value!r}.")
    return value


def _setting(key: str, value: Any) -> Any:
    """`value` as a plain number, bool or name; the policy checks which values it accepts."""
    if isinstance(value, bool) or (key == "format" and isinstance(value, str)):
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
            "go on with a new scaler."
        )
    return number


def _field(policy: str, key: str, value: Any) -> float:
    """`value` as a field of the state of `policy`: a counter, or for some policies any number."""
    if policy in _COUNTING:
        return _counter(key, value)
    number: float = math.nan if isinstance(value, bool) else _setting(key, value)
    if not -(2**31) <= number < 2**31:
        raise StateError(f"The state's {key} must be a number within int32, got {value!r}.")
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
