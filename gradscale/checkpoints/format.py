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
from collections.abc import Mapping
from typing import Any

from gradscale.checkpoints import peers
from gradscale.checkpoints.saved import Saved as Saved
from gradscale.checkpoints.saved import number, positive, whole
from gradscale.errors import StateError

VERSION = 1
BLOCK = "gradscale"
TORCH_SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
"""Torch's settings and their defaults."""
TORCH_KEYS = ("scale", *TORCH_SETTINGS, "_growth_tracker")
_NAMES = ("format", "spikes")
"""The settings that are names."""
_COUNTING = ("Off", "Static", "Dynamic")
"""The policies whose states are a scale and counters."""


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
        **{name: settings.pop(name, default) for name, default in TORCH_SETTINGS.items()},
        "_growth_tracker": state.pop("good_steps", 0),
    }
    if saved.policy is None:
        others = (settings, state, saved.losses, saved.skipped_in_a_row)
        lost = any(others) or saved.patience is not None
        if lost or not TORCH_SETTINGS.keys() <= saved.settings.keys():
            raise StateError(
                "A state without a policy can have only torch's keys, but this state has other "
                "keys or lacks some of them. Load it into a scaler and save the state_dict() of "
                "that scaler."
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
            "The state is empty: it was probably saved by a scaler with enabled=False. Nothing "
            "was loaded. Continue with this scaler as it is, or create it with enabled=False as "
            "well."
        )
    missing = [key for key in TORCH_KEYS if key not in checkpoint]
    inner = getattr(checkpoint.get("loss_scaler"), "state_dict", None)
    if missing and callable(inner):  # what DeepSpeed saves of an engine that has our scaler
        return read(inner())
    if missing:
        peer = None if BLOCK in checkpoint else peers.read(checkpoint)
        if peer is not None:
            return peer
        found = sorted(map(str, checkpoint))
        raise StateError(f"The state lacks {', '.join(missing)}; the keys found are {found}.")
    torch_settings = {name: _setting(name, checkpoint[name]) for name in TORCH_SETTINGS}
    scale = positive("The state's scale", checkpoint["scale"])
    good_steps = _counter("_growth_tracker", checkpoint["_growth_tracker"])
    if BLOCK not in checkpoint:
        if torch_settings["growth_factor"] == torch_settings["backoff_factor"] == 1:
            return Saved.static(scale)
        return Saved(None, torch_settings, {"scale": scale, "good_steps": good_steps}, {})
    saved = _read_block(checkpoint[BLOCK])
    settings, state = saved.settings, {"scale": scale, **saved.state}
    if saved.policy == "Dynamic":
        settings |= torch_settings
        state["good_steps"] = good_steps
    return saved._replace(settings=settings, state=state)


def _read_block(block: Any) -> Saved:
    """The contents of the block, without those of torch's keys."""
    block = _dict(BLOCK, block)
    missing = {"version", "policy", "settings", "state", "counters"} - set(block)
    if missing:
        raise StateError(f"The block {BLOCK!r} of the state lacks {', '.join(sorted(missing))}.")
    version, policy = block["version"], block["policy"]
    if type(version) is not int or version != VERSION:
        raise StateError(
            f"The state has version {version!r}, but this version of gradscale reads version "
            f"{VERSION}. Load it with the version of gradscale that saved it."
        )
    if not isinstance(policy, str):
        raise StateError(f"The state's policy must be a name, got {policy!r}.")
    settings, state = _dict("settings", block["settings"]), _dict("state", block["state"])
    if policy == "Lengthening":  # a policy of its own until it became a setting of Dynamic
        policy, settings = "Dynamic", dict(settings)
        settings["slow_growth_above"] = settings.pop("above", 1.0)
    if "scale" in state:
        raise StateError(f"The state has a second scale, in the block {BLOCK!r}.")
    counts = _list("skipped_in_a_row", block.get("skipped_in_a_row", ()))
    return Saved(
        policy,
        {key: _setting(key, value) for key, value in settings.items()},
        {key: _field(policy, key, value) for key, value in state.items()},
        {key: _counter(key, value) for key, value in _dict("counters", block["counters"]).items()},
        _losses(policy, _list("losses", block.get("losses", ()))),
        skipped_in_a_row=tuple(_counter("skipped_in_a_row", count) for count in counts),
    )


def _losses(policy: str, pairs: list[Any]) -> tuple[tuple[int | str, dict[str, Any]], ...]:
    """The states of further losses."""
    losses: dict[int | str, dict[str, Any]] = {}
    for pair in pairs:
        if len(_list("losses", pair)) != 2:
            raise StateError(f"The state's losses must be pairs of an id and a dict, got {pair!r}.")
        loss_id, fields = pair
        if type(loss_id) not in {int, str} or loss_id == 0 or loss_id in losses:
            raise StateError(
                "Each loss of the state must have its own id, a string or a whole number other "
                f"than 0, got {loss_id!r}."
            )
        of = f"losses, id {loss_id!r}: "
        rest = dict(_dict(f"{of}fields", fields))
        scale = positive(f"The state's {of}scale", rest.pop("scale", None))
        others = {key: _field(policy, of + key, value) for key, value in rest.items()}
        losses[loss_id] = {"scale": scale, **others}
    return tuple(losses.items())


def _list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise StateError(f"The state's {key} must be a list, got {value!r}.")
    return list(value)


def _dict(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise StateError(f"The state's {key} must be a dict with strings as keys, got {value!r}.")
    return value


def _setting(key: str, value: Any) -> Any:
    """`value` as a plain number, bool or name; the policy checks which values it accepts."""
    found = value if key in _NAMES and isinstance(value, str) else number(value)
    if found is None:
        raise StateError(f"The state's {key} must be a number, got {value!r}.")
    return found


def _field(policy: str, key: str, value: Any) -> float:
    """`value` as a field of the state of `policy`: a counter, or for some policies any number."""
    if policy in _COUNTING:
        return _counter(key, value)
    field: float = math.nan if isinstance(value, bool) else _setting(key, value)
    if not -(2**31) <= field < 2**31:
        raise StateError(f"The state's {key} must be a number within int32, got {value!r}.")
    return field


def _counter(key: str, value: Any) -> int:
    return whole(f"The state's {key}", value)
