"""The page in a browser: nothing fails, no host is asked, no name is run, and it opens at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import browser
import run_logs
from gradscale.report import compare, comparison_page, report_page, summarise
from gradscale.runlog import read

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browser.path_of_chromium() is None, reason="needs Chromium"),
]

OPEN_WITHIN = 3.0
"""Seconds in which a page must have drawn."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running.page()


def made(folder: Path, **settings: Any) -> Path:
    """The page of a made-up run."""
    run = read(run_logs.write_run(folder / "run", **settings))
    path = folder / "report.html"
    path.write_text(report_page(run, summarise(run, "run")), encoding="utf-8")
    return path


def both(folder: Path) -> Path:
    """The page of two runs."""
    first = read(run_logs.write_run(folder / "first", 300))
    second = read(run_logs.write_run(folder / "second", 200, samples=0, seed=2, findings=False))
    path = folder / "both.html"
    found = compare(first, second, ("first", "second"))
    path.write_text(comparison_page(first, second, found), encoding="utf-8")
    return path


OVERFLOWING = """
[...document.querySelectorAll("svg text")].filter(node => {
  const box = node.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  return node.textContent && (box.left < -1 || box.right > width + 1);
}).map(node => node.textContent)
"""

OVERLAPPING = """
(() => {
  const clashes = [];
  for (const svg of document.querySelectorAll("svg")) {
    const all = [...svg.querySelectorAll("text")].filter(node => node.textContent.trim())
      .map(node => [node.textContent, node.getBoundingClientRect()]);
    all.forEach(([a, p], i) => all.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 4) clashes.push([a, b]);
    }));
  }
  return clashes;
})()
"""

CONTRAST = """
(() => {
  const number = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (color) => number(color).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!color.endsWith(", 0)")) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const poor = [];
  for (const node of document.querySelectorAll("main *")) {
    const texts = [...node.childNodes].filter(child => child.nodeType === 3);
    if (!texts.some(child => child.textContent.trim()) || node.disabled) continue;
    const style = getComputedStyle(node);
    const inside = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(inside), light(behind(node.closest("svg") ? node.closest("div") : node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push([node.textContent.slice(0, 40), inside, ratio]);
  }
  return poor;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("which", ["run", "tiny", "no-samples", "long-names", "both"])
def test_the_page_draws_in_every_size_and_theme(
    page: browser.Page, tmp_path: Path, which: str, width: int, dark: bool
) -> None:
    long = "module.base_model.model." + "x" * 90
    settings: dict[str, dict[str, Any]] = {
        "run": {"steps": 600},
        "tiny": {"steps": 1, "samples": 0, "findings": False, "loss": False},
        "no-samples": {"steps": 50, "samples": 0},
        "long-names": {"steps": 200, "blocks": 2, "rename": lambda name: long + name},
    }
    path = both(tmp_path) if which == "both" else made(tmp_path, **settings[which])
    page.open(path, width=width, dark=dark)
    assert page.errors == []
    assert page.requests == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(OVERLAPPING) == []
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.querySelectorAll('path.curve').length") >= 1
    dimmed = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert dimmed == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")


def test_the_checks_of_the_page_can_fail(page: browser.Page, tmp_path: Path) -> None:
    page.open(made(tmp_path, steps=50))
    page.evaluate(
        "for (const x of [-400, -390]) { const text = document.querySelector('svg text')"
        ".cloneNode(true); text.setAttribute('x', x); text.textContent = 'planted ' + x;"
        "text.style.fill = 'rgb(250, 250, 250)'; document.querySelector('svg').append(text); }"
    )
    for check in (OVERFLOWING, OVERLAPPING, CONTRAST):
        page.evaluate("window.scrollTo(0, 0)")
        assert "planted" in str(page.evaluate(check)), check
    page.evaluate("fetch('http://192.0.2.1/').catch(() => 0)")
    assert any("Content Security Policy" in error for error in page.errors)


def test_hostile_names_run_nothing(page: browser.Page, tmp_path: Path) -> None:
    planted = [
        run_logs.HOSTILE,
        run_logs.HOSTILE[9:],
        "javascript:document.title='owned'",
        "%%DATA%%",
    ]
    run = run_logs.named_run(*planted)
    path = tmp_path / "page.html"
    path.write_text(report_page(run, summarise(run, planted[0])), encoding="utf-8")
    page.open(path)
    page.evaluate("document.querySelectorAll('button, summary').forEach(node => node.click())")
    assert page.errors == []
    assert page.evaluate("document.title") == f"Run {planted[0]}"
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert planted[0] in page.evaluate("document.querySelector('h1').textContent")
    # And the policy stops what would get through all the same.
    page.evaluate(
        "document.querySelector('main').innerHTML = '<img src=x onerror=\"document.title=1\">'"
    )
    page.evaluate("new Promise(r => setTimeout(r, 100))")
    assert page.evaluate("document.title") == f"Run {planted[0]}"


def test_a_log_of_100_000_steps_opens_in_three_seconds(page: browser.Page, tmp_path: Path) -> None:
    path = made(tmp_path, steps=100_000, samples=12, blocks=12)
    seconds = min(page.open(path) for _ in range(3))
    assert seconds < OPEN_WITHIN
    assert page.errors == []
    assert "A curve on this page has at most" in page.evaluate(
        "document.querySelector('footer').textContent"
    )


def test_a_chart_and_the_heatmap_are_read_by_keyboard(page: browser.Page, tmp_path: Path) -> None:
    page.open(made(tmp_path, steps=300))
    charts = page.evaluate("document.querySelectorAll('.figure[tabindex=\"0\"]').length")
    assert charts == 5  # scale, headroom, heatmap, underflow, loss
    page.evaluate("document.querySelectorAll('.figure')[0].focus()")
    for key in ("Home", "ArrowLeft", "ArrowLeft"):
        page.press(key)
    said = "document.querySelector('section[aria-labelledby=scale] .readout').textContent"
    assert page.evaluate(said).startswith("step ")
    first = page.evaluate(said)
    page.press("ArrowLeft")
    assert page.evaluate(said) != first
    page.evaluate("document.querySelectorAll('.figure')[2].focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.press(key)
    told = page.evaluate(
        "document.querySelector('section[aria-labelledby=layers] .readout').textContent"
    )
    assert told.startswith("transformer.h.0.ln_1.weight: ")
    assert "of the values are from" in told


def click(page: browser.Page, text: str) -> None:
    """Clicks the first button with this text in it."""
    buttons = "[...document.querySelectorAll('button')]"
    page.evaluate(f"{buttons}.find(b => b.textContent.includes('{text}')).click()")


def test_the_slider_and_the_buttons_change_what_is_shown(
    page: browser.Page, tmp_path: Path
) -> None:
    page.open(made(tmp_path, steps=300, samples=3))
    where = "document.querySelector('section[aria-labelledby=layers] .controls span').textContent"
    assert page.evaluate(where) == "step 300 (sample 3 of 3)"
    click(page, "earlier")
    assert page.evaluate(where) == "step 150 (sample 2 of 3)"
    page.evaluate("document.querySelector('input[type=range]').focus()")
    page.evaluate(
        "(() => { const s = document.querySelector('input[type=range]'); s.value = '0';"
        " s.dispatchEvent(new Event('input')); })()"
    )
    assert page.evaluate(where) == "step 1 (sample 1 of 3)"
    pressed = "[...document.querySelectorAll('button[aria-pressed=true]')].map(b => b.textContent)"
    assert page.evaluate(pressed) == ["gradients of weights"]
    click(page, "activations")
    assert page.evaluate(pressed) == ["activations"]
    heading = "document.querySelector('section[aria-labelledby=layers] .figure').ariaLabel"
    assert page.evaluate(heading).startswith("activations at step 1,")


def test_everything_that_can_be_operated_has_a_name(page: browser.Page, tmp_path: Path) -> None:
    page.open(both(tmp_path))
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    nodes = [
        node
        for node in tree
        if {"name": "focusable", "value": {"type": "booleanOrUndefined", "value": True}}
        in node.get("properties", [])
    ]
    assert len(nodes) > 8
    assert [node for node in nodes if not node.get("name", {}).get("value")] == []
