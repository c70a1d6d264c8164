"""The bound of a run log: which steps it keeps.

A file keeps `max_steps` lines of applied steps. When there are more, only those whose number is a
multiple of the stride stay, which is doubled until there is room again, and later steps are held to
the same stride. Skipped steps, events, findings, samples and unknown lines all stay.
Every rank keeps the same steps, because it goes by their numbers.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from gradscale.runlog.lines import encode

_STEP = re.compile(rb'\{"kind":"step","step":(\d+),')
"""How `encode()` begins the line of a step. Lines are recognised by their bytes: to decode 100,000
of them would keep the interpreter busy for seconds, and these take a tenth of one."""
_SKIPPED = b'"applied":false'
"""In a name, quotes are escaped, so this is no part of one."""
_MOST = 2**62
"""A stride that no step has."""
_STRIDE = re.compile(rb'\{"kind":"thinned","stride":(\d+)\}')


def number_of(text: bytes) -> int | None:
    """The number of the step that a line is about, if it was applied and may be left out."""
    found = _STEP.match(text)
    return None if found is None or _SKIPPED in text else int(found[1])


class Thinning:
    """The stride of one file, and how many applied steps are in it."""

    def __init__(self, path: Path, max_steps: int) -> None:
        self._path, self._max_steps = path, max_steps
        self.new = path.with_name(path.name + ".thinned")
        """The file that is to replace the old one."""
        self.new.unlink(missing_ok=True)  # of a process that was killed while it wrote this
        self.last_step = self._count = 0
        self._stride = 1
        with path.open("rb") as stream:
            for text in stream:
                if (step := _STEP.match(text)) is not None:
                    self.last_step = int(step[1])
                    self._count += _SKIPPED not in text
                elif (stride := _STRIDE.match(text)) is not None:
                    self._stride = int(stride[1])
        self._limit = max_steps

    def keeps(self, text: bytes) -> bool:
        """Whether a line is to be written; counts it."""
        number = number_of(text)
        if number is None:
            return True
        if number % self._stride:
            return False
        self._count += 1
        return True

    def is_full(self) -> bool:
        """Whether the file must be thinned before the next line."""
        return self._count >= self._limit

    def rewrite(self) -> tuple[int, int]:
        """The stride and the count of the new file, after writing the lines that stay to it."""
        stride, count = self._next_stride()
        with self._path.open("rb") as old, self.new.open("wb") as new:
            for text in old:
                number = number_of(text)
                whole = text.endswith(b"\n") and _STRIDE.match(text) is None
                if whole and (number is None or number % stride == 0):
                    new.write(text)
            new.write(encode({"kind": "thinned", "stride": stride}))
            new.flush()
            os.fsync(new.fileno())  # before it takes the place of a file that is complete
        return stride, count

    def replaced(self, stride: int, count: int) -> None:
        """The new file has taken the place of the old one."""
        self._stride, self._count = stride, count
        # Numbers that repeat may not get fewer: then the next try is when there are twice as many.
        self._limit = max(self._max_steps, 2 * count if count > self._max_steps * 3 // 4 else 0)

    def failed(self) -> None:
        """The file stays as it is until there are twice as many lines."""
        self._limit = 2 * self._count

    def _next_stride(self) -> tuple[int, int]:
        """The stride that makes room for a quarter of the lines, and how many it leaves.

        The old one if no stride does that and leaves a quarter, as where all numbers are the same.
        """
        powers: Counter[int] = Counter()
        """How many steps have numbers that this power of two, and no higher one, divides."""
        with self._path.open("rb") as stream:
            for text in stream:
                number = number_of(text)
                if number is not None:
                    powers[(number & -number) or _MOST] += 1
        stride, left = self._stride, sum(powers.values())
        while left > self._max_steps * 3 // 4 and stride < _MOST:
            stride *= 2
            left = sum(count for power, count in powers.items() if power >= stride)
        if left < max(self._max_steps // 4, 1):
            return self._stride, sum(powers.values())
        return stride, left
