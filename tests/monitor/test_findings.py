"""Findings from records: what a healthy run does is none, and each fault is one, once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from gradscale.monitor.findings import (
    APART,
    FALL,
    KINDS,
    LASTING,
    LOWERED,
    MEASURED,
    OFTEN,
    START,
    WINDOW,
    Finding,
    RecordRules,
    from_records,
    merged,
    up_to_date,
)
from gradscale.policy import Dynamic, GradStats


def record(number: int, verdict: str = "", **more: Any) -> dict[str, Any]:
    """A step that was applied, or skipped for this reason."""
    one = {"optimizer": 0, "applied": not verdict, "scale": 8.0, "skipped_in_a_row": 0, **more}
    moves = one.pop("moves", [])
    if verdict:
        one["verdict"] = verdict
    return {"kind": "step", "step": number, "scale": 8.0, "steps": [one], "moves": moves}


def kinds(records: Any) -> list[str]:
    return [finding.kind for finding in from_records(records)]


def dynamic_run(limit: float, steps: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """A run whose gradients overflow above the scale `limit`, by torch's rule."""
    policy = Dynamic(**settings)
    state, row = policy.init(), 0
    for number in range(1, steps + 1):
        scale = state.scale
        fine = scale <= limit
        row = 0 if fine else row + 1
        state = policy.update(state, GradStats(finite=fine))
        moves = [[0, scale, state.scale, 0.0]] if scale != state.scale else []
        verdict = "" if fine else "scale too high"
        yield record(number, verdict, scale=scale, skipped_in_a_row=row, moves=moves)


@pytest.mark.parametrize("limit", [2.0**12, 2.0**18, 2.0**40])
def test_healthy_run_has_none(limit: float) -> None:
    assert kinds(dynamic_run(limit, 3000, growth_interval=100)) == []


def test_each_fault_of_the_scale_is_found_at_its_threshold() -> None:
    assert kinds(dynamic_run(2.0 ** (17 - FALL), 50)) == []
    assert kinds(dynamic_run(2.0 ** (16 - FALL), 50)) == ["scale-too-high"]
    # From the first of twenty skips to the last are 19 periods of growth_interval + 1 steps.
    rare = (WINDOW - 1) // (OFTEN - 1)
    assert kinds(dynamic_run(2.0**16, 2000, growth_interval=rare)) == []
    assert kinds(dynamic_run(2.0**16, 2000, growth_interval=rare - 1)) == ["skips-too-often"]


def test_skips_at_the_start_do_not_count_as_too_often() -> None:
    lines = [record(n, "scale too high" if n % 3 else "") for n in range(1, START + 1)]
    assert kinds(lines) == []
    assert kinds({**line, "step": line["step"] + START} for line in lines) == ["skips-too-often"]


@pytest.mark.parametrize("cause", ["loss not finite", "NaN at any scale", "scale too low"])
def test_skips_that_no_lower_scale_prevents_do_not_count_as_too_often(cause: str) -> None:
    lines = [record(START + n, cause if n <= OFTEN else "") for n in range(1, WINDOW)]
    assert "skips-too-often" not in kinds(lines)


def test_evidence_names_the_scales_and_is_kept_up_to_date() -> None:
    rules = RecordRules()
    new = [found for line in dynamic_run(2.0**4, 50) for found in rules.take(line)]
    assert [(found.kind, found.step) for found in new] == [("scale-too-high", FALL)]
    assert f"{FALL} steps in a row" in new[0].evidence
    (latest,) = rules.findings()
    assert latest.evidence == (
        "12 steps in a row were skipped because gradients overflowed, at scales from 65536 to 32."
    )
    assert str(latest) == f"scale-too-high (first at step 8): {latest.evidence} {latest.remedy}"


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        ("loss not finite", "loss-not-finite"),
        ("NaN at any scale", "nan-at-any-scale"),
        ("scale too low", "scale-too-low"),
    ],
)
def test_what_no_scale_cures_is_found_at_once(verdict: str, kind: str) -> None:
    bad = record(4, verdict, culprits=[["layer.weight", 0, 0, 3]])
    (found,) = from_records([record(3), bad, record(5), {**bad, "step": 6}])
    assert (found.kind, found.step) == (kind, 4)
    assert found.where == ("layer.weight" if verdict == "NaN at any scale" else "")
    assert found.evidence == f"2 steps were skipped ({verdict})."
    assert found.remedy == KINDS[kind]


def test_a_loss_that_is_not_finite_is_found_though_the_step_is_applied() -> None:
    records = [record(1) | {"loss": 1.0}, *(record(n) | {"loss": math.nan} for n in (2, 3))]
    (finding,) = from_records(records)
    assert (finding.kind, finding.step) == ("loss-not-finite", 2)
    assert finding.evidence.startswith("2 steps were applied with such a loss")
    skipped = record(4, "loss not finite") | {"loss": math.nan}
    (finding,) = from_records([*records, skipped])
    assert finding.evidence.startswith("1 step was skipped (loss not finite). 2 steps were applied")


@pytest.mark.parametrize(("infs", "expected"), [(0, []), (1, ["scale-too-high"])])
def test_a_row_of_nan_alone_is_not_put_down_to_the_scale(infs: int, expected: list[str]) -> None:
    culprits = [["w", 0, 0, 4], ["v", 0, infs, 4]]
    row = [record(n, "scale too high", culprits=culprits) for n in range(1, FALL + 1)]
    assert kinds(row) == expected
    last = record(FALL + 1, "NaN at any scale", scale=math.ldexp(8.0, -LOWERED), culprits=culprits)
    assert kinds([*row, last]) == [*expected, "nan-at-any-scale"]


def test_step_without_gradients_is_no_skip() -> None:
    assert kinds(record(n, "no gradients", skipped_in_a_row=n) for n in range(1, 500)) == []


def test_graph_replays_have_flags_only() -> None:
    def replay(number: int, finite: bool) -> dict[str, Any]:
        one = {"optimizer": 0, "applied": False, "loss_finite": finite, "skipped_in_a_row": number}
        return {"kind": "step", "step": number, "scale": 1.0, "steps": [one], "moves": []}

    assert kinds([replay(1, True)]) == []
    assert kinds([replay(1, False)]) == ["loss-not-finite"]
    assert kinds([replay(n, True) for n in range(1, 51)]) == ["stuck"]


def test_stuck_goes_by_the_setting() -> None:
    lines = [record(n, "stuck at the floor", skipped_in_a_row=n) for n in range(1, 4)]
    assert kinds(lines) == []
    (found,) = from_records(lines, stuck_after=3)
    assert (found.kind, found.step) == ("stuck", 3)
    assert "'stuck at the floor'" in found.evidence


def test_room_for_a_higher_scale_is_found_only_if_gradients_vanish() -> None:
    def measured(underflow: float | None, headroom: float) -> list[dict[str, Any]]:
        lines = [record(n, underflow=underflow, headroom=headroom) for n in range(MEASURED)]
        return lines if underflow is not None else [record(n, headroom=9.0) for n in range(99)]

    assert kinds(measured(0.06, 7.0)) == ["scale-too-low"]
    assert kinds(measured(0.06, 7.0)[1:]) == []
    assert (
        kinds(measured(0.04, 7.0)) == kinds(measured(0.06, 5.0)) == kinds(measured(None, 9)) == []
    )


def test_losses_far_apart_for_long_are_unbalanced() -> None:
    def apart(binades: int, steps: int) -> list[dict[str, Any]]:
        moves = [[0, 2.0, 1.0, 0.0], ["other", 2.0**binades / 2, 2.0**binades, 0.0]]
        return [record(1, moves=moves), *(record(n) for n in range(2, steps + 2))]

    (found,) = from_records(apart(APART, LASTING))
    assert found.kind == "losses-unbalanced"
    assert "loss 0 is 1 and that of loss 'other' 2048, 11 binades" in found.evidence
    assert kinds(apart(APART - 1, 2 * LASTING)) == kinds(apart(APART, LASTING - 1)) == []


def test_run_that_goes_back_does_not_count_twice() -> None:
    one = [record(n, "scale too high" if n % 30 == 0 else "") for n in range(101, 500)]
    assert kinds(one) == kinds(one + one) == []


def test_ranks_that_find_the_same_find_it_once() -> None:
    lines = [{**record(3, "loss not finite"), "rank": rank} for rank in (0, 1)]
    assert [found.rank for found in from_records(lines)] == [None]
    assert [found.rank for found in from_records([lines[1], {**record(3), "rank": 0}])] == [1]
    a = Finding.of("stuck", "x", step=5, rank=1)
    assert merged([a, a._replace(step=2)]) == [a._replace(step=2)]


def test_every_kind_has_advice_in_sentences() -> None:
    for kind, remedy in KINDS.items():
        assert remedy.endswith("."), kind
        text = str(Finding.of(kind, "Evidence.", "a.b", step=1, rank=2))
        assert text.startswith(f"{kind} in a.b (first at step 1, rank 2): Evidence. ")


def test_nan_is_put_down_to_another_cause_where_a_lower_scale_did_not_help() -> None:
    culprits = [["w", 0, 0, 4]]
    numbers = range(1, LOWERED + 2)
    fall = [record(n, "NaN at any scale", scale=2.0**-n, culprits=culprits) for n in numbers]
    assert kinds(fall) == ["nan-at-any-scale"]
    assert kinds(fall[:-1]) == []
    # It did help, or nothing has lowered it.
    end = LOWERED + 1
    assert kinds([*fall[:-1], record(end, scale=2.0**-end), record(end + 1, scale=0.5)]) == []
    assert kinds(record(n, "NaN at any scale", culprits=culprits) for n in range(1, 40)) == []


@pytest.mark.parametrize(("scale", "expected"), [(8.0, ["nan-at-any-scale"]), (16.0, [])])
def test_nan_at_a_scale_that_has_worked_is_not_put_down_to_it(
    scale: float, expected: list[str]
) -> None:
    bad = record(2, "NaN at any scale", scale=scale, culprits=[["w", 0, 0, 4]])
    assert kinds([record(1), bad]) == expected
    other = [record(1, optimizer=1, scale=2.0**20), record(2), {**bad, "step": 3}]
    assert kinds(other) == expected


def test_steps_that_were_thinned_out_end_a_row_of_overflows() -> None:
    culprits = [["w", 0, 1, 0]]
    rows = [*range(1, FALL), *range(100, 100 + FALL - 1)]
    assert kinds(record(n, "scale too high", culprits=culprits) for n in rows) == []


def test_findings_of_a_log_are_brought_up_to_date_where_records_have_made_them() -> None:
    lines = [record(n, "loss not finite") for n in range(1, 5)]
    rules = RecordRules()
    logged = [found._replace(rank=3) for line in lines for found in rules.take(line)]
    assert [found.evidence for found in logged] == ["1 step was skipped (loss not finite)."]
    sampled = Finding.of("loss-not-finite", "In the last 5 samples it was not.", step=2)
    first, second = up_to_date([*logged, sampled], lines)
    assert first == logged[0]._replace(evidence="4 steps were skipped (loss not finite).")
    assert second == sampled
