"""Verdicts: the first that is true, in a fixed order; messages that name what to look at."""

from __future__ import annotations

from typing import Any

import pytest

from gradscale.formats import BFLOAT16, FLOAT16
from gradscale.monitor import EXPLANATIONS, replay_message, stuck_message, verdict

BAD: dict[str, Any] = {"applied": False, "finite": False, "scale": 1024.0}
NAN = {"bad_counts": [(0, 2)], "finite_amax": 1.0, "format": FLOAT16}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"applied": True}, "applied"),
        ({"has_gradients": False}, "no gradients"),
        ({"loss_finite": False}, "loss not finite"),
        ({"scale": 1.0, "floor": 1.0}, "stuck at the floor"),
        ({"scale": 2.0, "floor": 1.0}, "scale too high"),
        (NAN, "NaN at any scale"),
        ({"finite": True}, "scale too low"),
        ({}, "scale too high"),
        # A loss with a scale of its own is at the floor, or another is and this one is not.
        ({"own_losses": [(True, 1.0), (False, 0.5)], "floor": 0.5}, "stuck at the floor"),
        ({"own_losses": [(False, 4.0)], "scale": 0.5, "floor": 0.5}, "scale too high"),
        ({"own_losses": [(True, 0.5)], "floor": 0.5}, "scale too high"),
        # NaN that an overflow may have left.
        ({**NAN, "bad_counts": [(0, 2), (1, 0)]}, "scale too high"),
        ({**NAN, "bad_counts": [(None, None)]}, "scale too high"),
        ({**NAN, "bad_counts": [(3, 0)]}, "scale too high"),
        ({**NAN, "bad_counts": []}, "scale too high"),
        ({**NAN, "finite_amax": 0.0}, "scale too high"),
        ({**NAN, "finite_amax": None}, "scale too high"),
        ({**NAN, "format": None}, "scale too high"),
        # Ten binades below the ceiling are enough, and not less.
        ({**NAN, "finite_amax": FLOAT16.max / 1024}, "NaN at any scale"),
        ({**NAN, "finite_amax": FLOAT16.max / 1023}, "scale too high"),
        ({**NAN, "finite_amax": FLOAT16.max, "format": BFLOAT16}, "NaN at any scale"),
        # After twenty skips uncounted infinities no longer clear NaN, counted ones do.
        ({"bad_counts": [(None, None)], "skipped_in_a_row": 19}, "scale too high"),
        ({"bad_counts": [(None, None)], "skipped_in_a_row": 20}, "NaN at any scale"),
        ({"bad_counts": [(1, 1)], "skipped_in_a_row": 20}, "scale too high"),
        ({"bad_counts": [(1, 0)], "skipped_in_a_row": 20}, "scale too high"),
    ],
)
def test_verdict_follows_from_the_facts(facts: dict[str, Any], expected: str) -> None:
    assert verdict(**{**BAD, **facts}) == expected


def test_first_verdict_that_is_true_counts() -> None:
    everything: dict[str, Any] = {
        "applied": True, "finite": False, "has_gradients": False, "loss_finite": False,
        "scale": 1.0, "floor": 1.0, **NAN,
    }  # fmt: skip
    cures: list[dict[str, Any]] = [
        {"applied": False}, {"has_gradients": True}, {"loss_finite": True}, {"floor": 0.0},
        {"bad_counts": [], "finite": True}, {"finite": False},
    ]  # fmt: skip
    found = [verdict(**everything)]
    for cure in cures:
        everything |= cure
        found.append(verdict(**everything))
    assert found == list(EXPLANATIONS)


@pytest.mark.parametrize("reason", EXPLANATIONS)
def test_message_has_the_count_the_scale_the_verdict_and_its_meaning(reason: str) -> None:
    said = stuck_message(50, 2.0**-14, reason)
    assert said.startswith(f"50 steps in a row were skipped, the last at scale {2.0**-14:g} (")
    assert f"({reason}): {EXPLANATIONS[reason]}." in said
    assert "stuck_after and on_stuck" in said
    assert "Gradients that are not finite" not in said


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (["w"], "not finite: w."),
        (["a", "b", "c"], "not finite: a; b; c."),
        (["a", "b", "c", "d", "e"], "not finite: a; b; c and 2 more."),
    ],
)
def test_message_names_three_parameters_at_most(parameters: list[str], named: str) -> None:
    assert named in stuck_message(3, 8.0, "scale too high", parameters)


def test_message_about_replays_says_how_to_learn_more() -> None:
    said = replay_message(7, 4.0, losses_finite=True)
    assert said.startswith("7 steps in a row were skipped in a CUDA graph, and the scale is now 4.")
    assert "outside of the graph" in said
    assert "loss" not in said
    assert EXPLANATIONS["loss not finite"] in replay_message(7, 4.0, losses_finite=False)
