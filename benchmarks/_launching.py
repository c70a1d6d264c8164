"""Processes, one for each rank, and what they leave in a folder of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _cells import Told, heard

FOLDER = Path(__file__).parent
GRACE = 5.0
"""Seconds that the others have when one has raised."""


class Ranks:
    """One process for each rank; all are gone when this is left."""

    def __init__(self, program: str, world: int, folder: str, *arguments: str) -> None:
        places = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
        self.folder = Path(folder)
        self.processes = []
        for rank in range(world):
            words = [str(FOLDER / program), str(rank), str(world), folder, *arguments]
            with (self.folder / f"stderr-{rank}").open("w") as errors:
                process = subprocess.Popen([sys.executable, *words], env=env, stderr=errors)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, seconds: float) -> None:
        """Waits until all say that they are ready."""
        if self.tell("ready", seconds) != [Told()] * len(self.processes):
            raise RuntimeError(f"The ranks have not started. {self._errors()}")

    def finish(self, seconds: float) -> None:
        """Waits until all are done."""
        codes = [process.wait(seconds) for process in self.processes]
        if any(codes):
            raise RuntimeError(f"The ranks have failed. {self._errors()}")

    def _errors(self) -> str:
        """The last that each rank has said."""
        return "\n".join(p.read_text()[-500:] for p in sorted(self.folder.glob("stderr-*")))

    def tell(self, what: str, seconds: float) -> list[Told | None]:
        """What each rank tells of `what`; None where it has told nothing in so many seconds."""
        paths = [self.folder / f"{what}-{rank}" for rank in range(len(self.processes))]
        end = time.monotonic() + seconds
        while True:
            ended = [process.poll() for process in self.processes]
            told = [
                heard(path) or (None if code is None else Told(f"exit status {code}"))
                for path, code in zip(paths, ended, strict=True)
            ]
            if any(each is not None and each.error for each in told):
                end = min(end, time.monotonic() + GRACE)
            if None not in told or time.monotonic() >= end:
                return told
            time.sleep(0.01)
