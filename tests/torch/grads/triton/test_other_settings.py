"""The tests of kernels once more: with permuted fields, and with odd defaults of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.4")
HERE = Path(__file__).parent
ROOT = HERE.parents[3]
FILES = ["test_decide_kernels.py", "test_consensus_kernels.py"]
QUICK = "not any_history and not bit_for_bit and not by_its_rule and not -0] and not -1]"
"""One kind of loss is enough here: that of a loss which the kernel tests itself."""


def run(plugin: str) -> str:
    """What pytest prints at the end."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", plugin]
    command += ["-k", QUICK, *[str(HERE / name) for name in FILES]]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_offsets_in_kernels_come_from_the_lists_of_fields() -> None:
    assert "passed" in run("permuted_fields")


def test_every_tensor_names_its_device_and_format() -> None:
    assert "passed" in run("odd_defaults")
