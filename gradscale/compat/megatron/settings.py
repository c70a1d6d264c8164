"""Megatron-LM's arguments to a policy and back.

    --fp16                   without it and without --loss-scale: Off
    --loss-scale             Static(init_scale=loss_scale)
    --initial-loss-scale     Dynamic(init_scale=initial_loss_scale)
    --min-loss-scale         min_scale
    --loss-scale-window      growth_interval
    --hysteresis             hysteresis

Megatron's factors are 2 and 1/2, and it has no ceiling. `hysteresis` is taken as Megatron documents
it: overflows in a row. (Its code counts them until the scale grows.) What cannot be translated is a
SettingError that names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from gradscale.compat.deepspeed.settings import check_floor, is_power_of_two, refuse_unknown, whole
from gradscale.errors import SettingError
from gradscale.policy import Dynamic, Off, Static
from gradscale.policy.settings import as_flag, as_scale

DEFAULTS = {
    "fp16": False,
    "loss_scale": None,
    "initial_loss_scale": 2.0**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
}
"""The arguments that are about the scale, by the names of their attributes, and their defaults."""


def policy_from_arguments(arguments: Any) -> Dynamic | Static | Off:
    """The policy with the settings of Megatron-LM's arguments.

    >>> policy_from_arguments({"fp16": True, "initial_loss_scale": 4096.0})
    Dynamic(init_scale=4096.0, growth_interval=1000, hysteresis=2, min_scale=1.0)

    Args:
        arguments: What `get_args()` returns, an `OptimizerConfig`, or a dict; what is not about the
            scale is not read, and what is missing is Megatron's default.

    Raises:
        SettingError: An argument has a wrong value.
    """
    found = dict(DEFAULTS)
    for name in DEFAULTS:
        if isinstance(arguments, Mapping):
            found[name] = arguments.get(name, found[name])
        else:
            found[name] = getattr(arguments, name, found[name])
    if found["loss_scale"]:
        scale = as_scale("loss_scale", found["loss_scale"], exact=False)
        return Static(init_scale=scale, exact=is_power_of_two(scale))
    if not as_flag("fp16", found["fp16"]):
        return Off()
    start = as_scale("initial_loss_scale", found["initial_loss_scale"], exact=False)
    floor = as_scale("min_loss_scale", found["min_loss_scale"], exact=False)
    check_floor("initial_loss_scale", start, "min_loss_scale", floor)
    return Dynamic(
        init_scale=start,
        growth_interval=whole("loss_scale_window", found["loss_scale_window"]),
        hysteresis=whole("hysteresis", found["hysteresis"]),
        min_scale=floor,
        exact=is_power_of_two(start) and is_power_of_two(floor),
    )


def policy_from_flags(flags: Sequence[str]) -> Dynamic | Static | Off:
    """The policy with the settings of a command line; flags that are not about it are passed over.

    >>> policy_from_flags(["--num-layers", "2", "--fp16", "--loss-scale", "1024"])
    Static(init_scale=1024.0)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--fp16", action="store_true")
    for name, default in DEFAULTS.items():
        if name != "fp16":
            parser.add_argument(_flag(name), type=float, default=default)
    try:
        found, _ = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise SettingError(f"The flags cannot be read: {error}.") from None
    return policy_from_arguments(found)


def arguments_from_policy(policy: Dynamic | Static | Off) -> dict[str, Any]:
    """The settings of `policy` as attributes of Megatron-LM's arguments.

    >>> arguments_from_policy(Static(1024.0))
    {'fp16': True, 'loss_scale': 1024.0}

    Raises:
        SettingError: Megatron-LM has no counterpart for a setting.
    """
    if isinstance(policy, Off):
        return {"fp16": False, "loss_scale": None}
    if isinstance(policy, Static):
        return {"fp16": True, "loss_scale": policy.init_scale}
    if not isinstance(policy, Dynamic):
        raise SettingError(f"Megatron-LM has no counterpart of {policy!r}. Use gs.Dynamic.")
    refuse_unknown("Megatron-LM", policy)
    return {
        "fp16": True,
        "loss_scale": None,
        "initial_loss_scale": policy.init_scale,
        "min_loss_scale": float(policy.min_scale),
        "loss_scale_window": policy.growth_interval,
        "hysteresis": policy.hysteresis,
    }


def flags_from_policy(policy: Dynamic | Static | Off) -> list[str]:
    """The settings of `policy` as a command line of Megatron-LM.

    >>> flags_from_policy(Static(1024.0))
    ['--fp16', '--loss-scale', '1024.0']
    """
    arguments = arguments_from_policy(policy)
    flags = ["--fp16"] if arguments.pop("fp16") else []
    for name, value in arguments.items():
        if value is not None:
            flags += [_flag(name), repr(value)]
    return flags


def _flag(name: str) -> str:
    """The flag of an attribute."""
    return "--" + name.replace("_", "-")
