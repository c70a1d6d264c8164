"""The page: one file that asks nobody for anything, and in which nothing from a log is code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("typer")

from typer.testing import CliRunner

import run_logs
from gradscale.cli.commands import app
from gradscale.report import compare, comparison_page, page, report_page, summarise
from gradscale.runlog import Run, read


class Elements(HTMLParser):
    """The elements of a page, as a browser finds them, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style") and data.strip():
            self.inside.append((self.found[-1][0], data))


def data_of(text: str) -> dict[str, Any]:
    """The data in a page."""
    (block,) = re.findall('<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return dict(json.loads(block))


def complaints(text: str) -> list[str]:
    """What is wrong with the elements of a page."""
    elements = Elements(text)
    tags = [tag for tag, _ in elements.found]
    found = [] if tags.count("script") == 2 else [f"{tags.count('script')} scripts"]
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "noscript",
        "code",
        "main",
        "script",
    }
    found += [tag for tag in tags if tag not in allowed]
    for _, attributes in elements.found:
        found += [name for name in attributes if name in ("src", "href") or name.startswith("on")]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_logs.write_run(tmp_path_factory.mktemp("run") / "first", 300)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read(folder)


@pytest.fixture(scope="module")
def text(run: Run) -> str:
    return report_page(run, summarise(run, "first"))


def test_the_page_has_one_script_and_asks_nobody(text: str) -> None:
    assert complaints(text) == []
    assert "http://www.w3.org/2000/svg" in text  # the name of a format, not an address
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert complaints(text + '<img src="x">') != []
    assert complaints(text.replace("<main", "<script>1</script><main")) != []


def test_the_policy_of_the_page_names_its_own_script_and_style_and_no_more(text: str) -> None:
    elements = Elements(text)
    (policy,) = (a["content"] for _, a in elements.found if "content-security" in str(a).lower())
    inside = dict(elements.inside)  # the last script is the code
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        digest = base64.b64encode(hashlib.sha256(inside[tag].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in str(policy)
    assert str(policy).startswith("default-src 'none'; ")
    assert "unsafe" not in str(policy)


hostile = st.sampled_from(
    [
        run_logs.HOSTILE,
        "<!--<script>",
        "]]></script >",
        "%%SCRIPT%%",
        "\u2028\u2029\x00",
        "</title><svg onload=alert(1)>",
        "' onmouseover='alert(1)",
    ]
) | st.text(max_size=20)


@settings(max_examples=25)
@given(names=st.lists(hostile, min_size=4, max_size=4))
def test_no_name_in_a_log_becomes_code(names: list[str]) -> None:
    run = run_logs.named_run(*names)
    text = report_page(run, summarise(run, names[0]))
    assert complaints(text) == []
    data = data_of(text)
    assert data["title"] == f"Run {names[0]}"
    assert data["findings"][0]["findings"][0]["where"] == names[1]
    (row,) = data["runs"][0]["samples"][0]["kinds"]["weight_grad"]["rows"]
    assert row["name"] == names[2]
    assert [names[3], names[3]] in data["runs"][0]["settings"]
    second = comparison_page(run, run, compare(run, run, (names[0], names[1])))
    assert complaints(second) == []


def test_the_page_of_a_long_run_is_thin_and_says_so(tmp_path: Path) -> None:
    lines = [
        {"kind": "step", "step": i, "rank": 0, "scale": 2.0**16, "loss": 1.0 / i, "steps": []}
        for i in range(1, 40_001)
    ]
    bad = {"applied": False, "scale": 4.0, "verdict": "scale too high", "culprits": []}
    for line in lines[::10]:
        line["steps"] = [bad]
    run = Run({}, [0], lines, [], [], [], 0, [])
    text = report_page(run, summarise(run, "long"))
    assert len(text) < 600_000
    (found,) = data_of(text)["runs"]
    assert found["lines"] == 40_000
    assert len(found["curves"]["loss"]) <= 2000
    assert (found["skipped"], len(found["skips"])) == (4000, page.SKIPS)
    assert (found["skips"][0][0], found["skips"][-1][0]) == (1, 39_991)


def test_long_texts_are_cut_and_numbers_that_json_lacks_are_text() -> None:
    made = json.loads(page.embedded({"a": "x" * 9999, "b": float("nan"), "c": [float("-inf")]}))
    assert (len(made["a"]), made["b"], made["c"]) == (page.TEXT, "nan", ["-inf"])


# The command line.


def invoke(*args: Any) -> Any:
    return CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, [str(a) for a in args])


def test_report_prints_findings_first_and_writes_the_page(folder: Path) -> None:
    done = invoke("report", folder)
    assert done.exit_code == 0, done.output
    places = [
        done.output.index(text)
        for text in (
            "Small gradients are lost",
            "What to do: Raise the scale",
            "headroom  ",
            "Page: ",
        )
    ]
    assert places == sorted(places)
    assert complaints((folder / "report.html").read_text()) == []


def test_report_as_json_writes_a_page_only_if_asked(folder: Path, tmp_path: Path) -> None:
    (folder / "report.html").unlink(missing_ok=True)
    found = json.loads(invoke("report", folder / "rank-0.jsonl", "--json").stdout)
    assert (found["steps"], found["name"]) == (300, "rank-0")
    assert [finding["kind"] for finding in found["findings"]] == ["skips-too-often", "underflow"]
    assert found["underflow_by_layer"][0]["lost"] > 0
    assert list(folder.iterdir()) == [folder / "rank-0.jsonl"]
    invoke("report", folder, "--json", "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()


def test_a_name_with_markup_is_printed_as_it_is(tmp_path: Path) -> None:
    run_logs.write_run(tmp_path / "[bold]run", 40, samples=1, rename=lambda name: f"[red]{name}")
    done = invoke("report", tmp_path / "[bold]run")
    assert "[red]transformer.h.0.ln_1.weight" in done.output
    assert "Run [bold]run" in done.output


def test_a_name_gives_a_terminal_no_orders(tmp_path: Path) -> None:
    orders = "\x1b]0;title\x07\x1b[2J\x9b1m\ud800"
    for name in ("first", "second"):
        run_logs.write_run(
            tmp_path / name, 40, samples=1, rename=lambda layer: f"{orders}{layer}{orders}"
        )
    first, second = tmp_path / "first", tmp_path / "second"
    for arguments in (["report", first], ["compare", first, second, "--html", tmp_path / "page"]):
        done = invoke(*arguments)
        assert done.exit_code == 0, done.exception
        assert "transformer.h.0.ln_1.weight" in done.output
        assert not any(sign in done.output for sign in "\x1b\x07\x9b")


def test_what_is_no_log_is_one_line(tmp_path: Path) -> None:
    done = invoke("report", tmp_path)
    assert done.exit_code == 1
    assert "has no run log" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    run_logs.write_run(tmp_path / "run", 5, samples=0)
    with (tmp_path / "run" / "rank-0.jsonl").open("a") as file:
        file.write('{"kind": "st')
    done = invoke("report", tmp_path / "run")
    assert done.stderr.startswith("Warning: ")
    assert len(done.stderr.splitlines()) == 1
    assert "Lines that could not be read: 1." in done.stdout


def test_compare_prints_both_and_writes_a_page(folder: Path, tmp_path: Path) -> None:
    run_logs.write_run(tmp_path / "second", 200, findings=False, seed=3)
    done = invoke("compare", folder, tmp_path / "second", "--html", tmp_path / "both.html")
    assert done.exit_code == 0, done.output
    for text in ("Only in first", "skipped steps", "median scale", "loss at step 200"):
        assert text in done.output
    data = data_of((tmp_path / "both.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    found = json.loads(invoke("compare", folder, tmp_path / "second", "--json").stdout)
    assert found["common_step"] == 200
