"""Runs the arena: `python -m arena`, in the folder benchmarks or with it on PYTHONPATH.

Every training is run with every arm and seed. The best static scale is searched for with the first
seed, and then used with the others. A row is added to results.csv after each run; old rows stay,
and where a run was repeated the tables take the last.

    python -m arena                                    # the small arena, on the CPU
    python -m arena --device cuda --size large
    python -m arena --trainings GPT --arms Headroom torch --seeds 3
    python -m arena --starts                           # from any first scale
    python -m arena --table                            # rewrites docs/policies.md from the rows
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from arena import arms, rows, runs, table
from arena.training import Place, Training
from arena.trainings import TRAININGS

SEARCH = "static"
START_STEPS = 20
"""Before the first spike."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, prints and appends; or writes the table."""
    options = _options(arguments)
    if options.table:
        table.write(rows.read(options.results))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; nothing was run")
        return
    kinds = [kind for name, kind in TRAININGS.items() if _wanted(name, options.trainings)]
    for kind in kinds:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            place = Place(options.device, large=options.size == "large", seed=seed)
            for arm in _arms(kind, seed, options):
                num_steps = options.steps or kind.steps[place.large]
                if options.starts:
                    num_steps = min(num_steps, START_STEPS)
                row = runs.play(kind, arm, place, num_steps)
                rows.add(row, options.results)
                _say(row)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="arena", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=["small", "large"], default="small")
    parser.add_argument("--trainings", nargs="*", default=[], help="parts of their names")
    parser.add_argument(
        "--arms", nargs="*", default=[], help=f"parts of their names; {SEARCH!r}: the search"
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first-seed", type=int, default=0, help="the search is done with seed 0")
    parser.add_argument("--steps", type=int, help="instead of those of the training")
    parser.add_argument("--starts", action="store_true", help="short runs from many first scales")
    parser.add_argument("--table", action="store_true", help="only write docs/policies.md")
    parser.add_argument("--results", type=Path, default=rows.RESULTS, help="the rows")
    return parser.parse_args(arguments)


def _wanted(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part.lower() in name.lower() for part in parts)


def _arms(kind: type[Training], seed: int, options: argparse.Namespace) -> Iterator[arms.Arm]:
    """The arms to run, in order; which static one comes last depends on rows of the first seed."""
    if options.starts:
        every = [arm for start in arms.STARTS for arm in arms.start_arms(start)]
        yield from (arm for arm in every if _wanted(arm.name, options.arms))
        return
    for arm in arms.fixed_arms().values():
        if _wanted(arm.name, options.arms) and arm.suits(kind):
            yield arm
    if not _wanted(SEARCH, options.arms):
        return
    if seed == 0:
        yield from map(arms.static_arm, arms.STATIC_SCALES)
        return
    here = (rows.where(options.device)["device"], options.size, kind.name)
    known = rows.read(options.results)
    best = table.best_static([r for r in known if (r.device, r.size, r.training) == here])
    if best is not None:
        yield arms.static_arm(best)


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
