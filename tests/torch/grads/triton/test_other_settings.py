"""The tests of kernels once more: with permuted fields, and with odd defaults of torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from programs import run_python

pytest.importorskip("triton", minversion="3.4")
HERE = Path(__file__).parent
ROOT = HERE.parents[3]
FILES = ["test_decide_kernels.py", "test_consensus_kernels.py"]
QUICK = (
    "not any_history and not bit_for_bit and not by_its_rule and not -0] and not -1] "
    "and not exact and not memory"
)
"""One kind of loss is enough here, that of a loss which the kernel tests itself, and one policy of
each rule, which have the same fields."""


def run(plugin: str) -> str:
    """What pytest prints at the end."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    options = ["-q", "-p", "no:cacheprovider", "-p", plugin, "-k", QUICK]
    files = [HERE / name for name in FILES]
    done = run_python("-m", "pytest", *options, *files, cwd=ROOT, env=settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_offsets_in_kernels_come_from_the_lists_of_fields() -> None:
    assert "passed" in run("permuted_fields")


def test_every_tensor_names_its_device_and_format() -> None:
    assert "passed" in run("odd_defaults")
