"""The rows of results, one for every run and for every time, with all that tables need."""

from __future__ import annotations

import csv
import datetime
import math
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch

import gradscale

Kind = TypeVar("Kind", "Row", "Time")
RESULTS = Path(__file__).parent / "results.csv"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    date: str
    device: str
    python: str
    torch: str
    gradscale: str
    size: str
    training: str
    arm: str
    seed: int
    steps: int
    """Backward passes: a step of the GAN has two."""
    metric: str
    value: float
    """The metric; NaN for a run that ended with an error."""
    second_metric: str
    second_value: float
    """Of trainings that have two metrics; else NaN."""
    skipped: int
    excused: int
    wasted: int
    underflow: float
    dead: int
    tensors: int
    moves: int
    calm_after: int
    """The first step that nothing from outside disturbs any more."""
    history: str
    """The logarithm to the base 2 of every scale that was used, see `measure.pack`."""
    skips: str
    """Which steps were skipped although the loss was finite."""
    seconds: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long a step of one arm takes where nothing runs beside it."""

    date: str
    device: str
    python: str
    torch: str
    gradscale: str
    size: str
    training: str
    arm: str
    ms: float
    """Milliseconds; NaN for an arm that fails."""


def where(device: str) -> dict[str, str]:
    """The columns that are the same for all rows of a machine."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradscale": gradscale.__version__,
    }


def add(row: Row | Time, path: Path) -> None:
    """Adds a row to the table at `path`; old rows stay."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(row)], lineterminator="\n")
        if new:
            writer.writeheader()
        numbers = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in asdict(row).items()}
        writer.writerow(numbers)


def read(path: Path) -> list[Row]:
    """The rows of the table at `path`; of runs that were repeated, the last."""
    rows = _read(Row, path)
    latest = {(row.device, row.size, row.training, row.arm, row.seed): row for row in rows}
    return list(latest.values())


def read_times(path: Path) -> list[Time]:
    """The same for times."""
    rows = _read(Time, path)
    return list({(row.device, row.size, row.training, row.arm): row for row in rows}.values())


def _read(kind: type[Kind], path: Path) -> list[Kind]:
    """All rows; none where there is no file yet."""
    if not path.exists():
        return []
    read = {"int": int, "float": float, "str": str}
    columns = {field.name: read[str(field.type)] for field in fields(kind)}
    with path.open(newline="") as file:
        return [
            kind(**{name: make(line[name]) for name, make in columns.items()})
            for line in csv.DictReader(file)
        ]


def of_arm(rows: Iterable[Row], training: str, arm: str) -> list[Row]:
    """The rows of one arm of one training."""
    return [row for row in rows if (row.training, row.arm) == (training, arm)]


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of nothing."""
    known = list(values)
    return sum(known) / len(known) if known else math.nan
