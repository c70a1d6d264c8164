"""What the gradients of a training are like, step by step: made up by a name, or from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscale.errors import SettingError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class History(NamedTuple):
    """Gradients as they are without a scale, a row for every step and a column for every run."""

    amax: Floats
    """log2 of the largest magnitude among the weights' gradients."""
    above: Floats
    """Binades by which something else in the backward pass reaches above that."""
    loss_finite: Flags
    """Whether the loss was finite; where it is not, nor is any gradient."""


def _steady(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Gradients as large as a healthy training has them, with some noise."""
    return rng.normal(-2.0, 0.7, shape)


def _steps(shape: tuple[int, int]) -> Floats:
    """The number of every step, as a column."""
    return np.arange(shape[0], dtype=np.float64)[:, None]


def _heavy(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Noise without a variance."""
    return rng.standard_t(2, shape) - 2.0


Maker = Callable[[np.random.Generator, tuple[int, int]], Floats]
KINDS: dict[str, tuple[str, Maker]] = {
    "steady": ("a healthy training", _steady),
    "small": ("gradients 25 binades smaller", lambda rng, s: _steady(rng, s) - 25.0),
    "activations": ("something else reaches 6 binades above the weights' gradients", _steady),
    "spikes": (
        "one step in 50 is 8 binades above the others",
        lambda rng, s: _steady(rng, s) + 8.0 * (_steps(s) % 50 == 49),
    ),
    "burst": ("60 steps in the middle are NaN, and so are their losses", _steady),
    "fading": (
        "gradients become 20 binades smaller",
        lambda rng, s: _steady(rng, s) - 20.0 * _steps(s) / s[0],
    ),
    "rising": (
        "gradients become 20 binades larger",
        lambda rng, s: _steady(rng, s) + 20.0 * _steps(s) / s[0],
    ),
    "jump": (
        "gradients are 12 binades larger from the middle on",
        lambda rng, s: _steady(rng, s) + 12.0 * (_steps(s) >= s[0] // 2),
    ),
    "heavy": ("noise without a variance", _heavy),
}
"""What can be made up: in words, and by what."""


def made_up(kind: str, steps: int, runs: int, seed: int = 0) -> History:
    """A history by the name of its kind.

    >>> made_up("steady", steps=3, runs=2).amax.shape
    (3, 2)
    """
    if kind not in KINDS:
        raise SettingError(f"history must be a file or one of {', '.join(KINDS)}, got {kind!r}.")
    for name, number in (("steps", steps), ("runs", runs)):
        if number < 1:
            raise SettingError(f"{name} must be >= 1, got {number}.")
    shape = (steps, runs)
    amax = KINDS[kind][1](np.random.default_rng(seed), shape)
    above = np.full(shape, 6.0 if kind == "activations" else 0.0)
    loss_finite = np.ones(shape, dtype=bool)
    if kind == "burst":
        loss_finite[steps // 2 : steps // 2 + 60] = False
    return History(amax, above, loss_finite)


def recorded(path: Path, runs: int = 1) -> History:
    """The history in a CSV file with the columns `amax` and `scale`, and perhaps `loss_finite`.

    `amax` is what `outcome.amax` said, at that scale. Of a step that overflowed nobody knows how
    large it was; it is taken for one binade too large for its scale, as float16 has it.
    """
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            try:
                amax, scale = float(row["amax"]), float(row["scale"])
                finite = float(row.get("loss_finite") or 1.0) != 0
            except (KeyError, TypeError, ValueError):
                raise SettingError(
                    f"{path.name} must have numbers in the columns amax and scale, and 0 or 1 in "
                    f"loss_finite if there is one; row {number} is {dict(row)}."
                ) from None
            if not 0 < scale < math.inf:
                raise SettingError(f"scale must be > 0 and finite, row {number} has {scale}.")
            known = math.isfinite(amax)
            largest = math.log2(amax) if known and amax > 0 else 17.0 if not known else -math.inf
            rows.append((largest - math.log2(scale), finite))
    if not rows:
        raise SettingError(f"{path.name} has no steps.")
    shape = (len(rows), runs)
    amax_column = np.array([[value] for value, _ in rows])
    loss_finite = np.array([[finite] for _, finite in rows])
    return History(
        np.broadcast_to(amax_column, shape), np.zeros(shape), np.broadcast_to(loss_finite, shape)
    )
