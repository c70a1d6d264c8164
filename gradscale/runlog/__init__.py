"""The log of a run: what every step did, in files of JSON lines that survive a crash.

A run is a folder with one file per rank, `rank-0.jsonl` and so on. `RunLog` appends to one file,
`read()` returns all of them merged. docs/reference/logs.md describes the lines.
"""

from __future__ import annotations

from gradscale.runlog.lines import VERSION, decode, encode, finding_line, sample_line, sample_of
from gradscale.runlog.reader import Run, read
from gradscale.runlog.recorder import Recorder
from gradscale.runlog.writer import RunLog, rank_file

__all__ = [
    "VERSION",
    "Recorder",
    "Run",
    "RunLog",
    "decode",
    "encode",
    "finding_line",
    "rank_file",
    "read",
    "sample_line",
    "sample_of",
]
