"""The process that ranks.py forks ranks and programs from: torch is imported here, once.

Ranks are forked from a process that was forked from it, which imports test files and so our
library; programs have to import that themselves.

It has one thread, and must: a forked process has only the thread that forked it, and would wait
for ever for a lock that another one held. No tensor is computed here, and nothing on a GPU.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import signal
import sys
import time
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch.distributed as dist

import programs
import quick_interpreter
from ranks import join

# What torch imports when it is first used: 900 modules, for which every rank would take seconds.
LATER = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")

GRACE = 5.0
"""Seconds that the other ranks have after one has failed."""
DUMP = 1.0
"""Seconds to write where ranks are that have to be ended."""


def serve(link: Connection) -> None:
    """Runs the programs and the checks that come by `link`, until it is closed."""
    ranks: Connection | None = None
    while True:
        try:
            request = link.recv()
        except EOFError:
            return
        if isinstance(request, programs.Program):
            links = [link, ranks] if ranks else [link]
            link.send(run(request, links))
            continue
        ranks = ranks or fork_server(link)
        ranks.send(request)
        try:
            link.send(ranks.recv())
        except EOFError:  # it has died, and who waits for an answer is to notice
            return


def fork_server(link: Connection) -> Connection:
    """A link to a process that runs checks."""
    here, there = Pipe()
    if os.fork() == 0:
        link.close()
        here.close()
        serve_checks(there)
        os._exit(0)
    there.close()
    return here


def run(program: programs.Program, links: list[Connection]) -> int | None:
    """The exit status of a program; None if it had to be ended."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        programs.be(program, links)
    until, pause = time.monotonic() + program.limit, 0.005
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve_checks(link: Connection) -> None:
    """Runs the checks that come by `link`, until it is closed."""
    while True:
        try:
            file, check, world, folder, patience, limit = link.recv()
        except EOFError:
            return
        try:
            module = load(file)
        except BaseException:
            link.send(([1] * world, f"{file} cannot be imported:\n{traceback.format_exc()}"))
            continue
        sys.stdout.flush()
        paths = [Path(folder, f"{check}-rank{rank}.txt") for rank in range(world)]
        pids = []
        for rank, path in enumerate(paths):
            pid = os.fork()
            if pid == 0:
                link.close()
                be(module, check, (rank, world, patience), Path(folder), path)
            pids.append(pid)
        codes, order, why = wait(pids, limit)
        # Whoever wrote last to its log failed last: several can end between two looks of `wait`.
        order.sort(key=lambda rank: paths[rank].stat().st_mtime_ns)
        texts = [f"rank {rank}: {paths[rank].read_text()}" for rank in order]
        link.send((codes, "\n".join([*texts, *why])))


def load(file: str) -> ModuleType:
    """The module of a test file."""
    name = f"on_ranks_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # objects that ranks send one another are found by it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def be(
    module: ModuleType, check: str, place: tuple[int, int, int], folder: Path, log: Path
) -> NoReturn:
    """Runs a check as one of the ranks, and ends the process; its errors go to `log`."""
    code = 1
    try:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
        faulthandler.register(signal.SIGUSR1)
        os.environ["RANKS_FOLDER"] = str(folder)
        join(folder / f"{check}-store", *place)
        getattr(module, f"check_{check}")()
        dist.barrier()
        code = 0
    except BaseException:
        failed = time.time_ns()
        traceback.print_exc()
        sys.stderr.flush()
        os.utime(log, ns=(failed, failed))  # files have the time of the last tick
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int], limit: float) -> tuple[list[int | None], list[int], list[str]]:
    """Exit statuses of ranks (None of one that was ended), in which order they
    ended, and why any had to be."""
    codes: dict[int, int] = {}
    until, reason = time.monotonic() + limit, f"still running after {limit:g} s"
    while len(codes) < len(pids) and time.monotonic() < until:
        time.sleep(0.005)
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] and time.monotonic() + GRACE < until:
                until = time.monotonic() + GRACE
                reason = f"still running {GRACE:g} s after rank {pids.index(pid)} had failed"
    left = [pid for pid in pids if pid not in codes]
    for pid in left:
        os.kill(pid, signal.SIGUSR1)  # it writes where it is
    time.sleep(DUMP if left else 0.0)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    order = [pids.index(pid) for pid in [*codes, *left]]
    return (
        [codes.get(pid) for pid in pids],
        order,
        [f"rank {pids.index(pid)}: {reason}" for pid in left],
    )


if __name__ == "__main__":
    for name in LATER:
        importlib.import_module(name)
    if os.environ.get("TRITON_INTERPRET") == "1":
        quick_interpreter.install()
    gc.freeze()  # ranks do not search what was imported here
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # freeing all of torch takes a second
