"""Writing a run log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradscale.runlog.lines import encode

MAX_STEPS = 100_000
"""Lines of kind "step" that a file keeps unless another number is given."""


def rank_file(path: str | os.PathLike[str], rank: int) -> Path:
    """The file of `rank` in the folder of a run."""
    return Path(path) / f"rank-{rank}.jsonl"


class RunLog:
    """Appends lines to the file of one rank."""

    def __init__(
        self, path: str | os.PathLike[str], rank: int = 0, *, max_steps: int = MAX_STEPS
    ) -> None:
        self.path = rank_file(path, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.max_steps = max_steps
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends `line`, an object with a "kind"."""
        os.write(self._file, encode(line))

    def close(self) -> None:
        """Ends the log; later lines are refused."""
        os.close(self._file)
