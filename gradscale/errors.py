"""The exceptions that gradscale raises.

Each is also a subclass of the built-in exception that torch raises in the same place, so code that
catches torch's keeps working.
"""

from __future__ import annotations

import sys


class SettingError(ValueError, AssertionError):
    """A setting has an invalid value. The message has the name, the rule and the value."""


class CallOrderError(RuntimeError, AssertionError):
    """A method was called too early, too late or twice. The message names the missing call."""


class StateError(ValueError, RuntimeError):
    """A checkpoint cannot be read; nothing was loaded."""


class StuckError(RuntimeError):
    """Too many consecutive steps were skipped. The message contains a diagnosis."""


def caller_level() -> int:
    """The `stacklevel` with which a warning of this package points at the code that called it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] == "gradscale":
        level, frame = level + 1, frame.f_back
    return level
