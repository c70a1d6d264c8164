"""The contents of a checkpoint in plain numbers, and the checks that a value is such a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradscale.errors import StateError


class Saved(NamedTuple):
    """A checkpoint in plain numbers.

    >>> from gradscale.checkpoints.format import read, write
    >>> saved = Saved("Static", {"init_scale": 8.0}, {"scale": 8.0}, {})
    >>> read(write(saved)) == saved
    True
    """

    policy: str | None
    """The name of the policy; None if the checkpoint is torch's or another peer's: `Dynamic`."""
    settings: dict[str, Any]
    """The policy's settings, by name; of a peer other than torch only those that it saves."""
    state: dict[str, Any]
    """The policy's state, by field; it has at least `scale`."""
    counters: dict[str, int]
    """The engine's counters, by name."""
    losses: Sequence[tuple[int | str, dict[str, Any]]] = ()
    """The states of losses other than loss 0, as (loss id, fields)."""
    patience: int | None = None
    """How many further overflows in a row lower the scale, of a peer that counts down from a number
    it does not save; else None. `bad_steps` is then `max(hysteresis - patience, 0)`."""
    skipped_in_a_row: Sequence[int] = ()
    """Consecutive skipped steps of each optimizer, in order of first use; empty if not saved."""

    @classmethod
    def static(cls, scale: float) -> Saved:
        """The contents of a checkpoint whose scale never moves."""
        return cls("Static", {"init_scale": scale, "exact": False}, {"scale": scale}, {})


def number(value: Any) -> int | float | bool | None:
    """The plain number that `value` is or holds as its only element; None if there is none."""
    try:
        if not hasattr(value, "item") and hasattr(value, "__array__"):
            value = value.__array__()  # a variable of Keras', a dataset of an HDF5 file
        if hasattr(value, "item"):
            value = value.item()
    except Exception:  # an object of an unknown class may raise anything
        return None
    return value if isinstance(value, int | float) else None


def positive(what: str, value: Any) -> float:
    """`value` as a finite number above 0; else a StateError that says `what` it is."""
    found = number(value)
    try:
        found = math.nan if found is None or isinstance(found, bool) else float(found)
    except OverflowError:
        found = math.inf
    if not 0 < found < math.inf:
        raise StateError(
            f"{what} must be a finite number > 0, got {value!r:.80}. Nothing was loaded."
        )
    return found


def whole(what: str, value: Any, least: int = 0, most: int = 2**31 - 1) -> int:
    """`value` as an int from `least` to `most`; else a StateError that says `what` it is."""
    found = number(value)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise StateError(
            f"{what} must be a whole number from {least} to {most}, got {value!r:.80}. "
            "Nothing was loaded."
        )
    return found
