"""What calls on a CUDA device cost: their time, told in three ways, and their memory.

A call is timed together with a `before` that lays out what it needs and is not counted. Calls that
wait for the host are timed by turns with what they are compared with, because the host has good and
bad minutes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]


class Work(NamedTuple):
    """Something to time."""

    call: Call
    before: Call
    refill: Call
    """Makes numbers ordinary again that calls have made smaller and smaller."""


WARM_UP = 3
# `torch.cuda._sleep` takes cycles; an H200 has at most 1.98 million in a millisecond.
CYCLES_PER_MS = 2_000_000
SHORTEST_PAUSE, LONGEST_PAUSE = 5.0, 20.0
# The host is shared with others: a row of 100 steps of a small model differs by a factor of two
# from one time to the next.
MOST_ROWS, ENOUGH_MS = 9, 1000.0


def alone(works: Sequence[Work], rounds: int) -> list[float]:
    """Milliseconds from a synchronised start to a synchronised end, for each; the medians."""
    taken: list[list[float]] = [[] for _ in works]
    for work in works:
        work.refill()
    for _ in range(WARM_UP + rounds):
        for work, times in zip(works, taken, strict=True):
            work.before()
            torch.cuda.synchronize()
            start = time.perf_counter()
            work.call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(times[WARM_UP:]) for times in taken]


def on_device(call: Call, before: Call, rounds: int) -> tuple[float, bool]:
    """Milliseconds between two events around the call, the median; whether the host was ahead.

    The device is put to sleep first, so that everything is queued when it wakes and it never waits
    for the host. A call that itself waits for the device cannot be queued; then this says so.
    """
    # The first time is to warm up.
    pause = min(
        max(2 * [_on_host(call, before) for _ in range(2)][1], SHORTEST_PAUSE), LONGEST_PAUSE
    )
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken, late = [], 0
    for _ in range(rounds):
        before()
        torch.cuda.synchronize()
        torch.cuda._sleep(round(pause * CYCLES_PER_MS))
        start.record()
        call()
        end.record()
        late += start.query()  # the device is awake already
        end.synchronize()
        taken.append(start.elapsed_time(end))
    if late:
        print(f"  in {late} of {rounds} rounds the device had to wait for the host", flush=True)
    return statistics.median(taken), not late


def _on_host(call: Call, before: Call) -> float:
    """Milliseconds until the call returns, whatever the device still has to do."""
    before()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def in_a_row(works: Sequence[Work], steps: int, least: Sequence[float]) -> list[float]:
    """Milliseconds per call, over so many that nobody waits between; medians of such rows.

    What `before` takes of the host is subtracted. Where the device is the slower one, the host runs
    `before` while the device still works, and the difference is too small: it is never less than
    `least`, the time of the device.
    """

    def row(work: Work, steps: int) -> float:
        work.refill()
        torch.cuda.synchronize()
        start, aside = time.perf_counter(), 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            work.before()
            aside += time.perf_counter() - begin
            work.call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start - aside) * 1e3 / steps

    for work in works:
        row(work, WARM_UP)
    taken = [[row(work, steps)] for work in works]
    spent = sum(times[0] for times in taken) * steps
    for _ in range(min(MOST_ROWS, int(ENOUGH_MS / spent)) if spent else 0):
        for work, times in zip(works, taken, strict=True):
            times.append(row(work, steps))
    return [max(statistics.median(times), low) for times, low in zip(taken, least, strict=True)]


def peak_memory(call: Call, before: Call) -> float:
    """MiB that the call takes for the while, above what was allocated before it."""
    before()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - allocated) / 2**20


def copy_speed() -> float:
    """Bytes per millisecond that a copy reads and writes."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / on_device(lambda: target.copy_(source), lambda: None, 20)[0]
