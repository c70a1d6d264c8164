"""What is written is what is read: lines, findings, samples, ranks, continued runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import StateError
from gradscale.monitor.findings import KINDS, Finding
from gradscale.monitor.samples import Sample, TensorSample
from gradscale.runlog import RunLog, decode, encode, finding_line, read, sample_line
from gradscale.runlog.lines import finding_of, sample_of

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
COUNTS = st.integers(0, 2**53)
# Names that look like numbers, like JSON and like lines, besides any text.
NAMES = st.text(max_size=8) | st.sampled_from(
    ["NaN", "Infinity", 'a"b', "a\nb", '"applied":false', "\ud800", "\u2028"]
)
HEADER = {"kind": "run", "version": 1, "rank": 0, "settings": {"format": "float16"}}


@st.composite
def step_lines(draw: Any) -> dict[str, Any]:
    optional: Any = dict.fromkeys(("grad_norm", "amax", "headroom", "underflow", "scale"), NUMBERS)
    culprit = st.tuples(NAMES, COUNTS, st.none() | COUNTS, st.none() | COUNTS).map(list)
    one = st.fixed_dictionaries(
        {"optimizer": COUNTS, "applied": st.booleans()},
        optional=optional | {"culprits": st.lists(culprit, max_size=2), "verdict": NAMES},
    )
    move = st.tuples(COUNTS | NAMES, NUMBERS, NUMBERS, NUMBERS).map(list)
    rest = st.fixed_dictionaries(
        {"steps": st.lists(one, max_size=2), "moves": st.lists(move, max_size=2)},
        optional={"loss": NUMBERS, "scale": NUMBERS, "time": NUMBERS},
    )
    return {"kind": "step", "step": draw(COUNTS), **draw(rest)}


TENSORS = st.builds(
    TensorSample,
    NAMES,
    NAMES,
    COUNTS,
    st.integers(-200, 200),
    st.lists(COUNTS, max_size=3).map(tuple),
    COUNTS,
    st.none() | COUNTS,
    COUNTS,
    COUNTS,
    st.sampled_from([1.0, 2.0, math.inf]),
)
SAMPLES = st.builds(
    Sample,
    COUNTS,
    NAMES,
    st.lists(TENSORS, max_size=2).map(tuple),
    st.none() | st.tuples(NAMES, NAMES, NUMBERS, NUMBERS),
    st.lists(st.tuples(NAMES, NAMES, NUMBERS), max_size=2).map(tuple),
)
FINDINGS = st.builds(
    Finding,
    st.sampled_from(sorted(KINDS)),
    NAMES,
    NAMES,
    NAMES,
    st.none() | COUNTS,
    st.none() | COUNTS,
)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, where NaN equals itself, and 1 is neither 1.0 nor True."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and bool(a == b)


def test_comparison_notices_differences() -> None:
    assert same({"a": [1, math.nan]}, {"a": [1, math.nan]})
    for other in ({"a": [1, 0.0]}, {"a": [1.0, math.nan]}, {"a": (1, math.nan)}, {"a": [1]}, {}):
        assert not same({"a": [1, math.nan]}, other)
    assert not same("NaN", math.nan)


@given(step_lines())
@settings(max_examples=30)
def test_step_is_read_as_it_was_written(line: dict[str, Any]) -> None:
    text = encode(line)
    assert text.count(b"\n") == 1
    assert text.endswith(b"\n")
    json.loads(text, parse_constant=pytest.fail)
    assert same(decode(text), line)


def test_names_that_spell_numbers_stay_names() -> None:
    names = ["NaN", "Infinity", "-Infinity"]
    steps = [{"applied": False, "culprits": [[name, 0, 1, 2]], "amax": math.inf} for name in names]
    moves = [[name, math.inf, 1.0, 0.0] for name in names]
    line = {"kind": "step", "step": 1, "steps": steps, "moves": moves, "loss": -math.inf}
    assert decode(encode(line)) == line


@given(SAMPLES, FINDINGS)
@settings(max_examples=60)
def test_sample_and_finding_are_read_as_they_were_written(sample: Sample, found: Finding) -> None:
    assert same(sample_of(decode(encode(sample_line(sample)))), sample)
    assert finding_of(decode(encode(finding_line(found)))) == found
    assert Finding.from_dict(found.as_dict()) == found


def test_defaults_of_tensors_are_left_out() -> None:
    tensor = TensorSample("w", "weight", 4, -3, (1, 2), 0, None, 0, 1)
    line = sample_line(Sample(3, "float16", (tensor,), None, ()))
    assert "scale" not in line["tensors"][0]
    assert sample_of(line).tensors == (tensor,)


def step(number: int, applied: bool = True, **more: Any) -> dict[str, Any]:
    one = {"optimizer": 0, "applied": applied}
    return {"kind": "step", "step": number, "scale": 8.0, "steps": [one], "moves": [], **more}


def write(folder: Path, *lines: dict[str, Any], rank: int = 0, **settings: Any) -> None:
    log = RunLog(folder, rank, **settings)
    for line in lines:
        log.write(line)
    log.close()


def test_ranks_are_merged(tmp_path: Path) -> None:
    common = Finding.of("stuck", "50 steps.", step=9)
    for rank in (1, 0, 10):
        own = Finding.of("underflow", "Much.", f"layer.{rank}", step=rank)
        lines = [step(1), step(2), finding_line(common), finding_line(own)]
        write(tmp_path, {**HEADER, "rank": rank}, *lines, rank=rank)
    run = read(tmp_path)
    assert run.ranks == [0, 1, 10]
    assert [(line["step"], line["rank"]) for line in run.steps] == [
        (number, rank) for number in (1, 2) for rank in (0, 1, 10)
    ]
    found = [(finding.kind, finding.where, finding.rank) for finding in run.findings]
    assert found == [
        ("underflow", "layer.0", 0),
        ("underflow", "layer.1", 1),
        ("stuck", "", None),
        ("underflow", "layer.10", 10),
    ]
    assert [header["rank"] for header in run.headers] == [0, 1, 10]
    one = read(tmp_path / "rank-10.jsonl")
    assert one.ranks == [10]
    assert one.findings[0].rank is None


def test_continued_run_has_every_step_once(tmp_path: Path) -> None:
    event = {"kind": "event", "name": "skip", "scale": 1.0, "loss_id": 0}
    write(tmp_path, HEADER, *map(step, (1, 2, 3, 4)), {**event, "step": 4})
    write(tmp_path, {**HEADER, "settings": {"lr": 2}}, step(3, loss=7.0), step(3), step(5))
    run = read(tmp_path)
    assert [line["step"] for line in run.steps] == [1, 2, 3, 3, 5]
    assert run.steps[2]["loss"] == 7.0
    assert run.events == []
    assert run.settings == {"lr": 2}
    assert len(run.headers) == 2


def test_unknown_lines_are_ignored_and_a_later_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, HEADER, {"kind": "novelty", "x": 1}, step(1))
    run = read(tmp_path)
    assert (len(run.steps), run.skipped_lines) == (1, 0)
    write(tmp_path, {**HEADER, "version": 2})
    with pytest.raises(StateError, match="version 2"):
        read(tmp_path)


def test_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="has no run log"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "x\0",
        '{"step": 1}',
        '{"kind":"step"}',
        '{"kind":"step","loss":NaN}',
        '{"kind":"step","step":[]}',
        '{"kind":"event","step":"x"}',
        '{"kind":"step","step":3,"moves":[1]}',
        '{"kind":"event","step":null}',
        '{"kind":"sample","step":1}',
        '{"kind":"finding","finding":{}}',
        '{"kind":"run"}',
    ],
)
def test_unreadable_line_is_skipped_and_counted(tmp_path: Path, text: str) -> None:
    write(tmp_path, HEADER, step(1))
    with (tmp_path / "rank-0.jsonl").open("a") as stream:
        stream.write(text + "\n" + encode(step(2)).decode())
    with pytest.warns(UserWarning, match=r"^Lines of the run log .* are skipped: 1\."):
        run = read(tmp_path)
    assert [line["step"] for line in run.steps] == [1, 2]
    assert run.skipped_lines == 1
