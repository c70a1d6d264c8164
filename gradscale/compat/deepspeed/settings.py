"""DeepSpeed's configuration to a policy and back.

Of the section "fp16" these entries are about the scale:

    enabled                  false: Off
    loss_scale               above 0: Static(init_scale=loss_scale); 0: Dynamic
    initial_scale_power      Dynamic(init_scale=2.0**initial_scale_power)
    loss_scale_window        growth_interval
    min_loss_scale           min_scale
    hysteresis               hysteresis, if consecutive_hysteresis is true or hysteresis is 1

DeepSpeed's factors are 2 and 1/2, and it has no ceiling. What cannot be translated is a
SettingError that names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gradscale.errors import SettingError
from gradscale.policy import DefaultBound, Dynamic, Off, Static
from gradscale.policy.settings import as_count, as_flag, as_number, as_scale, listed

DEFAULTS = {
    "enabled": False,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""The entries of "fp16" that are about the scale, with DeepSpeed's defaults."""
_OTHERS = ("auto_cast", "fp16_master_weights_and_grads")
"""The entries of "fp16" that are about something else."""


def policy_from_config(config: Mapping[str, Any]) -> Dynamic | Static | Off:
    """The policy with the settings of a DeepSpeed configuration.

    >>> section = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}
    >>> policy_from_config({"train_batch_size": 8, "fp16": section})
    Dynamic(init_scale=4096.0, growth_interval=1000, min_scale=1.0)
    >>> policy_from_config({"fp16": {"enabled": True, "loss_scale": 128}})
    Static(init_scale=128.0)

    Args:
        config: The whole configuration, as in the JSON file; sections other than "fp16" are not
            read.

    Raises:
        SettingError: `config` is not a mapping, or an entry of "fp16" is unknown, wrong, or has no
            counterpart here.
    """
    section = _checked(config).get("fp16", {})
    if not isinstance(section, Mapping):
        raise SettingError(f"fp16 must be a section of settings, got {section!r}.")
    unknown = [name for name in section if name not in (*DEFAULTS, *_OTHERS)]
    if unknown:
        raise SettingError(
            f"fp16 has settings that are not supported: {', '.join(map(str, unknown))}. Known "
            f"settings are {', '.join((*DEFAULTS, *_OTHERS))}."
        )
    found = {**DEFAULTS, **section}
    if not as_flag("fp16.enabled", found["enabled"]):
        return Off()
    scale = as_number("fp16.loss_scale", found["loss_scale"])
    if scale != 0:
        scale = as_scale("fp16.loss_scale", scale, exact=False)
        return Static(init_scale=scale, exact=is_power_of_two(scale))
    power = as_number("fp16.initial_scale_power", found["initial_scale_power"])
    if not power.is_integer() or not -126 <= power <= 127:
        raise SettingError(
            f"fp16.initial_scale_power must be a whole number from -126 to 127, got {power:g}."
        )
    floor = as_scale("fp16.min_loss_scale", found["min_loss_scale"], exact=False)
    if not floor.is_integer():
        raise SettingError(f"fp16.min_loss_scale must be a whole number, got {floor}.")
    check_floor("2**fp16.initial_scale_power", 2.0**power, "fp16.min_loss_scale", floor)
    return dynamic_policy(
        init_scale=2.0**power,
        scale_window=whole("fp16.loss_scale_window", found["loss_scale_window"]),
        min_scale=floor,
        delayed_shift=whole("fp16.hysteresis", found["hysteresis"]),
        consecutive_hysteresis=as_flag(
            "fp16.consecutive_hysteresis", found["consecutive_hysteresis"]
        ),
    )


def _checked(config: Any) -> Mapping[str, Any]:
    """`config`, or a SettingError if it is not a configuration in memory."""
    if not isinstance(config, Mapping):
        raise SettingError(
            f"config must be a dict, got {config!r}. Read a file with json.load() first."
        )
    return config


def dynamic_policy(
    *,
    init_scale: float,
    scale_window: int,
    min_scale: float,
    delayed_shift: int,
    consecutive_hysteresis: bool,
) -> Dynamic:
    """The policy with the settings of DeepSpeed's `DynamicLossScaler`, by their names there.

    A SettingError if the hysteresis is not one of overflows in a row.
    """
    if delayed_shift != 1 and not consecutive_hysteresis:
        raise SettingError(
            f"hysteresis={delayed_shift} with consecutive_hysteresis=False has no counterpart in "
            "gradscale: DeepSpeed then counts all overflows until the scale grows, and gradscale "
            "counts only consecutive overflows. Set consecutive_hysteresis to True, or hysteresis "
            "to 1."
        )
    return Dynamic(
        init_scale=init_scale,
        growth_interval=scale_window,
        hysteresis=delayed_shift,
        min_scale=min_scale,
        exact=is_power_of_two(init_scale) and is_power_of_two(min_scale),
    )


def config_from_policy(
    policy: Dynamic | Static | Off, config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`config`, a DeepSpeed configuration, with the settings of `policy` in its section "fp16".

    >>> config_from_policy(Static(128.0))
    {'fp16': {'enabled': True, 'loss_scale': 128.0}}

    Args:
        policy: The policy. With `Off` float16 is switched off.
        config: What everything else is taken from, if it is given; it is not changed.

    Raises:
        SettingError: DeepSpeed has no counterpart for a setting.
    """
    base = {} if config is None else dict(_checked(config))
    section = dict(base.get("fp16", {}))
    if isinstance(policy, Off):
        section["enabled"] = False
    elif isinstance(policy, Static):
        section |= {"enabled": True, "loss_scale": policy.init_scale}
    elif isinstance(policy, Dynamic):
        section |= {"enabled": True, "loss_scale": 0, **_dynamic_section(policy)}
    else:
        raise SettingError(f"DeepSpeed has no counterpart of {policy!r}. Use gs.Dynamic.")
    return {**base, "fp16": section}


def _dynamic_section(policy: Dynamic) -> dict[str, Any]:
    """The entries of "fp16" that have the settings of `policy`."""
    refuse_unknown("DeepSpeed", policy)
    if not is_power_of_two(policy.init_scale):
        raise SettingError(
            "init_scale must be a power of two, because DeepSpeed's fp16.initial_scale_power is "
            f"its exponent, got {policy.init_scale}."
        )
    if not policy.min_scale.is_integer():
        raise SettingError(
            "min_scale must be a whole number, because DeepSpeed's fp16.min_loss_scale is one, "
            f"got {float(policy.min_scale)}. Set min_scale to 1.0 or more."
        )
    return {
        "initial_scale_power": math.frexp(policy.init_scale)[1] - 1,
        "loss_scale_window": policy.growth_interval,
        "hysteresis": policy.hysteresis,
        "consecutive_hysteresis": True,
        "min_loss_scale": int(policy.min_scale),
    }


def refuse_unknown(system: str, policy: Dynamic) -> None:
    """Raises a SettingError if `policy` has settings that neither DeepSpeed nor Megatron has."""
    fixed: dict[str, Any] = {"growth_factor": 2.0, "backoff_factor": 0.5, "slow_growth_above": None}
    odd = {name: getattr(policy, name) for name in fixed if getattr(policy, name) != fixed[name]}
    if not isinstance(policy.max_scale, DefaultBound):
        odd["max_scale"] = policy.max_scale
    if odd:
        raise SettingError(
            f"{system} has no counterpart of {listed(odd)}: its factors are 2 and 0.5, it has no "
            "maximum scale, and its interval is the same at every scale. Remove these settings."
        )


def check_floor(name: str, scale: float, floor_name: str, floor: float) -> None:
    """Raises a SettingError if the first scale is below the floor."""
    if not scale >= floor:
        raise SettingError(
            f"{name} must be >= {floor_name}, which is {float(floor)}, got {float(scale)}."
        )


def is_power_of_two(number: float) -> bool:
    """Whether `number` is a power of two."""
    return math.frexp(number)[0] == 0.5


def whole(name: str, value: Any) -> int:
    """`value` as a whole number >= 1, or a SettingError; 1e3 is one too, as JSON may have it."""
    number = as_number(name, value)
    return as_count(name, int(number) if number.is_integer() else value)
