"""Reading a run log: the files of all ranks, merged."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradscale.errors import StateError, caller_level
from gradscale.monitor.findings import Finding, merged
from gradscale.monitor.samples import Sample
from gradscale.runlog.lines import VERSION, decode, finding_of, sample_of


class Run(NamedTuple):
    """The log of a run, of all ranks, in the order of steps."""

    settings: dict[str, Any]
    """The settings in the last header of the lowest rank."""
    ranks: list[int]
    """The ranks that have written lines."""
    steps: list[dict[str, Any]]
    """Lines of kind "step", each with its "rank"; of steps that were repeated, as after loading a
    checkpoint, the last ones."""
    events: list[dict[str, Any]]
    """Lines of kind "event", each with its "rank"."""
    findings: list[Finding]
    """The findings; one that several ranks have is here once, without a rank."""
    samples: list[Sample]
    """The samples of an `Inspector`."""
    skipped_lines: int
    """Number of lines that could not be read."""
    headers: list[dict[str, Any]]
    """Lines of kind "run": one for every rank and every time that it was continued."""


def read(path: str | os.PathLike[str]) -> Run:
    """Returns the run in the folder `path`, or in the file `path`.

    Lines that cannot be read, such as the last one of a killed process, are ignored, with one
    warning that counts them.

    Raises:
        StateError: There is no run log, or a later version of gradscale wrote it.
    """
    files = _files(Path(path))
    parts = [_read_rank(file, rank) for file, rank in files]
    skipped = sum(part.skipped_lines for part in parts)
    if skipped:
        warnings.warn(
            f"Lines of the run log {os.fspath(path)} cannot be read and are skipped: {skipped}. A "
            "process that was killed can leave such a line at the end.",
            stacklevel=caller_level(),
        )
    headers = [header for part in parts for header in part.headers]
    settings = [part.settings for part in parts if part.headers]
    return Run(
        settings=settings[0] if settings else {},
        ranks=[part.ranks[0] for part in parts],
        steps=_in_order([line for part in parts for line in part.steps]),
        events=_in_order([line for part in parts for line in part.events]),
        findings=merged(
            finding._replace(rank=part.ranks[0] if len(parts) > 1 else None)
            for part in parts
            for finding in part.findings
        ),
        samples=sorted((s for part in parts for s in part.samples), key=lambda s: s.step),
        skipped_lines=skipped,
        headers=headers,
    )


def _in_order(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`lines` by step and rank; those of one step keep their order."""
    return sorted(lines, key=lambda line: (line.get("step", 0), line["rank"]))


def _files(path: Path) -> list[tuple[Path, int]]:
    """The files of a run and their ranks, by rank."""
    if path.is_file():
        return [(path, _rank_of(path) or 0)]
    found = [
        (file, rank) for file in path.glob("rank-*.jsonl") if (rank := _rank_of(file)) is not None
    ]
    if not found:
        raise StateError(
            f"{path} has no run log: it is neither a file nor a folder with files rank-0.jsonl and "
            "so on. Pass the folder that was given to log_to()."
        )
    return sorted(found, key=lambda pair: pair[1])


def _rank_of(file: Path) -> int | None:
    """The rank in the name of a file."""
    match = re.fullmatch(r"rank-(\d+)\.jsonl", file.name)
    return int(match[1]) if match else None


def lines_of(file: Path) -> Iterator[dict[str, Any] | None]:
    """Every line of `file`; None for one that cannot be read."""
    with file.open("rb") as stream:
        for text in stream:
            if text == b"\n":
                continue
            try:
                yield decode(text)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                yield None


def _read_rank(file: Path, rank: int) -> Run:
    """The run of one file."""
    run = Run({}, [rank], [], [], [], [], 0, [])
    skipped, settings, last = 0, run.settings, -1
    continued = False
    for line in lines_of(file):
        try:
            kind = None if line is None else line["kind"]
            if line is None:
                skipped += 1
            elif kind == "run":
                if line["version"] > VERSION:
                    raise StateError(
                        f"{file} has version {line['version']} of the run log, but this version of "
                        f"gradscale reads versions up to {VERSION}. Read it with the version that "
                        "wrote it."
                    )
                settings = dict(line.get("settings", {}))
                run.headers.append({"rank": rank, **line})
                continued = True
            elif kind == "step":
                number = int(line["step"])
                # A run that goes on from a checkpoint takes the steps after it once more.
                if number < last or (continued and number == last):
                    _rewind(run, number)
                last, continued = number, False
                run.steps.append({**line, "step": number, "rank": rank})
            elif kind == "event":
                run.events.append({**line, "step": int(line["step"]), "rank": rank})
            elif kind == "finding":
                run.findings.append(finding_of(line))
            elif kind == "sample":
                run.samples.append(sample_of(line))
        except StateError:
            raise
        except (TypeError, KeyError, ValueError, OverflowError):
            skipped += 1
    return run._replace(skipped_lines=skipped, settings=settings)


def _rewind(run: Run, number: int) -> None:
    """Drops what was recorded of the steps from `number` on."""
    run.steps[:] = [line for line in run.steps if line["step"] < number]
    run.events[:] = [line for line in run.events if line["step"] < number]
    run.samples[:] = [sample for sample in run.samples if sample.step < number]
    run.findings[:] = [each for each in run.findings if each.step is None or each.step < number]
