"""Tasks worked off by processes that stay alive: each imports torch and opens the device once."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from arena import texts
from arena.rows import Row
from arena.tasks import Task

Settle = Callable[[Task], Task | None]


class _Here:
    """An executor that runs everything at once, in this process."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # as an executor of processes does
            future.set_exception(error)
        return future


@contextlib.contextmanager
def _executor(jobs: int) -> Iterator[Any]:
    if jobs == 1:
        yield _Here()
        return
    with tempfile.TemporaryDirectory() as weights:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, _begin, (Path(weights),)) as executor:
            yield executor


def _begin(weights: Path) -> None:
    """What every process does first."""
    torch.set_num_threads(1)
    texts.WEIGHTS = weights


def work(
    tasks: Sequence[Task], settle: Settle, jobs: int = 1, limit: float | None = None
) -> Iterator[Row]:
    """The rows of the tasks, as they come; what fails is printed.

    Args:
        tasks: All of them, in any order.
        settle: Called when a task is about to start; returns the one to run, or None.
        jobs: Processes; 1 runs all in this one.
        limit: Seconds after which no task starts.
    """
    start = time.monotonic()
    waiting = sorted(tasks, key=lambda task: task.urgency)
    running: dict[Future[Row | None], Task] = {}
    with _executor(jobs) as executor:
        while waiting or running:
            late = limit is not None and time.monotonic() - start >= limit
            task = None
            if not late and len(running) < jobs:
                held = [*waiting, *running.values()]
                task = next((t for t in waiting if not any(map(t.waits_for, held))), None)
            if task is not None:
                waiting.remove(task)
                to_run = settle(task)
                if to_run is not None:
                    running[executor.submit(Task.run, to_run)] = task
                if jobs > 1:
                    continue
            if late and not running:
                print(f"{len(waiting)} tasks have not started", flush=True)
                return
            if running:
                yield from _finished(running)


def _finished(running: dict[Future[Row | None], Task]) -> Iterator[Row]:
    """The rows of what has ended; waits for one at least."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        task, error = running.pop(future), future.exception()
        if error is not None:
            print(f"{task.training}, {task.arm}, seed {task.seed}: {error!r}", flush=True)
            continue
        row = future.result()
        if row is not None:
            yield row
