"""The ranks that tests fork: a check that fails, ends or hangs is reported, and spoils no other."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

import ranks
from ranks import Server, everyone, fork_ranks, run_check

SEEN: list[int] = []


def check_fresh() -> None:
    """Raises if an earlier check has left something behind."""
    assert not SEEN
    SEEN.append(1)
    assert everyone(dist.get_rank()) == list(range(dist.get_world_size()))


def check_fails() -> None:
    SEEN.append(2)
    assert dist.get_rank() == 0, "meant to fail on rank 1"


def check_ends() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()  # waits for the other: gone at once, it could end before that has joined


def check_hangs() -> None:
    time.sleep(600 * dist.get_rank())


def test_failures_are_reported_and_spoil_nothing(tmp_path: Path) -> None:
    run_check(__file__, "fresh", 2, tmp_path)
    server = ranks._server({})
    fails = server.run(__file__, "fails", 2, tmp_path)
    assert fails.codes[1] == 1
    assert fails.errors.startswith("rank 1: Traceback")  # rank 0, that waited for it, comes later
    assert "AssertionError: meant to fail on rank 1" in fails.errors
    assert server.run(__file__, "ends", 2, tmp_path).codes[1] == 7
    assert server.alive
    (tmp_path / "again").mkdir()
    run_check(__file__, "fresh", 3, tmp_path / "again")


def test_a_rank_that_hangs_is_ended(tmp_path: Path) -> None:
    for limit in (5, 20, 80):  # on a busy machine they may not even have joined
        folder = tmp_path / str(limit)
        folder.mkdir()
        ended = fork_ranks(__file__, "hangs", 2, folder, limit=limit)
        assert None in ended.codes
        assert f"rank 1: still running after {limit} s" in ended.errors
        if "in check_hangs" in ended.errors:  # where it was
            return
    raise AssertionError(ended.errors)


def test_a_file_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name\n")
    ended = fork_ranks(str(path), "any", 2, tmp_path)
    assert ended.codes == [1, 1]
    assert "No module named 'nothing_of_that_name'" in ended.errors


def test_a_server_that_ended_is_replaced(tmp_path: Path) -> None:
    server = Server({})
    server._process.kill()
    ended = server.run(__file__, "fresh", 2, tmp_path)
    assert ended.codes == [None, None]
    assert "no answer" in ended.errors
    assert not server.alive
