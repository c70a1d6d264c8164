"""Curves of a run: a number per step, read from the lines of its log and thinned for a page.

A log may come from anywhere, so a field that is not a number counts as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

POINTS = 2000
"""Points of a curve at most; a screen has about as many pixels."""

Curve = list[tuple[int, float]]


def number(value: Any) -> float | None:
    """`value` as a finite float; None if it is none.

    >>> number(2), number(float("inf")), number("2"), number(True)
    (2.0, None, None, None)
    """
    if type(value) is float:  # nearly always, and 100,000 steps have a million of them
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        read = float(value)
    except OverflowError:  # JSON has integers of any size
        return None
    return read if math.isfinite(read) else None


def optimizer_steps(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps of optimizers in a line of kind "step"."""
    steps = line.get("steps")
    return [each for each in steps if isinstance(each, Mapping)] if isinstance(steps, list) else []


def of_line(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    """A function that reads the number `name` of a line."""
    return lambda line: number(line.get(name))


def of_steps(
    name: str, fold: Callable[[Iterable[float]], float]
) -> Callable[[Mapping[str, Any]], float | None]:
    """A function that reads the number `name` of the steps in a line: several are folded."""

    def read(line: Mapping[str, Any]) -> float | None:
        steps = optimizer_steps(line)
        if len(steps) == 1:
            return number(steps[0].get(name))
        found = [number(step.get(name)) for step in steps]
        values = [value for value in found if value is not None]
        return fold(values) if values else None

    return read


CURVES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "scale": of_line("scale"),
    "loss": of_line("loss"),
    "headroom": of_steps("headroom", min),
    "underflow": of_steps("underflow", max),
    "grad_norm": of_steps("grad_norm", max),
}
"""Every curve, and what it is in a line: with several optimizers, the worst of them."""


def curves(lines: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """For every curve, (step, number) of the lines in which it was measured and finite."""
    found: dict[str, Curve] = {name: [] for name in CURVES}
    readers = [(read, found[name].append) for name, read in CURVES.items()]
    for line in lines:
        step = step_of(line)
        for read, append in readers:
            value = read(line)
            if value is not None:
                append((step, value))
    return found


def step_of(line: Mapping[str, Any]) -> int:
    """The number of the step of a line; 0 if it has none."""
    step = line.get("step")
    return step if isinstance(step, int) and abs(step) < 2**53 else 0


def thin(points: Sequence[tuple[int, float]], limit: int = POINTS) -> Curve:
    """At most `limit` of the points: the smallest and the largest of every run of neighbours.

    So a spike of one step stays visible, however long the run. The first and the last point stay.

    >>> thin([(1, 5.0), (2, 9.0), (3, 1.0), (4, 5.0), (5, 5.0), (6, 6.0)], limit=4)
    [(1, 5.0), (2, 9.0), (3, 1.0), (6, 6.0)]
    """
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    buckets = max((limit - 2) // 2, 1)
    kept = [points[0]]
    for number_of_bucket in range(buckets):
        first = number_of_bucket * len(inner) // buckets
        bucket = inner[first : (number_of_bucket + 1) * len(inner) // buckets]
        ends = {min(bucket, key=lambda p: (p[1], p[0])), max(bucket, key=lambda p: (p[1], p[0]))}
        kept += sorted(ends)
    return [*kept, points[-1]]


def median(values: Iterable[float]) -> float | None:
    """The middle one of the values, the lower of two; None if there are none.

    >>> median([3.0, 1.0, 2.0, 9.0]), median([])
    (2.0, None)
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else None
