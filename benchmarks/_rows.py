"""The table of results: what a row says, and how rows are added to it."""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

import gradscale

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = [
    "date", "benchmark", "case", "device", "threads", "python", "torch", "gradscale",
    "parameters", "tensors", "rounds", "median_ms", "speedup_over_torch",
]  # fmt: skip
Row = dict[str, str | int]


def row(
    benchmark: str, case: str, device: str, params: list[torch.Tensor], rounds: int,
    value: float, speedup: float, unit: str = "ms",
) -> Row:  # fmt: skip
    """A row, printed on the way.

    `value` goes into the column `median_ms`, whatever its `unit`: the columns are fixed, so a case
    that is not about time has the unit in its name.
    """
    where = torch.cuda.get_device_name() if device == "cuda" else platform.machine() + " CPU"
    values = [
        datetime.date.today().isoformat(), benchmark, case, where, torch.get_num_threads(),
        platform.python_version(), torch.__version__, gradscale.__version__,
        sum(param.numel() for param in params), len(params), rounds,
        f"{value:.3f}", f"{speedup:.3f}",
    ]  # fmt: skip
    print(f"{case:70} {value:9.3f} {unit:3}   {speedup:.3f}x torch", flush=True)
    return dict(zip(COLUMNS, values, strict=True))


def add(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Adds `rows` to the table at `path`; old rows stay."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
