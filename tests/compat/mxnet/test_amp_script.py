"""Whole scripts of MXNet's AMP, in processes of their own because amp.init() changes all of MXNet.

MXNet's CPU build has no layers in float16, so they are in bfloat16.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mxnet")

HERE = Path(__file__).parent


@functools.cache
def run(kind: str) -> Any:
    """What the script prints."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, str(HERE / "amp_script.py"), kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.fail(done.stderr)
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_training_recovers_from_overflows_with_one_skip_for_each_halving(kind: str) -> None:
    found = run(kind)
    assert kind in found["type"]
    assert found["skipped"] == found["halvings"] > 0
    assert found["agreed"]  # with plain Python, in every step
    assert found["accuracy"] > 0.95


def test_bfloat16_learns_what_float32_learns() -> None:
    assert abs(run("bfloat16")["accuracy"] - run("float32")["accuracy"]) < 0.02


def test_output_functions_use_the_scale_of_the_first_trainer() -> None:
    # The gradient of the softmax at (0, 0) for class 0. With a scale other than the trainer's it
    # would come out of the division as something else, and from the second step on do so here.
    assert run("output") == [0.5, 0.5, 0.5]
