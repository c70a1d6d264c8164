"""Histories of the largest gradients of a training: made up by name, or read from a file."""

from __future__ import annotations

import ast
import csv
import math
from pathlib import Path
from typing import Any, NamedTuple

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


KINDS = {
    "steady": "a healthy training",
    "small": "gradients 25 binades smaller",
    "activations": "something else reaches 6 binades above the weights' gradients",
    "spikes": "one step in 50 is 8 binades above the others",
    "burst": "60 steps in the middle are NaN, and so are their losses",
    "fading": "gradients become 20 binades smaller",
    "rising": "gradients become 20 binades larger",
    "jump": "gradients are 12 binades larger from the middle on",
    "heavy": "noise without a variance",
    "lognormal": "normal logarithms: lognormal(deviation=1.5, drift=0.0, spikes=0.0, height=8.0)",
}
"""The histories that can be made up."""


def made_up(kind: str, steps: int, runs: int, seed: int = 0) -> History:
    """A history by the name of its kind; that of "lognormal" may have settings.

    >>> made_up("steady", steps=3, runs=2).amax.shape
    (3, 2)
    >>> made_up("lognormal(3.0, drift=10)", steps=3, runs=2).amax.shape
    (3, 2)
    """
    settings = None if kind in KINDS and kind != "lognormal" else _settings(kind)
    for name, number in (("steps", steps), ("runs", runs)):
        if number < 1:
            raise SettingError(f"{name} must be >= 1, got {number}.")
    shape, rng = (steps, runs), np.random.default_rng(seed)
    if settings is not None:
        return _lognormal(shape, rng, *settings)
    noise = rng.standard_t(2, shape) - 2.0 if kind == "heavy" else rng.normal(-2.0, 0.7, shape)
    step = np.arange(steps, dtype=np.float64)[:, None]
    shifts: dict[str, Any] = {
        "small": -25.0,
        "spikes": 8.0 * (step % 50 == 49),
        "fading": -20.0 * step / steps,
        "rising": 20.0 * step / steps,
        "jump": 12.0 * (step >= steps // 2),
    }
    above = np.full(shape, 6.0 if kind == "activations" else 0.0)
    loss_finite = np.ones(shape, dtype=bool)
    if kind == "burst":
        loss_finite[steps // 2 : steps // 2 + 60] = False
    return History(noise + shifts.get(kind, 0.0), above, loss_finite)


def _settings(kind: str) -> list[float]:
    """Deviation, drift, spikes and height of a "lognormal" history; else a SettingError."""
    names = {"deviation": 1.5, "drift": 0.0, "spikes": 0.0, "height": 8.0}
    try:
        call: Any = ast.parse(kind.strip(), mode="eval").body
        call = call if isinstance(call, ast.Call) else ast.Call(call, [], [])
        values = [ast.literal_eval(each) for each in call.args]
        given = dict(zip(names, values, strict=False))
        given |= {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        if (
            call.func.id != "lognormal"
            or len(values) > len(names)
            or not given.keys() <= names.keys()
        ):
            raise ValueError
        return [float(value) for value in (names | given).values()]
    except (SyntaxError, ValueError, AttributeError, TypeError):
        raise SettingError(
            f"history must be a file or one of {', '.join(KINDS)}; lognormal may have settings, as "
            f"in lognormal(2.0, drift=10, spikes=0.02, height=8); got {kind!r}."
        ) from None


def _lognormal(
    shape: tuple[int, int],
    rng: np.random.Generator,
    deviation: float,
    drift: float,
    spikes: float,
    height: float,
) -> History:
    """Logarithms with this deviation in binades, a drift over the whole history, and spikes.

    `spikes` is the chance that a step is `height` binades above the others.
    """
    noise = rng.normal(-8.0, deviation, shape)
    noise += height * (rng.random(shape) < spikes)
    noise += drift * np.linspace(0.0, 1.0, shape[0])[:, None]
    return History(noise, np.zeros(shape), np.ones(shape, dtype=bool))


def recorded(path: Path) -> History:
    """The history in a CSV file with the columns `amax` and `scale`, and perhaps `loss_finite`.

    `amax` is `outcome.amax`, at that scale. That of a step that overflowed is taken to be one
    binade above what float16 can hold.
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
            amax = amax if math.isfinite(amax) else 2.0**17
            largest = math.log2(amax) if amax > 0 else -math.inf
            rows.append((largest - math.log2(scale), finite))
    if not rows:
        raise SettingError(f"{path.name} has no steps.")
    sizes, finites = (np.array(column)[:, None] for column in zip(*rows, strict=True))
    return History(sizes, np.zeros(sizes.shape), finites)
