"""Two runs against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradscale.monitor.findings import Finding
from gradscale.report.curves import curves
from gradscale.report.summary import Summary, lines_of_first_rank, summarise
from gradscale.report.words import number_text, scale_text, share_text
from gradscale.runlog import Run


class Row(NamedTuple):
    """One quantity of both runs, as text."""

    name: str
    first: str
    second: str


class Comparison(NamedTuple):
    """What two runs have in common, and where they differ."""

    first: Summary
    second: Summary
    only_first: list[Finding]
    """Findings of the first run that the second does not have, by kind and place."""
    only_second: list[Finding]
    """Findings of the second run that the first does not have."""
    both: list[Finding]
    """Findings of both, as the second run has them."""
    common_step: int | None
    """The last step at which both have logged a loss."""
    losses: tuple[float, float] | None
    """Their losses at that step."""

    def rows(self) -> list[Row]:
        """Returns the table of the comparison."""
        a, b = self.first, self.second
        rows = [
            Row("steps", f"{a.steps:,}", f"{b.steps:,}"),
            Row("skipped steps", _skipped(a), _skipped(b)),
            Row("median scale", scale_text(a.median_scale), scale_text(b.median_scale)),
            Row("last scale", scale_text(a.scale), scale_text(b.scale)),
            Row("median headroom", *(_binades(s.median_headroom) for s in (a, b))),
            Row("lowest headroom", *(_binades(s.lowest_headroom) for s in (a, b))),
            Row("median underflow", *(share_text(s.median_underflow) for s in (a, b))),
            Row("findings", str(len(a.findings)), str(len(b.findings))),
        ]
        if self.losses is not None:
            first, second = map(number_text, self.losses)
            rows.append(Row(f"loss at step {self.common_step:,}", first, second))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields, fit for JSON."""
        return {
            "first": self.first.as_dict(),
            "second": self.second.as_dict(),
            "only_first": [finding.as_dict() for finding in self.only_first],
            "only_second": [finding.as_dict() for finding in self.only_second],
            "both": [finding.as_dict() for finding in self.both],
            "common_step": self.common_step,
            "losses": self.losses,
        }


def compare(first: Run, second: Run, names: tuple[str, str]) -> Comparison:
    """Returns the comparison of two runs with these names."""
    a, b = summarise(first, names[0]), summarise(second, names[1])
    losses = [dict(curves(lines_of_first_rank(run))["loss"]) for run in (first, second)]
    common = max(losses[0].keys() & losses[1].keys(), default=None)
    return Comparison(
        first=a,
        second=b,
        only_first=_without(a.findings, b.findings),
        only_second=_without(b.findings, a.findings),
        both=[each for each in b.findings if _key(each) in set(map(_key, a.findings))],
        common_step=common,
        losses=None if common is None else (losses[0][common], losses[1][common]),
    )


def _key(finding: Finding) -> tuple[str, str]:
    """What makes findings of two runs the same one."""
    return finding.kind, finding.where


def _without(findings: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """The findings that are not among the others."""
    known = set(map(_key, others))
    return [finding for finding in findings if _key(finding) not in known]


def _skipped(summary: Summary) -> str:
    """How many steps were skipped, in words."""
    return f"{summary.skipped:,} ({share_text(summary.skipped_share)})"


def _binades(value: float | None) -> str:
    """A number of binades."""
    return number_text(value, " binades")
