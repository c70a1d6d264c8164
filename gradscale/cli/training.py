"""The progress bars and the table of `gradscale demo`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from gradscale.errors import SettingError

if TYPE_CHECKING:
    from gradscale.demo.summary import Summary
    from gradscale.demo.train import Run, Step, Trace


def check_page(path: Path | None, engine: str) -> None:
    """Raises SettingError if no report page can be written to `path`; None asks for none."""
    if path is None:
        return
    if engine != "torch":
        raise SettingError(f"html needs the engine torch, which writes a run log, got {engine!r}.")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SettingError(f"html must be a file in a folder that exists, got {path}.")


def run_all(
    console: Console, images: Any, steps: int, seed: int, engine: str, log: Path | None
) -> list[Trace]:
    """The traces of all runs that `engine` can train.

    Shows a progress bar for each, or prints a line without a terminal. `log` is the folder of the
    run log of the run with gradscale and NaN batches.
    """
    from gradscale.demo.train import OURS_NAN, RUNS, Trace, train

    runs: Sequence[Run] = RUNS
    if engine == "jax":
        from gradscale.demo.jax_train import JAX_RUNS as runs
        from gradscale.demo.jax_train import train as jax_train

    def steps_of(run: Run) -> Iterator[Step]:
        if engine == "jax":
            return jax_train(run, images, steps, seed)
        return train(run, images, steps, seed, log if run == OURS_NAN else None)

    console.print(
        f"Training the same network on {len(images):,} handwritten digits, {len(runs)} times:"
    )
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[loss]}"))
    traces = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = [bars.add_task(run.name, total=steps, start=False, loss="") for run in runs]
        for run, task in zip(runs, tasks, strict=True):
            began = time.perf_counter()
            bars.start_task(task)
            taken = []
            for step in steps_of(run):
                taken.append(step)
                bars.update(task, advance=1, loss=f"loss {step.loss:.4f}")
            traces.append(Trace(run, taken))
            if not console.is_terminal:
                console.print(f"{run.name}: {steps} steps, {time.perf_counter() - began:.1f} s")
    return traces


def share(part: float) -> str:
    """The share as a percentage; only an exact zero is shown as 0.

    >>> share(0.4556), share(0.0), share(0.000009)
    ('45.6 %', '0 %', '<0.1 %')
    """
    if 0 < part < 0.001:
        return "<0.1 %"
    return f"{part * 100:.1f} %" if part else "0 %"


def table(rows: Sequence[Summary]) -> Table:
    """The rows as a table."""
    made = Table()
    made.add_column("run", no_wrap=True)
    headings = ("loss", "skipped\nsteps", "zero\ngrads", "under-\nflow", "flushed\nto 0")
    for heading in (*headings, "final\nscale"):
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        lost = ("-", "-") if row.lost is None else (share(x) for x in row.lost)
        scale = "1" if row.scale == 1 else f"2**{math.log2(row.scale):g}"
        made.add_row(row.name, f"{row.loss:.4f}", str(row.skipped), str(row.empty), *lost, scale)
    return made
