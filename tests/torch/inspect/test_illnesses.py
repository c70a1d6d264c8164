"""Planted illnesses are found in the right module, and healthy runs have no findings."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import _diagnosis  # noqa: E402
import _healthy_runs  # noqa: E402
import illnesses  # noqa: E402
from _diagnosis import Case, Verdict  # noqa: E402
from illnesses import HEALTHY, ILL, judge, table  # noqa: E402

from gradscale.monitor.findings import KINDS, Finding  # noqa: E402
from gradscale.torch import Inspector  # noqa: E402

QUICK = (
    "a logarithm of zero",
    "zero_grad() forgotten",
    "clipping before unscaling",
    "Adam's eps in float16",
    "bfloat16 weights and small steps",
    "MLP, torch's loop",
    "GAN, one update, the critic's pass goes through the generator",
    "an expert that gets tokens in every fourth step",
    "stochastic depth",
    "distillation of a fixed network",
    "masked scores, and a scale that begins too high",
    "bfloat16 weights, learning rate 0 at first",
)
"""Those that `make test` runs: about a second each."""
ALL = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.soak)
    for case in (*ILL, *HEALTHY)
]


@pytest.mark.parametrize("case", ALL)
def test_run_has_the_finding_that_was_planted(case: Case) -> None:
    verdict = judge(case)
    assert verdict.right(), verdict.findings


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy_runs_have_no_finding_whatever_the_seed(
    case: Case, every: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_healthy_runs, _diagnosis):
        monkeypatch.setattr(module, "Inspector", lambda *args, **_: Inspector(*args, every=every))
    torch.manual_seed(seed)
    assert case.train() == []


def test_every_kind_of_finding_from_samples_is_planted() -> None:
    assert len(ILL) >= 20
    planted = {case.kind for case in ILL}
    records = {"scale-too-low", "stuck", "skips-too-often"}  # tests/monitor/test_record_findings.py
    assert planted | records >= set(KINDS)


def test_a_wrong_finding_is_noticed() -> None:
    case = Case("x", "underflow", "a", list)
    found = Finding.of("underflow", "Evidence.", "b")
    assert not Verdict(case, []).right()
    assert not Verdict(case, [found]).right()
    assert Verdict(case._replace(where="b"), [found]).right()
    assert not Verdict(case._replace(kind="", where=""), [found]).right()


def test_the_page_has_a_line_for_every_run() -> None:
    page = Path(illnesses.PAGE).read_text(encoding="utf-8")
    for line in table([Verdict(case, []) for case in (*ILL, *HEALTHY)])[2:]:
        assert line.split(" | ")[0] in page
    for case in ILL:
        assert f"| {case.name} | {case.kind} |" in page
