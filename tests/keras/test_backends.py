"""The tests of this folder with the other backends: Keras chooses its backend at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["tests/keras", "tests/compat/tf_keras"]


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_other_backend_keeps_the_same_promises(backend: str) -> None:
    if backend == keras.backend.backend() or "GRADSCALE_KERAS_INNER" in os.environ:
        pytest.skip("is the backend of this session")
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    env = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "GRADSCALE_KERAS_INNER": "1",  # no sessions inside of sessions
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FOLDERS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:])
    assert " passed" in done.stdout
