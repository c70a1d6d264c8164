"""A run in numbers: what `gradscale report` prints, and `--json` gives out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradscale.monitor.findings import STUCK_AFTER, Finding, up_to_date
from gradscale.report.curves import curves, median, number, optimizer_steps, step_of
from gradscale.runlog import Run


class Skip(NamedTuple):
    """An iteration in which at least one step was skipped."""

    step: int
    scale: float | None
    """The scale that was used."""
    verdict: str
    """A key of `gradscale.monitor.EXPLANATIONS`; empty where none was recorded."""
    culprits: tuple[tuple[str, int, int | None, int | None], ...]
    """Parameters whose gradients were not finite: name, rank, infinite and NaN elements."""


class Summary(NamedTuple):
    """The numbers of a run. What was not measured is None."""

    name: str
    """The name of the run."""
    first_step: int
    """The first step."""
    last_step: int
    """The last step."""
    steps: int
    """Iterations from the first to the last, including those that were thinned out of the log."""
    ranks: list[int]
    """The ranks that have written lines."""
    skipped: int
    """Iterations in which at least one step was skipped."""
    causes: dict[str, int]
    """Number of skipped iterations by verdict."""
    culprits: dict[str, int]
    """Number of skipped iterations in which a parameter was not finite; the ten most frequent."""
    scale: float | None
    """The last scale."""
    median_scale: float | None
    median_headroom: float | None
    lowest_headroom: float | None
    median_underflow: float | None
    last_loss: float | None
    seconds: float | None
    """Time from the first to the last step."""
    findings: list[Finding]
    unreadable_lines: int

    @property
    def skipped_share(self) -> float | None:
        """The share of iterations that were skipped."""
        return self.skipped / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, fit for JSON."""
        fields = self._asdict() | {"skipped_share": self.skipped_share}
        return fields | {"findings": [finding.as_dict() for finding in self.findings]}


def summarise(run: Run, name: str) -> Summary:
    """Returns the numbers of `run`, with this name.

    With several ranks, skips are those of all, and the curves those of the lowest.
    """
    lines = lines_of_first_rank(run)
    skips = skips_of(run)
    numbers = [step_of(line) for line in lines]
    values = {name: [value for _, value in found] for name, found in curves(lines).items()}
    scales, headroom = values["scale"], values["headroom"]
    times = [t for line in lines if (t := number(line.get("time"))) is not None]
    culprits = Counter(name for skip in skips for name in {each[0] for each in skip.culprits})
    return Summary(
        name=name,
        first_step=numbers[0] if numbers else 0,
        last_step=numbers[-1] if numbers else 0,
        steps=numbers[-1] - numbers[0] + 1 if numbers else 0,
        ranks=run.ranks,
        skipped=len(skips),
        causes=dict(Counter(skip.verdict for skip in skips).most_common()),
        culprits=dict(culprits.most_common(10)),
        scale=scales[-1] if scales else None,
        median_scale=median(scales),
        median_headroom=median(headroom),
        lowest_headroom=min(headroom, default=None),
        median_underflow=median(values["underflow"]),
        last_loss=values["loss"][-1] if values["loss"] else None,
        seconds=times[-1] - times[0] if len(times) > 1 else None,
        findings=findings_of(run),
        unreadable_lines=run.skipped_lines,
    )


def findings_of(run: Run) -> list[Finding]:
    """The findings of `run`, with the evidence of all its steps."""
    stuck_after = run.settings.get("stuck_after", STUCK_AFTER)
    try:
        return up_to_date(run.findings, run.steps, stuck_after=stuck_after)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return run.findings  # a line has fields of other types than ours


def lines_of_first_rank(run: Run) -> list[dict[str, Any]]:
    """The step lines of the lowest rank: ranks that decide together have the same scale."""
    first = min((line["rank"] for line in run.steps), default=0)
    return [line for line in run.steps if line["rank"] == first]


def skips_of(run: Run) -> list[Skip]:
    """The skipped iterations of all ranks, by step; culprits of the ranks together."""
    found: dict[int, Skip] = {}
    for line in run.steps:
        for step in optimizer_steps(line):
            if step.get("applied") is not False:
                continue
            skip = _skip(line, step)
            before = found.get(skip.step)
            if before is not None:
                names = dict.fromkeys((*before.culprits, *skip.culprits))
                skip = before._replace(
                    verdict=before.verdict or skip.verdict, culprits=tuple(names)
                )
            found[skip.step] = skip
    return [found[step] for step in sorted(found)]


def _skip(line: Mapping[str, Any], step: Mapping[str, Any]) -> Skip:
    """The skip of one step of an optimizer."""
    rows = step.get("culprits")
    culprits = tuple(
        (str(name), rank, infs, nans)
        for name, rank, infs, nans in (
            row for row in (rows if isinstance(rows, list) else []) if _is_culprit(row)
        )
    )
    scale = number(step.get("scale"))
    if scale is None:
        scale = number(line.get("scale"))
    return Skip(step_of(line), scale, str(step.get("verdict", "")), culprits)


def _is_culprit(row: Any) -> bool:
    """Whether a row is (name, rank, infinite elements, NaN elements)."""
    return (
        isinstance(row, list)
        and len(row) == 4
        and isinstance(row[0], str)
        and all(each is None or isinstance(each, int) for each in row[1:])
    )
