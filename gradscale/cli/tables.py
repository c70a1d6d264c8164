"""Reports on runs as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradscale.monitor.findings import Finding
from gradscale.report import Comparison, Summary
from gradscale.report.words import (
    cause_of,
    number_text,
    printable,
    scale_text,
    share_text,
    title_of,
)


def shown(text: str) -> str:
    """`text` of a log as it is, for rich: without markup, and nothing that a terminal obeys."""
    return escape(printable(text))


def print_findings(console: Console, findings: Sequence[Finding], name: str = "Findings") -> None:
    """Prints findings in words, each with its remedy."""
    console.print(f"[bold]{shown(name)}[/bold]")
    if not findings:
        console.print("No findings.")
    for each in findings:
        place = f": {each.where}" if each.where else ""
        seen = "" if each.step is None else f", first at step {each.step:,}"
        console.print(f"- [bold]{shown(title_of(each.kind) + place)}[/bold]{seen}")
        console.print(f"  {shown(each.evidence)}")
        console.print(f"  What to do: {shown(each.remedy)}")
    console.print()


def print_summary(
    console: Console, summary: Summary, layers: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Prints one run: findings first, then numbers, causes of skips and layers."""
    console.print(f"Run [bold]{shown(summary.name)}[/bold]\n")
    print_findings(console, summary.findings)
    table = Table(show_header=False)
    headroom = number_text(summary.median_headroom, " binades")
    for name, value in (
        ("steps", f"{summary.steps:,}"),
        ("skipped", f"{summary.skipped:,} ({share_text(summary.skipped_share)})"),
        ("scale", f"{scale_text(summary.scale)} (median {scale_text(summary.median_scale)})"),
        ("headroom", f"{headroom} (lowest {number_text(summary.lowest_headroom)})"),
        ("underflow", share_text(summary.median_underflow)),
        ("loss", number_text(summary.last_loss)),
    ):
        table.add_row(name, value)
    console.print(table)
    if summary.skipped:
        table = Table("steps", "skipped because")
        for verdict, count in summary.causes.items():
            table.add_row(f"{count:,}", shown(cause_of(verdict)))
        console.print(table)
    if summary.culprits:
        table = Table("skips", "gradients that were not finite")
        for name, count in summary.culprits.items():
            table.add_row(f"{count:,}", shown(name))
        console.print(table)
    if layers:
        table = Table("layer (worst first)", "lost", "fewer digits")
        for row in layers:
            table.add_row(shown(row["name"]), share_text(row["lost"]), share_text(row["imprecise"]))
        console.print(table)
    if summary.unreadable_lines:
        console.print(f"Lines that could not be read: {summary.unreadable_lines}.", style="dim")


def print_comparison(console: Console, found: Comparison) -> None:
    """Prints two runs side by side, and the findings that only one of them has."""
    table = Table("", shown(found.first.name), shown(found.second.name))
    for row in found.rows():
        table.add_row(*map(shown, row))
    console.print(table)
    console.print()
    for name, findings in (
        (f"Only in {found.first.name}", found.only_first),
        (f"Only in {found.second.name}", found.only_second),
        ("In both", found.both),
    ):
        if findings:
            print_findings(console, findings, name)
    if not (found.only_first or found.only_second or found.both):
        console.print("No findings in either run.")
