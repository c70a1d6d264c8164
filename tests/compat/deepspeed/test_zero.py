"""Training with DeepSpeed's ZeRO engine on the CPU, with our scaler in it."""

from __future__ import annotations

import math
from typing import Any

import pytest

import gradscale as gs
from deepspeed_runs import OVERFLOWS, RULE, STEPS, results
from gradscale.policy import GradStats

pytest.importorskip("deepspeed")

Seen = list[dict[str, Any]]
STAGES = ["1", "2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a single rank saw in every scenario."""
    return results(1, tmp_path_factory.mktemp("alone"))[0]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each of two ranks saw."""
    return results(2, tmp_path_factory.mktemp("together"))


@pytest.fixture(params=["one rank", "two ranks"])
def seen(request: pytest.FixtureRequest) -> Seen:
    """What every rank saw, of one and of two."""
    if request.param == "one rank":
        return [request.getfixturevalue("alone")]
    both: Seen = request.getfixturevalue("together")
    return both


def expected(policy: gs.Dynamic, finite: list[bool]) -> list[float]:
    """The scale after every step, by the plain rule."""
    state, scales = policy.init(), []
    for fine in finite:
        state = policy.update(state, GradStats(finite=fine))
        scales.append(state.scale)
    return scales


@pytest.mark.parametrize("stage", [*STAGES, "3"])
def test_scale_follows_the_rule_step_by_step_on_every_rank(seen: Seen, stage: str) -> None:
    finite = [number not in OVERFLOWS for number in range(STEPS)]
    after = expected(RULE, finite)
    assert len(set(after)) > 2  # it grew and was lowered
    for rank in seen:
        steps = rank["rule"][stage]["seen"]
        assert [not step["overflow"] for step in steps] == finite
        assert [step["next"] for step in steps] == after
        # The loss of a step has the scale that the step before it left.
        assert [step["scales"] for step in steps] == [[s] for s in [RULE.init_scale, *after[:-1]]]
        assert rank["rule"][stage]["skipped"] == len(OVERFLOWS)


@pytest.mark.parametrize("stage", [*STAGES, "3"])
def test_engine_learns(seen: Seen, stage: str) -> None:
    losses = [step["loss"] for step in seen[0]["rule"][stage]["seen"]]
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("stage", STAGES)
def test_growing_scale_changes_no_update(seen: Seen, stage: str) -> None:
    for rank in seen:
        weights = rank["growth"][stage]
        assert weights["moving"] == weights["constant"]
        # DeepSpeed's own scaler halves the gradients of the step on which it grows.
        pairs = zip(weights["theirs"], weights["constant"], strict=True)
        assert max(abs(a - b) for a, b in pairs) > 1e-2


@pytest.mark.parametrize("stage", STAGES)
def test_run_from_a_checkpoint_goes_on_to_the_bit(seen: Seen, stage: str) -> None:
    for rank in seen:
        resumed = rank["resumed"][stage]
        assert resumed["kind"].startswith("gradscale.")
        assert resumed["loaded"] == resumed["saved"]
        assert resumed["saved"]["gradscale"]["state"]["bad_steps"] == 3
        assert resumed["same"]
        assert resumed["same weights"]
        assert resumed["stuck"] == ["ignore", 7]


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_loads_into_our_grad_scaler_and_back(seen: Seen, stage: str) -> None:
    for rank in seen:
        resumed = rank["resumed"][stage]
        assert resumed["torch"] == resumed["saved"]
        assert resumed["back"] == resumed["saved"]
        assert [s["next"] for s in resumed["from there"]] == [s["next"] for s in resumed["after"]]


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_of_deepspeed_goes_on_as_it_would_have_there(seen: Seen, stage: str) -> None:
    for rank in seen:
        moved = rank["moved_over"][stage]
        for state in (moved["torch"], moved["taken"]):
            assert state["scale"] == 512.0
            assert (state["growth_interval"], state["_growth_tracker"]) == (3, 0)
            assert state["gradscale"]["settings"]["hysteresis"] == 2
        assert moved["ours"] == moved["theirs"]
        assert len(set(moved["ours"])) > 2


@pytest.mark.parametrize("stage", STAGES)
def test_scaler_of_deepspeed_takes_over_where_ours_stopped(seen: Seen, stage: str) -> None:
    for rank in seen:
        moved = rank["moved_over"][stage]
        assert moved["module"].startswith("deepspeed.")
        before, kept = moved["before"], moved["kept"]
        assert (before["scale"], before["_growth_tracker"]) == (2048.0, 1)
        assert (kept["scale"], kept["_growth_tracker"]) == (2048.0, 1)
        assert moved["walk"] == [2048.0, 4096.0, 4096.0, 4096.0]  # one of 3 steps was done


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_of_a_step_have_one_scale(alone: dict[str, Any], stage: str) -> None:
    steps = alone["accumulation"][stage]
    after = expected(RULE, [number != 5 for number in range(8)])
    assert [step["next"] for step in steps] == after
    assert [step["scales"] for step in steps] == [[s, s] for s in [RULE.init_scale, *after[:-1]]]


@pytest.mark.parametrize("stage", STAGES)
def test_loss_scaled_by_hand_has_the_same_scales(alone: dict[str, Any], stage: str) -> None:
    assert alone["manual"][stage] == [RULE.init_scale, *expected(RULE, [True] * 7)]


@pytest.mark.parametrize("stage", STAGES)
def test_constant_scale_stays_and_skips(alone: dict[str, Any], stage: str) -> None:
    constant = alone["constant"][stage]
    assert constant["ours"]
    assert [step["overflow"] for step in constant["seen"]] == [False, True, False]
    assert {step["next"] for step in constant["seen"]} == {96.0}
    assert constant["back"] == [96.0, False]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no ZeRO", "zero_optimization.stage to 1, 2 or 3"),
        ("bfloat16", "fp16.enabled to true"),
        ("measuring", "got Headroom()"),
        ("allowance", "hysteresis=2 with consecutive_hysteresis=False"),
        ("not ours", "on which attach() was called"),
    ],
)
def test_what_does_not_go_together_is_named(alone: dict[str, Any], case: str, words: str) -> None:
    assert words in alone["refusals"][case]
