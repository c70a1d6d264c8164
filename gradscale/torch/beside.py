"""Values that belong to objects, such as optimizers, as long as those live.

By identity, because an optimizer, or a wrapper of one, need not be hashable, and without the cost
of a new weak reference every time that a value is set.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """A value for each of some objects."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, owner: Any) -> T | None:
        """The value of `owner`; None if it has none."""
        ref, value = self._entries.get(id(owner), (None, None))
        return value if ref is not None and ref() is owner else None

    def set(self, owner: Any, value: T) -> None:
        """Gives `owner` a `value`, in the place of the one before."""
        key, entries = id(owner), self._entries
        ref = entries[key][0] if key in entries else None
        if ref is None or ref() is not owner:
            ref = weakref.ref(owner, lambda _: entries.pop(key, None))
        entries[key] = ref, value

    def values(self) -> Iterator[T]:
        """All values."""
        return (value for _, value in list(self._entries.values()))
