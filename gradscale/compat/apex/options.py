"""What `amp.initialize` was asked for: an opt level, and what was said differently.

level   cast_model_type   patch_torch_functions   keep_batchnorm_fp32   master_weights   scale
O0      float32           no                      -                     no               1
O1      -                 yes (autocast)          -                     -                dynamic
O2      float16           no                      yes                   yes              dynamic
O3      float16           no                      no                    no               1
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradscale.errors import SettingError, caller_level

HALVES = (torch.float16, torch.bfloat16)
_FORMATS = (*HALVES, torch.float32)


@dataclass(frozen=True)
class Options:
    """The settings in force; the names are Apex'."""

    opt_level: str | None
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str
    cast_model_outputs: torch.dtype | None = None
    enabled: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """All of them by name."""
        return asdict(self)

    @property
    def half(self) -> torch.dtype | None:
        """The format that the weights are cast to, if that is not float32."""
        return self.cast_model_type if self.cast_model_type in HALVES else None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do: float32 training with a scale of 1."""
        moving = self.patch_torch_functions or self.half is not None or self.master_weights
        return not moving and self.loss_scale == 1.0


LEVELS = {
    str(level.opt_level): level
    for level in (
        Options("O0", torch.float32, False, None, False, 1.0),
        Options("O1", None, True, None, None, "dynamic"),
        Options("O2", torch.float16, False, True, True, "dynamic"),
        Options("O3", torch.float16, False, False, False, 1.0),
    )
}


DISABLED = Options(None, None, False, None, None, 1.0, enabled=False)
"""Those of `amp.initialize(enabled=False)`."""


def resolve(opt_level: Any, hard_override: bool = False, **overrides: Any) -> Options:
    """The options of `opt_level`, with those `overrides` that are not None.

    With `hard_override`, overrides that do not go with the level are taken, with a warning.
    """
    if opt_level not in LEVELS:
        raise SettingError(
            f"opt_level must be one of {', '.join(LEVELS)} (a letter and a digit), got "
            f"{opt_level!r}."
        )
    given = {
        name: _READERS[name](name, value) for name, value in overrides.items() if value is not None
    }
    for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
        value = given.get(name)
        if opt_level == "O1" and value is not None and value is not torch.float32:
            warn_or_refuse(
                f"{name} must be left out with opt_level O1, whose weights stay float32, got "
                f"{value!r}. Use opt_level='O2' or 'O3' to cast the weights.",
                hard_override,
            )
    options = replace(LEVELS[opt_level], **given)
    if options.patch_torch_functions and opt_level != "O1":
        warn_or_refuse(
            "patch_torch_functions must be left out or False unless opt_level is O1, got True "
            f"with {opt_level}. Use opt_level='O1'.",
            hard_override,
        )
    return options


def warn_or_refuse(message: str, hard_override: bool) -> None:
    """A SettingError with `message`; a warning if `_amp_state.hard_override` says so."""
    if not hard_override:
        raise SettingError(message)
    warnings.warn(message, stacklevel=caller_level())


def _dtype(name: str, value: Any) -> torch.dtype:
    if value not in _FORMATS or not isinstance(value, torch.dtype):
        raise SettingError(
            f"{name} must be torch.float16, torch.bfloat16 or torch.float32, got {value!r}."
        )
    return value


def _model_type(name: str, value: Any) -> torch.dtype | None:
    return None if value is False else _dtype(name, value)


def _flag(name: str, value: Any) -> bool:
    # Apex takes the strings because command lines have no booleans.
    words = {"True": True, "False": False}
    flag = words.get(value, value) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise SettingError(f"{name} must be True or False, or either as a string, got {value!r}.")
    return flag


def _loss_scale(name: str, value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise SettingError(
            f"{name} must be 'dynamic' or a finite number > 0, also as a string, got {value!r}."
        )
    return number


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_type": _model_type,
    "patch_torch_functions": _flag,
    "keep_batchnorm_fp32": _flag,
    "master_weights": _flag,
    "loss_scale": _loss_scale,
    "cast_model_outputs": _dtype,
}
