"""Checks on several ranks: real processes that meet in a file and talk by gloo.

A test file that has functions `check_this()` and `check_that()` runs them by
`run_ranks(__file__, "this that", ...)`, which starts the file itself as a script, once for each
rank; there it calls `be_a_rank(globals())`. Starting takes longer than most checks do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: else gloo may abort at the end

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How the ranks ended that ran checks."""

    codes: list[int | None]
    """Exit statuses; None of one that was still running."""
    errors: str


def start_ranks(
    file: str,
    checks: str,
    world: int,
    folder: Path,
    patience: int = 120,
    limit: int = 400,
    **settings: str,
) -> Ended:
    """How checks ended that ran on `world` ranks, one after the other.

    Args:
        patience: Seconds that a rank waits for another before it raises.
        limit: Seconds after which those that still run are ended.
        settings: Variables of their environment.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **settings}
    words = [str(world), str(folder), checks, str(patience)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", file, str(rank), *words],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(world)
    ]
    errors, codes = [], []
    try:
        for rank in ranks:
            try:
                errors.append(rank.communicate(timeout=limit)[1])
            except subprocess.TimeoutExpired:
                errors.append(f"still running after {limit} s")
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return Ended(codes, "\n".join(errors))


def run_ranks(file: str, checks: str, world: int, folder: Path, **settings: str) -> None:
    """Runs checks on `world` ranks; fails if one of them does."""
    ended = start_ranks(file, checks, world, folder, **settings)
    assert ended.codes == [0] * world, f"{ended.codes}: {ended.errors[-4000:]}"


def be_a_rank(checks: Mapping[str, Any]) -> None:
    """Runs the checks that this process was started for."""
    _, this, size, store, what, patience = sys.argv
    if os.environ.get("RANKS_DEVICE") == "cuda":
        torch.cuda.set_device(0)  # which all of them share
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
    dist.init_process_group(
        os.environ.get("RANKS_BACKEND", "gloo"),
        init_method=f"file://{store}/{what.replace(' ', '-')}",
        rank=int(this),
        world_size=int(size),
        timeout=timedelta(seconds=int(patience)),
    )
    torch.set_num_threads(1)
    for each in what.split():
        checks[f"check_{each}"]()
    dist.barrier()
    os._exit(0)


def everyone(value: Any) -> list[Any]:
    """The `value` of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
