"""Simulated runs: what they amount to, exactly where that can be said, and how fast they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner, Result

import gradscale as gs
from gradscale.cli.commands import app
from gradscale.errors import SettingError
from gradscale.simulate import KINDS, History, made_up, recorded, walk
from gradscale.simulate.compare import compare, parse
from gradscale.simulate.walk import above


def invoke(*args: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, args)


def history(amax: list[float], **more: list[Any]) -> History:
    """One run, a number for every step."""
    sizes = np.array(amax)[:, None]
    extra = np.array(more.get("above", [0.0] * len(amax)))[:, None]
    losses = np.array(more.get("loss_finite", [True] * len(amax)))[:, None]
    return History(sizes, extra, losses)


def test_a_walk_by_hand() -> None:
    # 16 + -1 is below 16, which is what float16 cannot hold; 16 + 0.5 is not.
    sizes = [-1.0, 0.5, -1.0, -1.0, 3.0, 0.0]
    report = walk(gs.Dynamic(growth_interval=3), history(sizes, loss_finite=[True] * 5 + [False]))
    assert report.scales[:, 0].tolist() == [16, 16, 15, 15, 15, 14]
    assert report.skipped.tolist() == [2]
    assert report.moves.tolist() == [2]
    assert report.scale.tolist() == [2.0**14]


def test_what_reaches_above_the_weights_overflows_first() -> None:
    assert walk(gs.Dynamic(), history([-1.0] * 3, above=[0.0, 0.5, 1.5])).skipped.tolist() == [1]


@pytest.mark.parametrize("policy", [gs.Dynamic(), gs.Headroom(), gs.LogMax(), gs.Histogram()])
def test_many_runs_are_as_each_alone(policy: Any) -> None:
    together = made_up("heavy", 60, 5)
    report = walk(policy, together)
    for run in range(5):
        alone = walk(policy, History(*(part[:, run : run + 1] for part in together)))
        assert (alone.scales[:, 0] == report.scales[:, run]).all()
        assert math.isclose(alone.underflow[0], report.underflow[run], rel_tol=1e-12)  # a sum


def test_shares_are_those_of_the_distribution() -> None:
    # A sample of it, the largest of which is expected at log2 = 10.
    rng = np.random.default_rng(0)
    middle = 10.0 + 1.2 * math.log(1e-7)
    sample = rng.logistic(middle, 1.2, 1_000_000)
    for edge in (middle - 2, middle, middle + 3):
        share = above(np.array(10.0), edge)
        # Five deviations of a binomial share.
        bound = 5 * math.sqrt(share * (1 - share) / 1_000_000)
        assert abs((sample > edge).mean() - share) < bound


def test_settled_is_the_first_step_from_which_on_the_scale_is_good() -> None:
    # The best scale for a largest gradient of 2**-1.5 is 2**17, as 2**17.5 overflows.
    sizes = [-1.5] * 40
    assert walk(gs.Static(init_scale=2.0**15), history(sizes)).settled.tolist() == [0]
    assert walk(gs.Static(init_scale=2.0**14), history(sizes)).settled.tolist() == [40]
    rising = gs.Dynamic(init_scale=2.0**13, growth_interval=10)
    assert walk(rising, history(sizes)).settled.tolist() == [20]


def test_below_counts_binades_up_to_a_static_scale_that_skips_as_few() -> None:
    # 2**17 fits the first four, 2**14 all: with one skipped step the best is 2**17.
    sizes = [-1.5] * 4 + [1.5]
    for scale, below in ((2.0**14, 0.0), (2.0**12, 2.0), (2.0**17, 0.0), (2.0**16, 1.0)):
        report = walk(gs.Static(init_scale=scale), history(sizes))
        assert report.skipped.tolist() == [scale > 2.0**14]
        assert report.below.tolist() == [below]


def test_lognormal_history_has_what_its_settings_say() -> None:
    amax = made_up("lognormal(2.0, drift=10, spikes=0.1, height=30)", 2000, 20).amax
    spikes = amax > 12
    # Five deviations of a mean of 40,000 samples, and of a share.
    assert abs(spikes.mean() - 0.1) < 5 * math.sqrt(0.09 / amax.size)
    usual = np.where(spikes, amax - 30, amax)
    assert abs(usual.mean() - (-8 + 5)) < 5 * 2.0 / math.sqrt(amax.size)
    assert abs((usual - np.linspace(0, 10, 2000)[:, None]).std() - 2.0) < 0.05
    assert abs(made_up("lognormal", 2000, 20).amax.std() - 1.5) < 0.05


@pytest.mark.parametrize(
    "kind", ["lognormal(x)", "lognormal(1, 2, 3, 4, 5)", "lognormal(size=1)", "steady(2)", "1 +"]
)
def test_what_is_no_history_is_refused(kind: str) -> None:
    with pytest.raises(SettingError, match="history must be a file or one of"):
        made_up(kind, 10, 1)


LOGNORMAL = [
    *(f"lognormal({deviation})" for deviation in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)),
    *(f"lognormal({deviation}, drift={drift})" for deviation in (1.0, 2.0) for drift in (-10, 10)),
    *(f"lognormal(0.5, spikes=0.02, height={height})" for height in (4, 8, 12)),
    "lognormal(1.5, spikes=0.02, height=8)",
    "lognormal(0.5, spikes=0.002, height=8)",
]


@pytest.mark.parametrize(
    ("histories", "runs"),
    [
        (["lognormal(1.5)", "lognormal(3.0)", "lognormal(0.5, spikes=0.02, height=8)"], 60),
        pytest.param(LOGNORMAL, 300, marks=pytest.mark.soak),  # docs/explain/policies.md
    ],
)
def test_headroom_skips_one_step_in_a_thousand_near_the_best_static_scale(
    histories: list[str], runs: int
) -> None:
    rows = compare(histories, ["Headroom()"], 4000, runs, 0)
    assert all(row.skipped * 1000 <= 1 for row in rows), rows
    assert all(row.below <= 3 for row in rows), rows


def test_neither_a_high_scale_nor_a_margin_of_five_does_so() -> None:
    high, wide = compare(
        ["lognormal(1.0)"], ["Static(2097152.0)", "Headroom(margin=5)"], 2000, 20, 0
    )
    assert high.skipped * 1000 > 1
    assert wide.below > 3


@pytest.mark.parametrize("kind", KINDS)
def test_histories_come_again_with_their_seed(kind: str) -> None:
    assert all(map(np.array_equal, made_up(kind, 90, 3, seed=1), made_up(kind, 90, 3, seed=1)))
    assert not np.array_equal(made_up(kind, 90, 3, seed=1).amax, made_up(kind, 90, 3, seed=2).amax)


def test_a_recorded_history_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("amax,scale,loss_finite\n8,4,1\ninf,4,1\n0,4,1\nnan,4,0\n", encoding="utf-8")
    found = recorded(path)
    assert found.amax[:, 0].tolist() == [1.0, 15.0, -math.inf, 15.0]
    assert found.loss_finite[:, 0].tolist() == [True, True, True, False]
    assert walk(gs.Static(init_scale=4.0), found).skipped.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("amax\n1\n", "row 1 is"),
        ("amax,scale\n1,x\n", "row 1 is"),
        ("amax,scale\n1,0\n", "scale must be > 0"),
        ("amax,scale\n", "has no steps"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match=complaint):
        recorded(path)


def test_scale_of_static_needs_no_name_in_a_command() -> None:
    assert parse("Static(8.0)") == parse("Static(init_scale=8.0)") == gs.Static(8.0)


@pytest.mark.parametrize(
    "text", ["", "Headroom(3)", "Nobody()", "Headroom(margin=x)", "Headroom(**a)", "f()()", "1 +"]
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="policy must be one of"):
        parse(text)


def test_settings_are_checked_by_the_policy() -> None:
    assert parse("Dynamic") == gs.Dynamic()
    assert parse("Headroom(format='bfloat16')") == gs.Headroom(format="bfloat16")
    with pytest.raises(SettingError, match="margin must"):
        parse("Headroom(margin=0)")


def test_every_policy_makes_a_million_steps_in_a_second() -> None:
    # The limit is for one core that does nothing else: the fastest of three, and half as many.
    for text in ("Static(init_scale=8.0)", "Dynamic()", "Headroom()", "LogMax()", "Histogram()"):
        speeds = [compare(["steady"], [text], 50, 10_000, 0)[0].steps_per_second for _ in range(3)]
        assert max(speeds) > 5e5, text


def test_the_command_prints_a_table() -> None:
    result = invoke("simulate", "spikes", "--steps", "200", "--runs", "20", columns=120)
    assert result.exit_code == 0, result.output
    for name in ("Dynamic()", "Headroom()", "LogMax()", "Histogram()"):
        assert name in result.output


def test_no_number_is_cut_off_in_a_terminal_of_80_columns() -> None:
    args = ("lognormal(2.0, drift=10)", "--steps", "200", "--runs", "20")
    result = invoke("simulate", *args, "--policy", "Headroom(margin=1)", columns=80)
    assert result.exit_code == 0, result.output
    assert "\N{HORIZONTAL ELLIPSIS}" not in result.output
    (numbers,) = [line for line in result.output.splitlines() if " %" in line]
    assert len(numbers) == 80
    assert numbers.count("\N{BOX DRAWINGS LIGHT VERTICAL}") == 10


def test_the_command_tells_the_same_as_json(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("amax,scale\n8,4\n9,4\n", encoding="utf-8")
    result = invoke("simulate", str(path), "--policy", "Headroom(margin=3)", "--json")
    (row,) = json.loads(result.output)
    assert (row["history"], row["policy"]) == (str(path), "Headroom(margin=3)")
    assert (row["skipped"], row["log2_scale"]) == (0, 8.0)  # a raise by one binade has to wait


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["nothing"], "history must be a file or one of"),
        (["steady", "--steps", "0"], "steps must be >= 1, got 0."),
        (["steady", "--policy", "Static()"], "policy must be one of"),
    ],
)
def test_bad_argument_is_named(args: list[str], complaint: str) -> None:
    result = invoke("simulate", *args, columns=200)
    assert result.exit_code == 1
    assert complaint in result.output
