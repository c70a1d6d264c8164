"""What a report says of a run: numbers that can be counted in the log, and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import run_logs
from gradscale.formats import FORMATS
from gradscale.monitor import EXPLANATIONS
from gradscale.monitor.findings import KINDS, Finding
from gradscale.monitor.samples import Sample, TensorSample
from gradscale.report import compare, layers, summarise
from gradscale.report.curves import curves, median, number, thin
from gradscale.report.summary import skips_of
from gradscale.report.words import CAUSES, TITLES, cause_of, scale_text, share_text, title_of
from gradscale.runlog import Run, read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_logs.write_run(tmp_path_factory.mktemp("run") / "first", 600)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read(folder)


def run_of(*lines: dict[str, Any], findings: list[Finding] | None = None) -> Run:
    steps = [{"rank": 0, **line} for line in lines]
    return Run({}, [0], steps, [], findings or [], [], 0, [])


def step(number: int, applied: bool = True, **fields: Any) -> dict[str, Any]:
    inside = {key: fields.pop(key) for key in ("headroom", "underflow", "verdict") if key in fields}
    taken = {"applied": applied, "culprits": fields.pop("culprits", []), **inside}
    return {"kind": "step", "step": number, "scale": 4.0, "steps": [taken], **fields}


# Numbers.


def test_the_summary_counts_what_is_in_the_log(folder: Path, run: Run) -> None:
    lines = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    skipped = [line for line in steps if not line["steps"][0]["applied"]]
    summary = summarise(run, "first")
    assert summary.skipped == len(skipped) > 0
    assert summary.steps == len(steps) == 600
    assert summary.causes == {"scale too high": len(skipped)}
    assert summary.scale == steps[-1]["scale"]
    assert summary.last_loss == steps[-1]["loss"]
    headroom = sorted(
        line["steps"][0]["headroom"] for line in steps if "headroom" in line["steps"][0]
    )
    assert summary.lowest_headroom == headroom[0]
    assert summary.median_headroom == headroom[(len(headroom) - 1) // 2]
    names = {row[0] for line in skipped for row in line["steps"][0]["culprits"]}
    assert set(summary.culprits) <= names
    json.dumps(summary.as_dict(), allow_nan=False)


def test_steps_that_a_log_has_thinned_out_count() -> None:
    summary = summarise(run_of(step(1), step(3), step(5, applied=False)), "thinned")
    assert (summary.steps, summary.skipped, summary.skipped_share) == (5, 1, 0.2)


def test_the_evidence_of_findings_is_that_of_the_whole_log() -> None:
    lines = [step(n, applied=False, verdict="loss not finite") for n in range(1, 4)]
    found = Finding.of("loss-not-finite", "1 step was skipped (loss not finite).", step=1)
    (latest,) = summarise(run_of(*lines, findings=[found]), "run").findings
    assert latest == found._replace(evidence="3 steps were skipped (loss not finite).")
    odd = run_of(*lines, {"step": 9, "steps": [{}]}, findings=[found])
    assert summarise(odd, "run").findings == [found]


def test_an_empty_log_has_no_numbers() -> None:
    summary = summarise(run_of(), "empty")
    assert (summary.steps, summary.skipped, summary.skipped_share) == (0, 0, None)
    assert summary.median_scale is summary.last_loss is summary.seconds is None


def test_ranks_that_skip_together_count_once_and_all_are_blamed() -> None:
    first = step(2, applied=False, verdict="scale too high", culprits=[["a", 0, 1, 0]])
    second = step(2, applied=False, verdict="scale too high", culprits=[["b", 1, 1, 0]])
    run = run_of(step(1), {**step(1), "rank": 1}, first, {**second, "rank": 1})
    (skip,) = skips_of(run)
    assert skip.culprits == (("a", 0, 1, 0), ("b", 1, 1, 0))
    assert summarise(run, "ranks").skipped == 1


def test_of_several_optimizers_the_worst_is_shown() -> None:
    line = step(1, headroom=3.0, underflow=0.1)
    line["steps"].append({"applied": True, "headroom": 1.0, "underflow": 0.5})
    assert curves([line])["headroom"] == [(1, 1.0)]
    assert curves([line])["underflow"] == [(1, 0.5)]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    fields=st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("scale", "loss", "time", "step", "steps"), junk)
    )
)
def test_fields_of_any_type_are_taken_for_not_measured(fields: dict[str, Any]) -> None:
    taken = {"applied": False, "verdict": 3, "culprits": fields.get("steps"), "headroom": "x"}
    line = {**step(1), "steps": [taken, 7], **fields}
    summary = summarise(run_of(line, step(2)), "junk")
    json.dumps(summary.as_dict(), allow_nan=False)


def test_only_finite_numbers_are_numbers() -> None:
    assert [number(x) for x in (1, 2.5, math.nan, math.inf, "1", None, True, 10**400)] == [
        1.0,
        2.5,
        *[None] * 6,
    ]


# Thinning.

points = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300).map(
    lambda values: list(enumerate(values, 1))
)


@given(points=points, limit=st.integers(4, 40))
def test_thinning_keeps_ends_extremes_and_order(
    points: list[tuple[int, float]], limit: int
) -> None:
    kept = thin(points, limit)
    assert len(kept) <= limit
    assert len(kept) >= min(len(points), limit // 2)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    for extreme in (min, max):
        assert extreme(value for _, value in kept) == extreme(value for _, value in points)


def test_a_spike_of_one_step_in_100_000_stays() -> None:
    curve = [(step, 1.0) for step in range(100_000)]
    curve[54_321] = (54_321, 99.0)
    assert (54_321, 99.0) in thin(curve)
    # Every n-th point, which is simpler, would lose it.
    assert (54_321, 99.0) not in curve[:: len(curve) // 2000]


# Layers.


@pytest.mark.parametrize("name", FORMATS)
def test_the_range_of_a_format_is_that_of_its_numbers(name: str) -> None:
    limits, format = layers.range_of(name), FORMATS[name]
    assert 2.0**limits.smallest == format.smallest_subnormal
    assert 2.0**limits.normal == format.smallest_normal
    assert 2.0**limits.largest <= format.max < 2.0 ** (limits.largest + 1)
    assert layers.range_of("novel") == layers.range_of("float16")


counts = st.lists(st.integers(0, 50), min_size=1, max_size=60).map(tuple)


@given(low=st.integers(-40, 10), counts=counts, flushed=st.none() | st.integers(0, 9))
def test_shares_are_those_of_the_values_themselves(
    low: int, counts: tuple[int, ...], flushed: int | None
) -> None:
    zeros = 9
    tensor = TensorSample("w", "weight_grad", 99, low, counts, zeros, flushed, 3, 2)
    found = layers.shares_of(tensor, layers.range_of("float16"))
    values = [2.0**e for e, count in enumerate(counts, low) for _ in range(count)]
    whole = len(values) + (flushed or 0) + 3 + 2
    lost = sum(v < 2.0**-24 for v in values) + (flushed or 0)
    imprecise = sum(2.0**-24 <= v < 2.0**-14 for v in values)
    over = sum(v > 65504 for v in values) + 3
    assert found == (lost / whole, imprecise / whole, over / whole, 2 / whole)


def test_the_layers_that_lose_most_are_kept_in_model_order() -> None:
    rows = tuple(
        TensorSample(str(i), "weight_grad", 10, -30 if i in (3, 7) else 0, (5,), 0, None, 0, 0)
        for i in range(10)
    )
    sample = Sample(1, "float16", rows, None, ())
    assert [row.name for row in layers.worst(sample, "weight_grad", 2)] == ["3", "7"]
    assert [row["name"] for row in layers.underflow_by_layer(sample)] == ["3", "7"]


def test_chosen_samples_hold_the_first_and_the_last() -> None:
    samples = [Sample(step, "float16", (), None, ()) for step in range(50)]
    assert [s.step for s in layers.chosen(samples, 3)] == [0, 24, 49]
    assert layers.chosen(samples, 50) == samples


# Words.


def test_every_kind_of_finding_and_every_verdict_has_words() -> None:
    assert set(TITLES) == set(KINDS)
    assert set(CAUSES) == set(EXPLANATIONS) - {"applied"}
    assert title_of("novel") == cause_of("novel") == "novel"


def test_only_nothing_is_0_percent_and_only_a_power_of_two_is_shown_as_one() -> None:
    assert [share_text(x) for x in (0.0, 1e-9, 1.0, 1 - 1e-9)] == [
        "0 %",
        "<0.1 %",
        "100.0 %",
        ">99.9 %",
    ]
    assert [scale_text(x) for x in (2.0**-14, 3.0, math.inf, 0.0, -2.0)] == [
        "2**-14",
        "3",
        "inf",
        "0",
        "-2",
    ]
    assert median([1.0, 2.0, 3.0]) == 2.0


# Two runs.


def test_a_comparison_has_what_only_one_run_has_and_losses_at_one_step() -> None:
    a = Finding.of("underflow", "Much.", "w")
    b = Finding.of("stuck", "Long.")
    first = run_of(step(1, loss=4.0), step(2, loss=3.0), findings=[a, b])
    second = run_of(step(1, loss=5.0), step(3, loss=1.0), findings=[b])
    found = compare(first, second, ("x", "y"))
    assert (found.only_first, found.only_second, found.both) == ([a], [], [b])
    assert (found.common_step, found.losses) == (1, (4.0, 5.0))
    rows = {row.name: (row.first, row.second) for row in found.rows()}
    assert rows["loss at step 1"] == ("4", "5")
    assert rows["steps"] == ("2", "3")
    json.dumps(found.as_dict(), allow_nan=False)


def test_findings_of_other_places_differ() -> None:
    here, there = (Finding.of("underflow", "Much.", where) for where in ("a", "b"))
    found = compare(run_of(findings=[here]), run_of(findings=[there]), ("x", "y"))
    assert (found.only_first, found.only_second, found.both) == ([here], [there], [])
    assert found.losses is None
