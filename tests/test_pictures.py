"""The pictures of the documentation are what their scripts draw from the recorded rows."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
IMAGES = ROOT / "docs" / "images"
SCRIPTS = sorted(
    path.stem for path in PICTURES.glob("*.py") if "\nNAME = " in path.read_text(encoding="utf-8")
)
PINNED = f"matplotlib=={matplotlib.__version__}" in (ROOT / "constraints-dev.txt").read_text()


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """The scripts import each other, as they do when they are started."""
    sys.path.insert(0, str(PICTURES))
    yield
    sys.path.remove(str(PICTURES))


def figure(script: Any) -> Any:
    """What a script draws for a light background."""
    style = importlib.import_module("style")
    with style.settings():
        return script.draw(style.LIGHT)


def drawn(script: Any) -> dict[str, Any]:
    """The parts of a picture that have a name."""
    parts = figure(script).findobj(lambda part: part.get_gid() is not None)
    return {part.get_gid(): part for part in parts}


def bars(script: Any) -> dict[str, list[Any]]:
    """The bars of a picture, by the name of their group, from the left and from the top."""
    groups: dict[str, list[Any]] = {}
    for axes in figure(script).findobj(matplotlib.axes.Axes):
        for container in axes.containers:
            groups[container.patches[0].get_gid()] = container.patches
    return groups


@pytest.mark.parametrize("name", SCRIPTS)
def test_picture_is_committed_for_both_backgrounds(name: str, tmp_path: Path) -> None:
    script, style = importlib.import_module(name), importlib.import_module("style")
    style.save(script.NAME, script.draw, tmp_path)
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == [f"{script.NAME}-dark.svg", f"{script.NAME}.svg"]
    for path in made:
        committed = (IMAGES / path.name).read_text(encoding="utf-8")
        assert len(committed) < 150_000
        assert not re.search(r"<dc:date>|<image|DejaVu", committed)
        if PINNED:  # other versions place text elsewhere
            assert path.read_text(encoding="utf-8") == committed, "run `make pictures`"


def test_nan_batches_are_the_recorded_rows() -> None:
    script = importlib.import_module("nan_batches")
    rows, parts = script.read(script.ROWS), drawn(script)
    for run in ("torch", "gradscale"):
        loss = parts[f"{run}-loss"].get_ydata()
        assert loss[-1] == pytest.approx(sum(row[f"{run}_loss"] for row in rows[-13:]) / 13)
        assert list(parts[f"{run}-scale"].get_ydata()) == [row[f"{run}_log2_scale"] for row in rows]
        skips = [row["step"] for row in rows if not row[f"{run}_applied"]]
        assert list(parts[f"{run}-skips"].get_xdata()) == skips
        assert skips == list(range(script.FIRST, script.LAST))


def test_histogram_is_the_recorded_rows() -> None:
    script = importlib.import_module("gradient_histogram")
    rows = {row["binade"]: row for row in script.read(script.ROWS)}
    total = sum(row["float32"] for row in rows.values())
    groups = bars(script)
    page = (ROOT / "docs" / "explain" / "loss-scaling.md").read_text(encoding="utf-8")
    for name in ("float16", "scaled"):
        assert all(f"{100 * share:.1f} %" in page for share in script.shares(name))
        assert sum(row[name] for row in rows.values()) == total
        (zero,) = groups[f"{name}-zero"]
        assert zero.get_height() == pytest.approx(100 * rows[script.ZERO][name] / total)
        shown = {
            bar.get_x() + bar.get_width() / 2 - 0.5: bar.get_height()
            for first in (script.SUBNORMAL, script.NORMAL)
            for bar in groups[f"{name}-{first}"]
        }
        for binade, height in shown.items():
            assert height == pytest.approx(100 * rows[round(binade)][name] / total)
        assert sum(shown.values()) + zero.get_height() == pytest.approx(100)
        assert sum(script.shares(name)) == pytest.approx(1)


def test_ranges_are_those_of_the_formats() -> None:
    torch = pytest.importorskip("torch")
    script = importlib.import_module("format_ranges")
    groups = bars(script)
    for name in ("float32", "bfloat16", "float16"):
        facts = torch.finfo(getattr(torch, name))
        (normal,), (subnormal,) = groups[name], groups[f"{name}-subnormal"]
        assert normal.get_x() == math.log2(facts.smallest_normal)
        assert normal.get_x() + normal.get_width() == pytest.approx(math.log2(facts.max))
        assert subnormal.get_x() == math.log2(facts.smallest_normal * facts.eps)


def test_trajectories_are_those_of_the_policies() -> None:
    np = pytest.importorskip("numpy")
    from gradscale.simulate.histories import History
    from gradscale.simulate.walk import walk

    script = importlib.import_module("scale_trajectories")
    rows, parts = script.read(script.ROWS), drawn(script)
    amax = np.array([[row["weights"]] for row in rows])
    above = np.array([[max(row["outputs"] - row["weights"], 0.0)] for row in rows])
    history = History(amax, above, np.ones_like(amax, dtype=bool))
    for name, policy in script.POLICIES.items():
        report = walk(policy, history)
        assert list(parts[name].get_ydata()) == list(report.scales[:, 0])
        assert len(parts[f"{name}-skips"].get_xdata()) == report.skipped[0]


def test_speed_is_the_recorded_rows() -> None:
    script = importlib.import_module("step_speed")
    groups = bars(script)
    page = (ROOT / "docs" / "measurements" / "speed.md").read_text(encoding="utf-8")
    for model, times in script.step_times().items():
        for case in script.CASES:
            (bar,) = groups[f"{model}-{case}"]
            assert bar.get_width() == times[case] / times["torch"]
        for case in ("torch", "ours"):
            assert script.rounded(times[case]) in page
    for row in script.loops():
        for name in script.LOOPS:
            (bar,) = groups[f"{row['model']}-{name}"]
            assert bar.get_width() == float(row[name])
            assert f" {row[name]} |" in page
        assert f"{row['ms']} ({row['ms_least']} to {row['ms_most']})" in page


def test_pages_show_only_pictures_that_exist() -> None:
    """And none of them is named without being there, in either form."""
    for page in (ROOT / "docs").rglob("*.md"):
        for shown in re.findall(r"!\[[^]]*\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8")):
            path = page.parent / shown
            assert path.exists(), f"{page.name}: {shown}"
            assert path.with_name(f"{path.stem}-dark.svg").exists(), f"{page.name}: {shown}"
