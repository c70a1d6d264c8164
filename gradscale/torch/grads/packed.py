"""A policy's state and settings, each as one int32 vector on the device.

A kernel then takes one pointer for each of them, whatever the policy. Floats are stored by their
bits.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from gradscale.formats import format_named
from gradscale.policy import Dynamic, Headroom, LogMaxState, Off, Policy, Static, room_below
from gradscale.torch.grads.fields import Field
from gradscale.torch.grads.upload import capturing, keep, upload

CONSTANT, DYNAMIC, HEADROOM = range(3)
"""The rules that kernels implement; `rule_of` says which one a policy is."""

LOSS_OFF, LOSS_FLAG, LOSS_RAW = range(3)
"""Kinds of loss that kernels take: none (the rule about losses is off), a bool that is True if the
losses were finite, or a float32 loss that the kernel tests itself."""

PATIENT_LOSSES, LOSS_PERIOD = 32, 8
"""So many non-finite losses in a row leave the scale alone; after them, one in so many counts as an
overflow, because the scale may have caused them."""

COUNTERS = (Field("bad_losses", torch.int32), Field("steps", torch.int32))
"""The first words of a packed state: non-finite losses in a row, and updates."""

LOSSES = (Field("patience", torch.int32), Field("period", torch.int32))
"""The first words of packed settings: `PATIENT_LOSSES` and `LOSS_PERIOD`."""
_BOUNDS = (Field("min_scale", torch.float32), Field("max_scale", torch.float32))
SETTINGS: dict[int, tuple[Field, ...]] = {
    CONSTANT: LOSSES,
    DYNAMIC: (
        *LOSSES,
        *_BOUNDS,
        Field("growth_factor", torch.float32),
        Field("backoff_factor", torch.float32),
        Field("growth_interval", torch.int32),
        Field("hysteresis", torch.int32),
        Field("room", torch.float32),  # above it the product with growth_factor would overflow
    ),
    HEADROOM: (
        *LOSSES,
        *_BOUNDS,
        Field("room", torch.int32),  # exponent of the format's ceiling, less the margin
        Field("margin", torch.int32),
        Field("memory", torch.int32),
        Field("forget", torch.int32),
        Field("pause", torch.int32),
        Field("skips", torch.int32),  # 1: lone spikes are skipped
    ),
}
"""The words of packed settings, by rule."""

_RULES: dict[type, int] = {
    Off: CONSTANT,
    Static: CONSTANT,
    Dynamic: DYNAMIC,
    Headroom: HEADROOM,
}


def rule_of(policy: Policy) -> int | None:
    """Which of the rules in kernels `policy` is; None if it is none of them."""
    if isinstance(policy, Dynamic) and not policy.is_plain:
        return None
    return _RULES.get(type(policy))  # not of a subclass, which may have changed the rule


@functools.cache
def state_fields(state_type: Any) -> tuple[Field, ...]:
    """The words of a packed state of this NamedTuple type."""
    floats = LogMaxState._fields if state_type is LogMaxState else ("scale",)
    dtypes = dict.fromkeys(floats, torch.float32)
    own = [Field(name, dtypes.get(name, torch.int32)) for name in state_type._fields]
    return (*COUNTERS, *own)


def pack(state: Any, *, device: torch.device, bad_losses: int = 0, steps: int = 0) -> Tensor:
    """The int32 vector on `device` that holds the counters, then the fields of `state` in order.

    `state` is a policy's NamedTuple of plain numbers.
    """
    kind: Any = type(state)
    return _packed(state_fields(kind), [bad_losses, steps, *state], device)


def views(packed: Tensor, state_type: Any) -> Any:
    """A `state_type` of 0-dim tensors, float32 or int32, that share the memory of `packed`."""
    floats = packed.view(torch.float32)
    # Unbound in one call: indexing takes a microsecond for each field.
    words = {torch.int32: packed.unbind(), torch.float32: floats.unbind()}
    fields = state_fields(state_type)
    first = len(COUNTERS)
    return state_type(*(words[f.dtype][at] for at, f in enumerate(fields[first:], first)))


_settings: dict[Any, Tensor] = {}
"""Packed settings, never freed: captured CUDA graphs may read them for as long as they exist."""


def pack_settings(
    policy: Policy,
    *,
    device: torch.device,
    patience: int = PATIENT_LOSSES,
    period: int = LOSS_PERIOD,
) -> Tensor:
    """The int32 vector on `device` of the settings that kernels take of `policy`, cached.

    `policy` must be one that `rule_of` names; its words are `SETTINGS` of that rule.
    """
    key = (policy, device, patience, period)
    found = _settings.get(key)
    if found is None:
        fields = SETTINGS[_RULES[type(policy)]]
        values: dict[str, float] = {"patience": patience, "period": period}
        if isinstance(policy, Dynamic):
            values["room"] = room_below(policy.growth_factor)
        elif isinstance(policy, Headroom):
            values["room"] = format_named(policy.format).ceiling - policy.margin
            values["skips"] = policy.spikes == "skip"
        words = [values[f.name] if f.name in values else getattr(policy, f.name) for f in fields]
        found = _packed(fields, words, device)
        keep(found)
        if not capturing():  # else it has no values before the first replay
            _settings[key] = found
    return found


def _packed(fields: tuple[Field, ...], values: list[Any], device: torch.device) -> Tensor:
    """`values` as the words of `fields`."""
    words = [
        _bits(value) if field.dtype is torch.float32 else int(value)
        for field, value in zip(fields, values, strict=True)
    ]
    return upload(words, torch.int32, device)


def _bits(value: float) -> int:
    """The bits of the float32 nearest to `value`, as an int32."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
