"""Checks on several ranks: real processes that meet in a file and communicate by gloo.

A test file has functions `check_this()` and `check_that()`, and one pytest item for each of them:

    @pytest.mark.parametrize(("check", "world"), on_ranks(2, "this that"))
    def test_ranks(check: str, world: int, tmp_path: Path) -> None:
        run_check(__file__, check, world, tmp_path)

Importing torch takes longer than most checks do, so ranks are forked from a server that has
imported it (rank_server.py), one server for a pytest process and an environment. Every check
gets processes and a process group of its own: what it changes or breaks ends with it. The folder
that the test gave is RANKS_FOLDER in the environment.

`start_ranks()` starts the test file itself as a script instead, once for each rank; there it
calls `be_a_rank(globals())`. That is for a GPU, which a forked process cannot use.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: else gloo may abort at the end

import programs
import their_warnings

ROOT = Path(__file__).parents[2]
PATIENCE = 120
"""Seconds that a rank waits for another before it raises."""
LIMIT = 400
"""Seconds after which ranks that still run are ended."""

WARNINGS = ["-W", "error"]
"""How a rank takes warnings."""
if not torch.__version__.startswith("2.13."):  # as in conftest.py
    WARNINGS += ["-W", "ignore:Converting a tensor with requires_grad:UserWarning"]
    WARNINGS += ["-W", "ignore:Conversion of an array with ndim > 0:DeprecationWarning"]


class Ended(NamedTuple):
    """How the ranks ended that ran checks."""

    codes: list[int | None]
    """Exit statuses; None of one that was still running."""
    errors: str


def on_ranks(world: int, checks: str) -> list[tuple[str, int]]:
    """Arguments of a test for each of `checks`, which run on `world` ranks."""
    return [(check, world) for check in checks.split()]


def fork_ranks(file: str, check: str, world: int, folder: Path, **how: int) -> Ended:
    """How `check_<check>()` of a test file ended; `how` are `patience` and `limit`."""
    return _server({}).run(file, check, world, folder, **how)


def run_program(program: programs.Program) -> int | None:
    """The exit status of a program; None if it was still running at its limit."""
    return _server({}).run_program(program)


def run_check(file: str, check: str, world: int, folder: Path, **settings: str) -> None:
    """Runs `check_<check>()` of a test file on `world` ranks; fails if it does on one of them.

    Args:
        settings: Variables of the environment of the ranks.
    """
    if settings.get("RANKS_DEVICE") == "cuda":
        ended = start_ranks(file, check, world, folder, **settings)
    else:
        ended = _server(settings).run(file, check, world, folder)
    skipped = re.search("SkipTest: (.*)", ended.errors)
    if skipped:
        pytest.skip(skipped[1])
    assert ended.codes == [0] * world, f"check_{check}: {ended.codes}\n{ended.errors[-6000:]}"


def start_ranks(
    file: str,
    checks: str,
    world: int,
    folder: Path,
    patience: int = PATIENCE,
    limit: int = LIMIT,
    **settings: str,
) -> Ended:
    """How checks ended that ran on `world` new processes, one check after the other.

    Args:
        settings: Variables of their environment.
    """
    words = [str(world), str(folder), checks, str(patience)]
    ranks = [
        subprocess.Popen(
            [sys.executable, *WARNINGS, file, str(rank), *words],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(settings),
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


def be_a_rank(checks: Mapping[str, Any]) -> None:
    """Runs the checks that this process was started for."""
    _, this, size, store, what, patience = sys.argv
    if os.environ.get("RANKS_DEVICE") == "cuda":
        torch.cuda.set_device(0)  # which all of them share
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
    join(Path(store, what.replace(" ", "-")), int(this), int(size), int(patience))
    for each in what.split():
        checks[f"check_{each}"]()
    dist.barrier()
    os._exit(0)


def join(store: Path, rank: int, world: int, patience: int) -> None:
    """Makes this process one of the ranks that meet in the file `store`."""
    their_warnings.ignore()
    dist.init_process_group(
        os.environ.get("RANKS_BACKEND", "gloo"),
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=patience),
    )
    torch.set_num_threads(1)


def everyone(value: Any) -> list[Any]:
    """The `value` of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Server:
    """The process that ranks are forked from: started with the first check, ended with pytest."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._link, theirs = Pipe()
        program = Path(__file__).with_name("rank_server.py")
        self._process = subprocess.Popen(
            [sys.executable, *WARNINGS, str(program), str(theirs.fileno())],
            cwd=ROOT,
            env=_environment(settings),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether it can run checks."""
        return self._process.poll() is None and not self._link.closed

    def run(
        self,
        file: str,
        check: str,
        world: int,
        folder: Path,
        patience: int = PATIENCE,
        limit: float = LIMIT,
    ) -> Ended:
        """How a check ended, on ranks that were forked for it; the errors of the first first."""
        try:
            self._link.send((file, check, world, str(folder), patience, limit))
            if self._link.poll(limit + 60):  # it ends ranks itself; this is for its own faults
                codes, errors = self._link.recv()
                return Ended(codes, errors)
            error = f"no answer after {limit + 60} s"
        except (EOFError, OSError) as broken:
            error = f"no answer: {broken!r}"
        self.close()
        return Ended([None] * world, f"The process that ranks are forked from gave {error}.")

    def run_program(self, program: programs.Program) -> int | None:
        """The exit status of a program; None if it was still running at its limit."""
        self._link.send(program)
        code: int | None = self._link.recv()
        return code

    def close(self) -> None:
        """Ends the process."""
        self._link.close()
        try:
            self._process.wait(5)  # it ends by itself when the link does
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_servers: dict[frozenset[tuple[str, str]], Server] = {}


def _server(settings: Mapping[str, str]) -> Server:
    """The server for an environment; a new one if there is none, or if it has ended."""
    key = frozenset(settings.items() - os.environ.items())
    if key not in _servers or not _servers[key].alive:
        _servers[key] = Server(settings)
    return _servers[key]


def _environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **settings}
