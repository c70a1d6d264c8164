"""What scalers do on several ranks: who decides alike, and what that costs.

    python ranks.py                              # both
    python ranks.py matrix                       # two processes, gloo, the CPU
    python ranks.py matrix --setups DDP FSDP2 --optimizers foreach
    python ranks.py cost
    python ranks.py table                        # rewrites docs/measurements/ranks.md from the rows

The matrix: every way to share a model, with AdamW fused and foreach, a fault in the gradients of
one rank after they were reduced, and two ways to call the scaler: torch's scalers and ours. A
verdict is

    right           all ranks did what one process does that sees all gradients
    ranks differ    one took a step that another skipped, or their scales differ
    hangs           nobody came back
    error: TYPE     one raised that
    wrong           all alike, and not what one process does

Without gradients on one rank there is no such process; there, nobody hangs or raises and the scales
are the same. Cells run one after the other in the same processes, which are killed and started anew
after one that hangs or raises.

The cost: see _costs.py. Rows are appended to ranks.csv and ranks_cost.csv; old rows stay, and the
tables take the last.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import _cells
import _launching
import _rows
from _cells import BAD, FAULTS, GROWTH_INTERVAL, INIT_SCALE, STEPS, WAYS, Cell, Told
from _sharing import OPTIMIZERS, SETUPS

FOLDER = Path(__file__).parent
RESULTS, COSTS = FOLDER / "ranks.csv", FOLDER / "ranks_cost.csv"
PAGE = FOLDER.parent / "docs" / "measurements" / "ranks.md"
WORLD = 2
START, LONGEST = 120.0, 600.0
"""Seconds that ranks may take to start, and to time something."""


class Row(NamedTuple):
    """One cell."""

    date: str
    device: str
    python: str
    torch: str
    gradscale: str
    scaler: str
    setup: str
    optimizer: str
    fault: str
    way: str
    verdict: str
    detail: str
    """What each rank told, where it is not right."""


class CostRow(NamedTuple):
    """One comparison; what its columns mean is said at `_costs.Cost`."""

    date: str
    device: str
    python: str
    torch: str
    gradscale: str
    cores: int
    part: str
    case: str
    against: str
    ranks: int
    parameters: int
    rounds: int
    case_ms: float
    against_ms: float
    ratio: float
    lower: float
    upper: float


def run(cells: Sequence[Cell], watchdog: float) -> Iterator[tuple[Cell, str, str]]:
    """Each cell with its verdict, and what the ranks told."""
    left = list(cells)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "cells.json").write_text(json.dumps(left))
            with _launching.Ranks("_cells.py", WORLD, folder) as ranks:
                ranks.start(START)
                for place, cell in enumerate(tuple(left)):
                    told = ranks.tell(str(place), watchdog)
                    yield cell, *judge(cell.fault, told)
                    left.pop(0)
                    if any(each is None or each.error for each in told):
                        break


def judge(fault: str, told: Sequence[Told | None]) -> tuple[str, str]:
    """The verdict, and what the ranks told if it is not "right"."""
    seen = [each for each in told if each is not None]
    error = next((each.error for each in seen if each.error), "")
    moves, scales = {each.moved for each in seen}, {each.scales for each in seen}
    right_moves, right_scales = expected(fault)
    if error:
        verdict = "error: " + error.partition(":")[0]
    elif None in told:
        verdict = "hangs"
    elif len(scales) > 1 or (len(moves) > 1 and fault != "no gradient"):
        verdict = "ranks differ"
    elif fault == "no gradient" or (
        moves == {right_moves} and scales == {right_scales} and all(e.as_without for e in seen)
    ):
        verdict = "right"
    else:
        verdict = "wrong"
    if verdict == "right":
        return verdict, ""
    return verdict, "; ".join(f"rank {rank} {_words(each)}" for rank, each in enumerate(told))


def expected(fault: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Which parameters move in each step, and the scales after it."""
    moves, scales, scale, good = [], [], INIT_SCALE, 0
    for step in range(STEPS):
        bad = step == BAD and fault in ("inf", "nan")
        moves.append("none" if bad else "all")
        good = 0 if bad else good + 1
        scale *= 0.5 if bad else 2.0 if good == GROWTH_INTERVAL else 1.0
        good %= GROWTH_INTERVAL
        scales.append(scale)
    return tuple(moves), tuple(scales)


def _words(told: Told | None) -> str:
    if told is None:
        return "waits"
    if told.error:
        return f"raises {told.error}"
    scales = " ".join(f"{scale:g}" for scale in told.scales)
    weights = "" if told.as_without else ", other weights than without a scaler"
    return f"moves {' '.join(told.moved)}, scales {scales}{weights}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, prints and appends; or writes the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choices = ["both", "matrix", "cost", "table"]
    parser.add_argument("what", nargs="?", default="both", choices=choices)
    parser.add_argument("--setups", nargs="*", default=list(SETUPS))
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS))
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    parser.add_argument(
        "--watchdog", type=float, default=25.0, help="time limit of a cell in seconds"
    )
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=[2, 3, 4, 8], help="numbers of ranks that agree"
    )
    parser.add_argument(
        "--step-ranks", nargs="*", type=int, default=[2, 4], help="numbers of ranks that step"
    )
    parser.add_argument(
        "--rounds", type=int, default=300, help="rounds for the cost of the agreement"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps for the cost of a step")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="CSV file with the rows of the matrix"
    )
    parser.add_argument(
        "--costs", type=Path, default=COSTS, help="CSV file with the rows of the cost"
    )
    options = parser.parse_args(arguments)
    if options.what in ("both", "matrix"):
        matrix(options)
    if options.what in ("both", "cost"):
        cost(options)
    if options.what == "table":
        for mark, lines in tables(options.results, options.costs).items():
            print("\n".join(lines), end="\n\n")
            _rows.put(PAGE, f"ranks: {mark}", lines)


def matrix(options: argparse.Namespace) -> None:
    """Runs the cells that were asked for."""
    chosen = [
        cell
        for cell in _cells.cells()
        if cell.setup in options.setups
        and cell.optimizer in options.optimizers
        and cell.fault in options.faults
    ]
    for cell, verdict, detail in run(chosen, options.watchdog):
        print(*cell, verdict, detail, sep=" | ", flush=True)
        _rows.append(Row(*_rows.environment(), *cell, verdict, detail), options.results)


def cost(options: argparse.Namespace) -> None:
    """Times agreement and steps, among as many ranks as were asked for."""
    few = [str(size) for size in options.ranks]
    runs = [(max(options.ranks), options.rounds, "agreement", *few)] if few else []
    runs += [(world, options.steps, "after backward") for world in options.step_ranks]
    for world, rounds, *what in runs:
        with tempfile.TemporaryDirectory() as folder:
            with _launching.Ranks("_costs.py", world, folder, str(rounds), *what) as ranks:
                ranks.finish(LONGEST)
            found = json.loads(Path(folder, "costs.json").read_text())
        for values in found:
            row = CostRow(*_rows.environment(), os.cpu_count() or 0, *values)
            print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row[6:]), sep=" | ")
            _rows.append(row, options.costs)


def tables(results: Path, costs: Path) -> dict[str, list[str]]:
    """The lines of each table, by its mark in the page."""
    last = {row[6:11]: row for row in _rows.read(CostRow, costs)}
    parts: dict[str, list[CostRow]] = {}
    for row in last.values():
        parts.setdefault(row.part, []).append(row)
    tables = {part: cost_table(rows) for part, rows in parts.items()}
    return {"matrix": matrix_table(_rows.read(Row, results)), **tables}


def cost_table(rows: Sequence[CostRow]) -> list[str]:
    """Ratios and their quartiles; a column for each number of ranks and parameters."""
    cells = {
        (*row[7:9], _column(row)): f"{row.ratio:.2f} ({row.lower:.2f} - {row.upper:.2f})"
        for row in rows
    }
    heads = list(dict.fromkeys(map(_column, sorted(rows, key=lambda row: row[9:11]))))
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for case, against in dict.fromkeys((row.case, row.against) for row in rows):
        found = [cells.get((case, against, head), "") for head in heads]
        lines.append(f"| {case}, against {against} | {' | '.join(found)} |")
    return lines


def _column(row: CostRow) -> str:
    size = f", {row.parameters:,} parameters" if row.parameters else ""
    return f"{row.ranks} ranks{size}"


def matrix_table(rows: Sequence[Row]) -> list[str]:
    """Where torch's scalers are not right, and how often each are."""
    last = {Cell(*row[5:10]): row.verdict for row in rows}
    heads = [f"{optimizer}, `{way}`" for optimizer in OPTIMIZERS for way in WAYS]
    lines = ["| | fault on one rank | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for setup in SETUPS:
        by_verdicts: dict[tuple[str, ...], list[str]] = {}
        for fault in FAULTS:
            found = tuple(
                verdict
                for optimizer in OPTIMIZERS
                for way in WAYS
                for cell, verdict in last.items()
                if cell[1:] == (setup, optimizer, fault, way) and cell.scaler.startswith("torch")
            )
            if set(found) != {"right"}:
                by_verdicts.setdefault(found, []).append(fault)
        for found, faults in by_verdicts.items():
            lines.append(f"| {setup} | {', '.join(faults)} | {' | '.join(found)} |")
    counts = []
    for who in ("torch", "gradscale"):
        mine = [verdict for cell, verdict in last.items() if cell.scaler.startswith(who)]
        counts.append(f"{who}'s scalers are right in {mine.count('right')} of {len(mine)} cells")
    return [*lines, "", f"{'; '.join(counts)}."]


if __name__ == "__main__":
    main()
