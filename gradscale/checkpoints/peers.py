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

import re
from collections.abc import Mapping
from typing import Any

from gradscale.checkpoints.saved import Saved, number, positive, whole
from gradscale.errors import StateError


def read(checkpoint: Mapping[Any, Any]) -> Saved | None:
    """The contents of `checkpoint`; None if it is not a known peer's; a StateError if damaged."""
    named = {key: value for key, value in checkpoint.items() if isinstance(key, str)}
    # The most specific keys first: `loss_scale` and `counter` could be from anywhere.
    readers = (_apex, _deepspeed, _megatron, _flax, _tf_keras, _keras, _keras_numbered, _jmp)
    return next((found for reader in readers if (found := reader(named)) is not None), None)


# One reader for each peer: None if none of its keys are there, a StateError if only some are.


def _apex(named: dict[str, Any]) -> Saved | None:
    if not any(re.match(r"loss_scaler\d", key) for key in named):
        return None
    # Apex numbers them without a gap, so a missing number is an error.
    keys = [f"loss_scaler{i}" for i in range(len(named))]
    scalers = zip(keys, _take("Apex", named, *keys), strict=True)
    first, *others = [
        _state("Apex", _attributes("Apex", key, value), "loss_scale", "unskipped")
        for key, value in scalers
    ]
    return Saved(None, {}, first, {}, tuple(enumerate(others, 1)))


def _deepspeed(named: dict[str, Any]) -> Saved | None:
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
    scale = positive("DeepSpeed's cur_scale", *_take("DeepSpeed", found, "cur_scale"))
    moves = number(dynamic)
    if not isinstance(moves, bool):
        raise StateError(f"DeepSpeed's dynamic_loss_scale must be a bool, got {dynamic!r:.80}.")
    if not moves:
        return Saved.static(scale)
    keys = ("cur_iter", "last_overflow_iter", "scale_factor", "scale_window", *hysteresis)
    taken = dict(zip(keys, _take("DeepSpeed", found, *keys), strict=True))
    settings = _settings(
        "DeepSpeed",
        taken,
        growth_factor="scale_factor",
        growth_interval="scale_window",
        min_scale="min_scale",
        hysteresis="delayed_shift",
    )
    done = whole("DeepSpeed's cur_iter", taken["cur_iter"])
    # Before the first overflow it is -1, and it is never ahead of cur_iter.
    last = whole("DeepSpeed's last_overflow_iter", taken["last_overflow_iter"], -1, done - 1)
    good = done - last - 1
    steps = (good - 1) % settings["growth_interval"] if good else 0
    state = {"scale": scale, "good_steps": steps}
    if hysteresis:
        full = settings["hysteresis"]
        left = whole("DeepSpeed's cur_hysteresis", taken["cur_hysteresis"], 1, full)
        state["bad_steps"] = 0 if good else full - left
    return Saved(None, settings, state, {})


def _megatron(named: dict[str, Any]) -> Saved | None:
    if "grad_scaler" in named:
        named = _attributes("Megatron", "grad_scaler", named["grad_scaler"])
    elif not {"growth_tracker", "hysteresis_tracker"} & set(named):
        return None
    *_, left = _take("Megatron", named, "scale", "growth_tracker", "hysteresis_tracker")
    state = _state("Megatron", named, "scale", "growth_tracker")
    # It counts down without end while steps overflow, so it may be negative.
    left = whole("Megatron's hysteresis_tracker", left, -(2**31))
    patience = None if state["good_steps"] else max(left, 1)
    return Saved(None, {}, state, {}, patience=patience)


def _flax(named: dict[str, Any]) -> Saved | None:
    if isinstance(named.get("dynamic_scale"), Mapping):
        named = dict(named["dynamic_scale"])
    elif "fin_steps" not in named:
        return None
    state = _state("Flax", named, "scale", "fin_steps")
    return Saved(None, {}, {**state, "good_steps": max(state["good_steps"] - 1, 0)}, {})


def _tf_keras(named: dict[str, Any]) -> Saved | None:
    return _variables("tf.keras", named, "current_loss_scale", "good_steps")


def _keras(named: dict[str, Any]) -> Saved | None:
    # In a tree of variables, those of an optimizer are under its name.
    inner = named.get("loss_scale_optimizer")
    named = {**named, **inner} if isinstance(inner, Mapping) else named
    return _variables("Keras", named, "dynamic_scale", "step_counter")


def _keras_numbered(named: dict[str, Any]) -> Saved | None:
    if not named or not all(re.fullmatch(r"\d+", key) for key in named):
        return None
    rate, *_ = _take("Keras", named, "1", "2", "3")
    # Unlike those of the inner optimizer: a learning rate that is never used.
    if number(rate) != 0:
        raise StateError(
            "The state looks like the variables of a Keras optimizer, but not like those of a "
            f"LossScaleOptimizer, whose variable 1 is 0: got {rate!r:.80}."
        )
    return Saved(None, {}, _state("Keras", named, "3", "2"), {})


def _jmp(named: dict[str, Any]) -> Saved | None:
    settings = {
        "growth_factor": "factor",
        "growth_interval": "period",
        "min_scale": "min_loss_scale",
    }
    if "loss_scale" not in named or named.keys() - {"loss_scale", "counter", *settings.values()}:
        return None
    state = _state("jmp", named, "loss_scale", "counter")
    return Saved(None, _settings("jmp", named, **settings), state, {})


def _variables(peer: str, named: dict[str, Any], scale: str, good: str) -> Saved | None:
    """The state from two variables, named by the ends of their paths, and the settings by name."""
    paths: dict[str, list[str]] = {}
    for key in named:
        path = key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").removesuffix(":0")
        paths.setdefault(path.rpartition("/")[2], []).append(key)
    if scale not in paths and good not in paths:
        return None
    for name, found in zip((scale, good), _take(peer, paths, scale, good), strict=True):
        if len(found) > 1:
            raise StateError(
                f"The state has more than one {name}: {sorted(found)}. Keep only one of them."
            )
    keys = {"growth_interval": "dynamic_growth_steps", "init_scale": "initial_scale"}
    state = _state(peer, named, paths[scale][0], paths[good][0])
    return Saved(None, _settings(peer, named, **keys), state, {})


def _settings(peer: str, named: Mapping[str, Any], **keys: str) -> dict[str, Any]:
    """The settings found in `named`, under our names; `keys` are the peer's."""
    settings: dict[str, Any] = {}
    for name, key in keys.items():
        if key not in named:
            continue
        what, value = f"{peer}'s {key}", named[key]
        if name in ("growth_interval", "hysteresis"):
            settings[name] = whole(what, value, 1)
        else:
            settings[name] = positive(what, value)
    factor = settings.get("growth_factor", 2.0)
    if not factor > 1:
        raise StateError(f"{peer}'s {keys['growth_factor']} must be > 1, got {factor}.")
    if "growth_factor" in settings:
        settings["backoff_factor"] = 1 / factor
    return settings


def _state(peer: str, found: Mapping[str, Any], scale: str, good: str) -> dict[str, Any]:
    """The scale and the counter of finite steps that `found` has under these keys."""
    values = _take(peer, found, scale, good)
    return {
        "scale": positive(f"{peer}'s {scale}", values[0]),
        "good_steps": whole(f"{peer}'s {good}", values[1]),
    }


def _take(peer: str, found: Mapping[str, Any], *keys: str) -> list[Any]:
    """The values of `keys`; a StateError if one is missing."""
    missing = [key for key in keys if key not in found]
    if missing:
        raise StateError(
            f"The state looks like {peer}'s, but lacks {', '.join(missing)}; "
            f"the keys found are {sorted(map(str, found))}."
        )
    return [found[key] for key in keys]


def _attributes(peer: str, key: str, value: Any) -> dict[str, Any]:
    """The items of a dict, or the attributes of an object of any class."""
    try:
        return dict(value) if isinstance(value, Mapping) else vars(value)
    except TypeError:
        raise StateError(
            f"{peer}'s {key} must be a dict or an object, got {value!r:.80}."
        ) from None
