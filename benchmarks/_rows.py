"""Tables of results: what a row says, how rows are added and read, and how pages show them.

results.csv has a row of its own kind, of times. Other tables have a NamedTuple for theirs.
"""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch

import gradscale

RESULTS = Path(__file__).parent / "results.csv"
COLUMNS = [
    "date", "benchmark", "case", "device", "threads", "python", "torch", "gradscale",
    "parameters", "tensors", "rounds", "median_ms", "speedup_over_torch",
]  # fmt: skip
Row = dict[str, str | int]
Kind = TypeVar("Kind", bound=NamedTuple)


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


def append(row: NamedTuple, path: Path) -> None:
    """Adds one row to the table of its kind."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(row._fields)
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])


def read(kind: type[Kind], path: Path) -> list[Kind]:
    """The rows of a table, as they were written."""
    kinds: dict[str, Any] = get_type_hints(kind)
    with path.open(newline="") as file:
        found = csv.DictReader(file)
        return [kind(**{name: kinds[name](text) for name, text in row.items()}) for row in found]


def environment() -> tuple[str, str, str, str, str]:
    """The date, the CPU, and the versions of Python, torch and gradscale."""
    where = platform.machine() + " CPU"
    versions = platform.python_version(), torch.__version__, gradscale.__version__
    return datetime.date.today().isoformat(), where, *versions


def put(page: Path, mark: str, lines: Iterable[str]) -> None:
    """Puts `lines` into a page, between two comments."""
    begin, end = f"<!-- {mark} -->", f"<!-- {mark}, end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    text = head + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    page.write_text(text, encoding="utf-8")
