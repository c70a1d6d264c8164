"""The errors gradscale raises at its callers.

Each also is the built-in error that torch raises in the same place, so code that catches torch's
keeps working.
"""


class SettingError(ValueError, AssertionError):
    """A setting breaks its rule; the message names the setting, the rule and the value."""


class CallOrderError(RuntimeError, AssertionError):
    """A call came too early, too late or twice; the message names the call that is missing."""


class StateError(ValueError, RuntimeError):
    """A checkpoint cannot be read; nothing of it was loaded."""


class StuckError(RuntimeError):
    """Too many steps in a row were skipped; the message carries the diagnosis."""
