"""The guide runs, in a process of its own because amp.init() changes all of MXNet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mxnet")

ROOT = Path(__file__).parents[3]


def test_guide_runs(tmp_path: Path) -> None:
    page = ROOT / "docs/move/mxnet.md"
    program = f"import pathlib, pages; print(pages.run_page(pathlib.Path({str(page)!r})))"
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4
