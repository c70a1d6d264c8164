"""One HTML page that holds everything: data, style and scripts; it asks no host for anything.

Names in a log are anybody's: parameters of a model that was downloaded, for one. So the data is a
block of JSON in which no tag can begin, the scripts write it as text only, and the page's own
policy (Content-Security-Policy) runs nothing but the script with the hash that is given here.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from gradscale import __version__
from gradscale.monitor.findings import Finding
from gradscale.monitor.samples import Sample
from gradscale.report.comparison import Comparison
from gradscale.report.curves import curves, number, step_of, thin
from gradscale.report.layers import KINDS, chosen, range_in, shares_of, worst
from gradscale.report.summary import Skip, Summary, lines_of_first_rank, skips_of
from gradscale.report.words import cause_of, number_text, scale_text, share_text, title_of
from gradscale.runlog import Run

SKIPS = 2000
"""Skipped steps of a page at most; if there are more, the first half and the last half of it."""
EVENTS = 500
SAMPLES = 12
LAYERS = 120
FINDINGS = 200
TEXT = 500
"""Characters of one text from the log at most."""


def report_page(run: Run, summary: Summary) -> str:
    """Returns the HTML page of one run."""
    data = {
        "title": f"Run {summary.name}",
        "runs": [_run(run, summary)],
        "findings": [{"title": "", "findings": _findings(summary.findings)}],
        "facts": _facts(summary),
        "rows": [],
    }
    return _page(data)


def comparison_page(first: Run, second: Run, comparison: Comparison) -> str:
    """Returns the HTML page with the curves of two runs."""
    names = comparison.first.name, comparison.second.name
    groups = [
        (f"Only in {names[0]}", comparison.only_first),
        (f"Only in {names[1]}", comparison.only_second),
        ("In both", comparison.both),
    ]
    data = {
        "title": f"{names[0]} and {names[1]}",
        "runs": [_run(first, comparison.first), _run(second, comparison.second)],
        "findings": [
            {"title": title, "findings": _findings(found)} for title, found in groups if found
        ],
        "facts": [],
        "rows": [["", *names], *(list(row) for row in comparison.rows())],
    }
    return _page(data)


def embedded(data: Mapping[str, Any]) -> str:
    r"""`data` as JSON that can stand in a script element: no tag and no comment can begin in it.

    >>> embedded({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(_cut(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _page(data: dict[str, Any]) -> str:
    """The page that shows `data`."""
    data |= {"kinds": KINDS, "gradscale": __version__}
    assets = files("gradscale.report") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8")
    script = "".join(
        (assets / name).read_text(encoding="utf-8")
        for name in ("elements.js", "chart.js", "heatmap.js", "page.js")
    )
    parts = {
        "TITLE": html.escape(str(data["title"])[:TEXT]),
        "STYLE_HASH": _hash(style),
        "SCRIPT_HASH": _hash(script),
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded(data),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    pieces = page.split("%%")
    # One pass: what a part contains is never taken for the name of another.
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _hash(text: str) -> str:
    """The hash of an inline script or style, as a policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _cut(value: Any) -> Any:
    """`value` fit for JSON: long texts cut, numbers that are not finite as text."""
    if isinstance(value, str):
        return value if len(value) <= TEXT else value[: TEXT - 3] + "..."
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name)[:TEXT]: _cut(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:TEXT]


def _run(run: Run, summary: Summary) -> dict[str, Any]:
    """Everything that a page shows of one run."""
    lines = lines_of_first_rank(run)
    skips = skips_of(run)
    kept = skips if len(skips) <= SKIPS else [*skips[: SKIPS // 2], *skips[-(SKIPS // 2) :]]
    events = [event for event in run.events if event.get("name") != "skip"]
    samples = chosen(run.samples, SAMPLES)
    return {
        "name": summary.name,
        "first": summary.first_step,
        "last": summary.last_step,
        "curves": {name: thin(found) for name, found in curves(lines).items()},
        "lines": len(lines),
        "skips": [[s.step, scale_text(s.scale), cause_of(s.verdict), _culprits(s)] for s in kept],
        "skipped": len(skips),
        "events": [_event(event) for event in events[-EVENTS:]],
        "all_events": len(events),
        "samples": [_sample(sample) for sample in samples],
        "all_samples": len(run.samples),
        "settings": _settings(run),
    }


def _event(line: Mapping[str, Any]) -> list[Any]:
    """Step, name, scale and loss of an event."""
    scale = scale_text(number(line.get("scale")))
    return [step_of(line), str(line.get("name", "")), scale, str(line.get("loss_id", 0))]


def _culprits(skip: Skip) -> str:
    """The parameters that made a step not finite, in words."""
    several = len({rank for _, rank, _, _ in skip.culprits}) > 1
    named = [
        name + (f" (rank {rank})" if several else "") for name, rank, _, _ in skip.culprits[:3]
    ]
    more = len(skip.culprits) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings for people."""
    return [
        {
            "title": title_of(each.kind),
            "kind": each.kind,
            "where": each.where,
            "evidence": each.evidence,
            "remedy": each.remedy,
            "step": each.step,
            "rank": each.rank,
        }
        for each in findings[:FINDINGS]
    ]


def _sample(sample: Sample) -> dict[str, Any]:
    """A sample, with the rows of every kind of tensor."""
    kinds = {}
    for kind in KINDS:
        rows = worst(sample, kind, LAYERS)
        if rows:
            # One axis for all rows: the range that most of them have.
            ranges = Counter(range_in(sample, tensor) for tensor in rows)
            kinds[kind] = {
                "all": len(sample.of(kind)),
                "format": ranges.most_common(1)[0][0]._asdict(),
                "rows": [
                    {
                        "name": tensor.name,
                        "numel": tensor.numel,
                        "low": tensor.low,
                        "counts": tensor.counts,
                        "zeros": tensor.zeros,
                        "flushed": tensor.flushed,
                        "infs": tensor.infs,
                        "nans": tensor.nans,
                        "scale": scale_text(tensor.scale),
                        **shares_of(tensor, range_in(sample, tensor))._asdict(),
                    }
                    for tensor in rows
                ],
            }
    first = sample.first_nonfinite
    return {
        "step": sample.step,
        "kinds": kinds,
        "first": None if first is None else [first[0], first[1]],
    }


def _facts(summary: Summary) -> list[list[str]]:
    """The numbers on top of a page: name, value, and a remark."""
    lowest = number_text(summary.lowest_headroom)
    speed = "" if not summary.seconds else f"{summary.steps / summary.seconds:.3g} per second"
    skipped = share_text(summary.skipped_share) if summary.skipped else "none"
    return [
        ["steps", f"{summary.steps:,}", speed],
        ["skipped", f"{summary.skipped:,}", skipped],
        ["scale", scale_text(summary.scale), f"median {scale_text(summary.median_scale)}"],
        ["headroom", number_text(summary.median_headroom), f"binades, lowest {lowest}"],
        ["underflow", share_text(summary.median_underflow), "median of the measured steps"],
        ["loss", number_text(summary.last_loss), "last"],
    ]


def _settings(run: Run) -> list[list[str]]:
    """The settings of a run and where it ran, as rows."""
    rows = [[str(name), str(value)] for name, value in run.settings.items()]
    if run.headers:
        last = run.headers[-1]
        rows += [[name, str(last[name])] for name in ("engine", "gradscale") if name in last]
        rows.append(["ranks", ", ".join(map(str, run.ranks))])
        began = number(run.headers[0].get("time"))
        if began is not None and 0 <= began < 2**35:
            moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))
            rows.append(["began", moment])
        continued = len(run.headers) - len(run.ranks)
        if continued > 0:
            rows.append(["continued", f"{continued} times"])
    if run.skipped_lines:
        rows.append(["lines that could not be read", str(run.skipped_lines)])
    return rows
