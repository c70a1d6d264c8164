"""Runs the arena: `python -m arena`, in the folder benchmarks or with it on PYTHONPATH.

Every training is run with every arm and seed. The best static scale is searched for with the first
seed, and then used with the others. A row is added to results.csv after each run; old rows stay,
and where a run was repeated the tables take the last. Steps are timed afterwards, into times.csv.

    python -m arena                                    # the small arena, on the CPU
    python -m arena --device cuda --size medium --seeds 3 --jobs 12 --missing --limit 330 --time
    python -m arena --trainings GPT --arms Headroom torch --seeds 3
    python -m arena --starts                           # from any first scale
    python -m arena --table                            # rewrites docs/measurements/arena.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from arena import arms, pool, rows, table, tasks, times
from arena.training import SIZES, Place


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, prints and appends; or writes the table."""
    options = _options(arguments)
    clocked = options.results.with_name("times.csv")
    if options.table:
        table.write(rows.read(options.results), rows.read_times(clocked))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was run")
        return
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    choice = tasks.Choice(options.trainings, options.arms, seeds, options.steps, options.starts)
    start = time.monotonic()
    _run(choice, options)
    print(f"runs: {time.monotonic() - start:.0f} s", flush=True)
    if options.time:
        start = time.monotonic()
        _time(choice, options, clocked)
        print(f"times: {time.monotonic() - start:.0f} s", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="arena", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default=SIZES[0])
    parser.add_argument(
        "--trainings", nargs="*", default=[], help="only trainings whose names contain one of these"
    )
    parser.add_argument(
        "--arms",
        nargs="*",
        default=[],
        help=f"only arms whose names contain one of these; {tasks.SEARCH!r}: the search",
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="first seed; the search uses seed 0"
    )
    parser.add_argument("--steps", type=int, help="steps, in place of those of the training")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--limit", type=float, help="seconds after which no new run is started")
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--time", action="store_true", help="time steps after the runs")
    parser.add_argument("--starts", action="store_true", help="short runs from many first scales")
    parser.add_argument("--table", action="store_true", help="only write the documentation page")
    parser.add_argument("--results", type=Path, default=rows.RESULTS, help="the rows")
    return parser.parse_args(arguments)


def _run(choice: tasks.Choice, options: argparse.Namespace) -> None:
    """Runs the tasks and adds their rows."""
    known = _known(options)

    def is_wanted(task: tasks.Task) -> bool:
        return not options.missing or not tasks.is_done(task, known)

    def settle(task: tasks.Task) -> tasks.Task | None:
        found = tasks.settled(task, known)
        return found if found is not None and is_wanted(found) else None

    planned = [t for t in tasks.plan(choice, options.device, options.size) if is_wanted(t)]
    searching = {task.training for task in planned if task.arm.startswith(tasks.SEARCH)}
    planned = [t for t in planned if t.training in searching or settle(t) is not None]
    needed = [t for t in planned if any(other.waits_for(t) for other in planned)]
    planned = [t for t in planned if t.arm != tasks.PRETRAINING or t in needed]
    for row in pool.work(planned, settle, options.jobs, options.limit):
        rows.add(row, options.results)
        known.append(row)
        _say(row)


def _time(choice: tasks.Choice, options: argparse.Namespace, path: Path) -> None:
    """Times the arms of every training and adds the rows."""
    place = Place(options.device, size=options.size)
    here = (rows.where(options.device)["device"], options.size)
    known = {(r.training, r.arm) for r in rows.read_times(path) if (r.device, r.size) == here}
    steps = {} if options.steps is None else {"warm_up": 1, "steps": options.steps}
    for kind in tasks.chosen(choice):
        every = [arm for arm in arms.fixed_arms().values() if arm.suits(kind)]
        best = table.best_static([row for row in _known(options) if row.training == kind.name])
        if best is not None:
            every.append(arms.static_arm(best))
        every = [arm for arm in every if tasks.wanted(arm.name, choice.arms)]
        if options.missing and all((kind.name, arm.name) in known for arm in every):
            continue
        for row in times.clock(kind, every, place, **steps):
            rows.add(row, path)
            print(f"{row.training:20} {row.arm:28} {row.ms:.3f} ms", flush=True)


def _known(options: argparse.Namespace) -> list[rows.Row]:
    """The rows of this device and size."""
    here = (rows.where(options.device)["device"], options.size)
    return [row for row in rows.read(options.results) if (row.device, row.size) == here]


def _say(row: rows.Row) -> None:
    last = row.history.split()[-1].split("x")[0] if row.history else "?"
    print(
        f"{row.training:20} {row.arm:28} {row.seed}  {row.metric} {row.value:.4f}  "
        f"skipped {row.skipped}  wasted {row.wasted}  underflow {row.underflow:.4f}  "
        f"dead {row.dead}/{row.tensors}  moves {row.moves}  at 2^{last}  {row.seconds:.1f} s  "
        f"{row.note}",
        flush=True,
    )


if __name__ == "__main__":
    main()
