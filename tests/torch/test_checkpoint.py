"""Checkpoints that a crash cannot spoil."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gradscale.torch import GradScaler, checkpoint
from programs import run_python

DIES_WRITING = """
import os, signal, sys, torch
from gradscale.torch import checkpoint

save = torch.save


def half(state, file):
    save(state, file)
    file.flush()
    os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


torch.save = half
checkpoint.save(sys.argv[1], {"step": 2, "x": torch.ones(1000)})
"""


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    state = {"step": 3, "x": torch.arange(4), "random": checkpoint.random_state()}
    checkpoint.save(path, state)
    loaded = checkpoint.load(path)
    assert (loaded["step"], loaded["x"].tolist()) == (3, [0, 1, 2, 3])
    first = torch.rand(3)
    checkpoint.set_random_state(loaded["random"])
    assert torch.equal(torch.rand(3), first)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_process_that_dies_writing_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, {"step": 1})
    done = run_python("-c", DIES_WRITING, path)
    assert done.returncode == -9
    (left,) = tmp_path.glob(".run.pt.*.part")  # it really died in the middle
    with pytest.raises(RuntimeError):
        torch.load(left, weights_only=True)
    assert checkpoint.load(path)["step"] == 1
    checkpoint.save(path, {"step": 3})
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert checkpoint.load(path)["step"] == 3


def test_a_sharded_checkpoint_without_a_scaler_warns(tmp_path: Path) -> None:
    """One process is a number of ranks, too; test_restart.py has others."""
    weights = {"model": {"w": torch.arange(4.0)}}
    scaler = GradScaler("cpu", init_scale=2.0**5)
    one = torch.ones((), requires_grad=True)
    scaler.backward(one * 1, loss_id="other")
    scaler._state.losses["other"] = scaler._state.losses["other"]._replace(scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        dcp.save(weights, checkpoint_id=tmp_path / "without")
        dcp.save({**weights, "scaler": scaler}, checkpoint_id=tmp_path / "with")
    for name, scale in (("without", 2.0**16), ("with", 2.0**5)):
        fresh, loaded = GradScaler("cpu"), {"model": {"w": torch.zeros(4)}}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            checkpoint.load_sharded({**loaded, "scaler": fresh}, tmp_path / name)
        texts = [str(one.message) for one in told if "no state of a scaler" in str(one.message)]
        assert bool(texts) == (name == "without")
        assert all(
            "under the key 'scaler'" in text and "Its keys are model." in text for text in texts
        )
        assert fresh.get_scale() == scale
        if name == "with":
            assert fresh.get_scale("other") == 8.0
        assert torch.equal(loaded["model"]["w"], weights["model"]["w"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointException, match="Missing key"):
            checkpoint.load_sharded({"other": torch.zeros(2)}, tmp_path / "with")


def test_what_cannot_be_saved_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, {"step": 1})
    with pytest.raises(AttributeError):
        checkpoint.save(path, {"step": lambda: None})
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert checkpoint.load(path)["step"] == 1


def test_files_of_living_processes_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    mine = [f".run.pt.{platform.node()}.{os.getppid()}.part", ".run.pt.elsewhere.1.part"]
    for name in mine:
        (tmp_path / name).write_bytes(b"")
    checkpoint.save(path, {"step": 1})
    assert {file.name for file in tmp_path.iterdir()} == {"run.pt", *mine}


def test_loading_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    checkpoint.save(path, {"evil": test_loading_runs_no_code})
    with pytest.raises(Exception, match="weights_only"):
        checkpoint.load(path)
