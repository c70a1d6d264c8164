"""Reading the scaler checkpoints of other systems, as plain numbers.

Ours grows on step `growth_interval - good_steps` from now. Each peer's counter is converted to the
`good_steps` with which that is the step on which the peer itself would have grown, given the same
interval; after that growth our rule holds. Each row has the keys that the peer saves, the
good_steps that follow from them, and what else is read:

    Apex        {"loss_scaler0": {loss_scale, unskipped}, ...}: unskipped; the other losses keep
                their own scales. A static scale counts past 2000 there, so it grows at the next
                step here.
    DeepSpeed   cur_iter, last_overflow_iter ... (FP16_Optimizer), or a `loss_scaler` object (ZeRO),
                read by its attributes: with n = cur_iter - last_overflow_iter - 1 finite steps,
                (n - 1) % scale_window, since it grows on the steps 1 after whole windows. Right
                after an overflow (n = 0) it is 0, and we grow one step before DeepSpeed would.
                Settings: both factors, the interval; from ZeRO the floor and the hysteresis too.
    Megatron    scale, growth_tracker, hysteresis_tracker, bare or under "grad_scaler":
                growth_tracker. hysteresis_tracker counts down from a number that is not saved: see
                `patience`.
    Flax        fin_steps, scale, bare or under "dynamic_scale": fin_steps - 1, since it grows on
                step growth_interval + 1. At fin_steps = 0 it is 0, and we grow one step before.
    Keras 3     step_counter, dynamic_scale, by name, by path or by number (what a .keras file has):
                step_counter. Settings where given: initial_scale, dynamic_growth_steps.
    tf.keras    loss_scale/current_loss_scale, loss_scale/good_steps, by path: good_steps.
    jmp         loss_scale, counter and no key of any other kind: counter.
                Settings where given: period, factor, min_loss_scale.

Hysteresis is converted only where the last step was not finite: a finite step resets our count of
bad steps, while DeepSpeed and Megatron reset theirs when the scale grows. A setting that a
checkpoint does not contain is not guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gradscale.errors import StateError


class PeerState(NamedTuple):
    """The contents of a peer's checkpoint, under our names."""

    settings: dict[str, Any]
    """Those settings of `Dynamic` that the checkpoint contains."""
    state: dict[str, Any]
    """Fields of the state: `scale`, and what follows from the peer's counters."""
    losses: Sequence[tuple[int | str, dict[str, Any]]] = ()
    """The states of losses other than loss 0, by loss id."""
    patience: int | None = None
    """How many further overflows in a row lower the scale; `bad_steps` then follows from the
    `hysteresis` of the scaler that loads it. None where `bad_steps` is known or 0."""
    static: bool = False
    """Whether the scale never moves."""


def read(checkpoint: Mapping[Any, Any]) -> PeerState | None:
    """The contents of `checkpoint`; None if it is not a known peer's; a StateError if damaged."""
    named = {key: value for key, value in checkpoint.items() if isinstance(key, str)}
    # The most specific keys first: `loss_scale` and `counter` could be from anywhere.
    readers: tuple[Callable[[dict[str, Any]], PeerState | None], ...] = (
        _apex,
        _deepspeed,
        _megatron,
        _flax,
        _tf_keras,
        _keras,
        _keras_numbered,
        _jmp,
    )
    return next((found for reader in readers if (found := reader(named)) is not None), None)


# One reader for each peer: None if none of its keys are there, a StateError if only some are.


def _apex(named: dict[str, Any]) -> PeerState | None:
    if not any(re.match(r"loss_scaler\d", key) for key in named):
        return None
    # Apex numbers them without a gap, so a missing number is an error.
    wanted = [f"loss_scaler{i}" for i in range(len(named))]
    states = []
    for key, value in zip(wanted, _take("Apex", named, *wanted), strict=True):
        scale, unskipped = _take("Apex", _inner("Apex", key, value), "loss_scale", "unskipped")
        states.append(_state(f"Apex's {key}", "loss_scale", scale, "unskipped", unskipped))
    return PeerState({}, states[0], losses=tuple(enumerate(states))[1:])


def _deepspeed(named: dict[str, Any]) -> PeerState | None:
    hysteresis: tuple[str, ...] = ()
    if "loss_scaler" in named:
        found = _attributes("DeepSpeed", "loss_scaler", named["loss_scaler"])
        counted = {"cur_iter", "last_overflow_iter", "scale_window"} & set(found)
        moving = found.get("dynamic", bool(counted))  # older versions have no such attribute
        dynamic = named.get("dynamic_loss_scale", moving)
        hysteresis = ("min_scale", "delayed_shift", "cur_hysteresis")
    elif {"cur_scale", "cur_iter", "last_overflow_iter", "dynamic_loss_scale"} & set(named):
        found = named
        (dynamic,) = _take("DeepSpeed", named, "dynamic_loss_scale")
    else:
        return None
    (scale,) = _take("DeepSpeed", found, "cur_scale")
    state: dict[str, Any] = {"scale": _positive("DeepSpeed's cur_scale", scale)}
    if not _flag("DeepSpeed's dynamic_loss_scale", dynamic):
        return PeerState({}, state, static=True)
    keys = ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window", *hysteresis)
    taken = dict(zip(keys, _take("DeepSpeed", found, *keys), strict=True))
    settings = _settings("DeepSpeed", taken, factor="scale_factor", interval="scale_window")
    done = _count("DeepSpeed's cur_iter", taken["cur_iter"])
    # Before the first overflow it is -1, and it is never ahead of cur_iter.
    last = _whole("DeepSpeed's last_overflow_iter", taken["last_overflow_iter"], -1, done - 1)
    good = done - last - 1
    state["good_steps"] = (good - 1) % settings["growth_interval"] if good else 0
    if hysteresis:
        settings["min_scale"] = _positive("DeepSpeed's min_scale", taken["min_scale"])
        full = _count("DeepSpeed's delayed_shift", taken["delayed_shift"], least=1)
        left = _whole("DeepSpeed's cur_hysteresis", taken["cur_hysteresis"], 1, full)
        settings["hysteresis"] = full
        state["bad_steps"] = 0 if good else full - left
    return PeerState(settings, state)


def _megatron(named: dict[str, Any]) -> PeerState | None:
    if "grad_scaler" in named:
        named = dict(_inner("Megatron", "grad_scaler", named["grad_scaler"]))
    elif not {"growth_tracker", "hysteresis_tracker"} & set(named):
        return None
    keys = ("scale", "growth_tracker", "hysteresis_tracker")
    scale, good, left = _take("Megatron", named, *keys)
    state = _state("Megatron's state", "scale", scale, "growth_tracker", good)
    # It counts down without end while steps overflow, so it may be negative.
    left = _whole("Megatron's hysteresis_tracker", left, -(2**31), 2**31 - 1)
    return PeerState({}, state, patience=None if state["good_steps"] else max(left, 1))


def _flax(named: dict[str, Any]) -> PeerState | None:
    if isinstance(named.get("dynamic_scale"), Mapping):
        named = dict(named["dynamic_scale"])
    elif "fin_steps" not in named:
        return None
    scale, good = _take("Flax", named, "scale", "fin_steps")
    state = _state("Flax' state", "scale", scale, "fin_steps", good)
    return PeerState({}, {**state, "good_steps": max(state["good_steps"] - 1, 0)})


def _tf_keras(named: dict[str, Any]) -> PeerState | None:
    return _variables("tf.keras", named, "current_loss_scale", "good_steps")


def _keras(named: dict[str, Any]) -> PeerState | None:
    # In a tree of variables, those of an optimizer are under its name.
    inner = named.get("loss_scale_optimizer")
    named = {**named, **inner} if isinstance(inner, Mapping) else named
    return _variables("Keras", named, "dynamic_scale", "step_counter")


def _keras_numbered(named: dict[str, Any]) -> PeerState | None:
    if not named or not all(re.fullmatch(r"\d+", key) for key in named):
        return None
    rate, good, scale = _take("Keras", named, "1", "2", "3")
    # Unlike those of the inner optimizer: a learning rate that is never used.
    if _number(rate) != 0:
        raise StateError(
            "The state looks like variables of Keras', but not like those of a "
            f"LossScaleOptimizer, whose variable 1 is 0: got {rate!r:.80}."
        )
    return PeerState({}, _state("Keras' variables", "3", scale, "2", good))


def _jmp(named: dict[str, Any]) -> PeerState | None:
    known = {"loss_scale", "counter", "period", "factor", "min_loss_scale"}
    if "loss_scale" not in named or not known.issuperset(named):
        return None
    scale, counter = _take("jmp", named, "loss_scale", "counter")
    settings = _settings("jmp", named, factor="factor", interval="period")
    if "min_loss_scale" in named:
        settings["min_scale"] = _positive("jmp's min_loss_scale", named["min_loss_scale"])
    return PeerState(settings, _state("jmp's state", "loss_scale", scale, "counter", counter))


def _variables(peer: str, named: dict[str, Any], scale: str, good: str) -> PeerState | None:
    """The state from two variables, named by the ends of their paths, and the settings by name."""
    paths: dict[str, list[str]] = {}
    for key in named:
        path = key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").removesuffix(":0")
        paths.setdefault(path.rpartition("/")[2], []).append(key)
    if scale not in paths and good not in paths:
        return None
    _take(peer, paths, scale, good)
    for name in (scale, good):
        if len(paths[name]) > 1:
            raise StateError(f"The state has several {name}, keep one: {sorted(paths[name])}.")
    settings = _settings(peer, named, interval="dynamic_growth_steps")
    if "initial_scale" in named:
        settings["init_scale"] = _positive(f"{peer}'s initial_scale", named["initial_scale"])
    (scale_key,), (good_key,) = paths[scale], paths[good]
    state = _state(f"{peer}'s state", scale_key, named[scale_key], good_key, named[good_key])
    return PeerState(settings, state)


def _settings(
    peer: str, named: Mapping[str, Any], factor: str = "", interval: str = ""
) -> dict[str, Any]:
    """The settings found, under our names: one factor up and down, and the interval."""
    settings: dict[str, Any] = {}
    if factor in named:
        up = _positive(f"{peer}'s {factor}", named[factor])
        if not up > 1:
            raise StateError(f"{peer}'s {factor} must be > 1, got {up}.")
        settings |= {"growth_factor": up, "backoff_factor": 1 / up}
    if interval in named:
        settings["growth_interval"] = _count(f"{peer}'s {interval}", named[interval], least=1)
    return settings


# Reading values, with errors that name them.


def _take(peer: str, found: Mapping[str, Any], *keys: str) -> list[Any]:
    """The values of `keys`."""
    missing = [key for key in keys if key not in found]
    if missing:
        raise StateError(
            f"The state looks like {peer}'s, but lacks {', '.join(missing)}; "
            f"the keys found are {sorted(map(str, found))}."
        )
    return [found[key] for key in keys]


def _inner(peer: str, key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise StateError(f"{peer}'s {key} must be a dict, got {value!r:.80}.")
    return value


def _attributes(peer: str, key: str, value: Any) -> Mapping[str, Any]:
    """The attributes of an object of any class."""
    try:
        return value if isinstance(value, Mapping) else vars(value)
    except TypeError:
        raise StateError(f"{peer}'s {key} must be its scaler object, got {value!r:.80}.") from None


def _state(what: str, scale_key: str, scale: Any, good_key: str, good: Any) -> dict[str, Any]:
    """A state with a scale and a counter of finite steps."""
    return {
        "scale": _positive(f"{what}: {scale_key}", scale),
        "good_steps": _count(f"{what}: {good_key}", good),
    }


def _number(value: Any) -> int | float | bool | None:
    """The plain number that `value` is or holds as its only element; None if there is none."""
    try:
        if not hasattr(value, "item") and hasattr(value, "__array__"):
            value = value.__array__()  # a variable of Keras', a dataset of an HDF5 file
        if hasattr(value, "item"):
            value = value.item()
    except Exception:  # an object of an unknown class may raise anything
        return None
    return value if isinstance(value, int | float) else None


def _positive(what: str, value: Any) -> float:
    number = _number(value)
    try:
        number = math.nan if number is None or isinstance(number, bool) else float(number)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise StateError(
            f"{what} must be a finite number > 0, got {value!r:.80}. Nothing was loaded."
        )
    return number


def _count(what: str, value: Any, least: int = 0) -> int:
    return _whole(what, value, least, 2**31 - 1)


def _whole(what: str, value: Any, least: int, most: int) -> int:
    number = _number(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise StateError(
            f"{what} must be a whole number from {least} to {most}, got {value!r:.80}. "
            "Nothing was loaded."
        )
    return number


def _flag(what: str, value: Any) -> bool:
    flag = _number(value)
    if not isinstance(flag, bool):
        raise StateError(f"{what} must be True or False, got {value!r:.80}.")
    return flag
