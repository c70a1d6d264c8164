"""The errors gradscale raises at its callers.

Each also is the built-in error that torch raises in the same place, so code that catches torch's
keeps working.
"""

from __future__ import annotations

import sys


class SettingError(ValueError, AssertionError):
    """A setting breaks its rule; the message names the setting, the rule and the value."""


class CallOrderError(RuntimeError, AssertionError):
    """A call came too early, too late or twice; the message names the call that is missing."""


class StateError(ValueError, RuntimeError):
    """A checkpoint cannot be read; nothing of it was loaded."""


class StuckError(RuntimeError):
    """Too many steps in a row were skipped; the message carries the diagnosis."""


def caller_level() -> int:
    """The `stacklevel` with which a warning of this package points at the code that called it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].split(".")[0] == "gradscale":
        level, frame = level + 1, frame.f_back
    return level
