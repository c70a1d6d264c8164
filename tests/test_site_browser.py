"""The site in a real browser: opened from disk, searched, in light and dark, wide and narrow."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, Page, chromium, path_of_chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(path_of_chromium() is None, reason="needs Chromium"),
]

QUESTIONS = {
    "Attempting to unscale FP16 gradients": "troubleshooting",
    "No inf checks were recorded": "troubleshooting",
    "loss is nan": "troubleshooting",
    "Current loss scale already at minimum": "troubleshooting",
    "clip gradients": "how-to/clip",
    "gradient clipping": "how-to/clip",
    "accumulate gradients": "how-to/accumulate",
    "LBFGS": "how-to/closures",
    "gradient penalty": "how-to/gradient-penalties",
    "EMA": "how-to/schedulers",
    "FSDP2": "how-to/fsdp2",
    "resume from a checkpoint": "how-to/resume",
    "choose a policy": "how-to/choose-a-policy",
    "custom policy": "how-to/write-a-policy",
    "custom optimizer": "how-to/write-an-optimizer",
    "step skipped": "explain/loss-scaling",
    "nan gradients": "troubleshooting",
    "StuckError": "reference/errors",
    "LoRA": "how-to/lora",
    "Apex": "move/apex",
    "initial scale": "how-to/choose-a-policy",
    "wandb": "how-to/log",
    "validation": "how-to/choose-a-mode",
    "export weights": "how-to/resume",
    "V100": "how-to/old-gpus",
    "DataParallel": "move/apex",
}
"""What people search for, and a page that must be among the first three that are found."""
PAGES = ["index", "tutorial", "how-to/clip", "troubleshooting"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def searching(browser: Browser, site: Path) -> Page:
    """A page of the site whose search is open."""
    page = browser.page()
    page.open(site / "start.html")
    page.evaluate("document.querySelector('#__search').click()")
    return page


def found(page: Page, question: str) -> list[str]:
    """The pages that the search lists, best first, without the suffix."""
    query = json.dumps(question)
    page.evaluate(
        "{const field = document.querySelector('[data-md-component=search-query]');"
        f"field.value = {query};"
        "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));}"
    )
    address = "a => new URL(a.href).pathname + new URL(a.href).search"
    links = f"[...document.querySelectorAll('.md-search-result__item > a')].map({address})"
    marks = "[...document.querySelectorAll('.md-search-result__item > a')].map(a => a.href)"
    last: list[str] = []
    end = time.monotonic() + 20
    while time.monotonic() < end:
        time.sleep(0.3)
        now = page.evaluate(marks)
        said = page.evaluate("document.querySelector('.md-search-result__meta').textContent")
        if now == last and (now or "No matching" in said):
            break
        last = now
    root = page.evaluate("new URL('.', location.href).pathname")
    return [link.removeprefix(root).split(".html")[0] for link in page.evaluate(links)]


@pytest.mark.parametrize("question", QUESTIONS)
def test_question_is_answered_by_one_search(searching: Page, question: str) -> None:
    assert QUESTIONS[question] in found(searching, question)[:3]


def test_word_that_is_nowhere_finds_nothing(searching: Page) -> None:
    assert found(searching, "xylophone") == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("name", PAGES)
def test_page_opens_from_disk_and_fits(
    browser: Browser, site: Path, name: str, width: int, dark: bool
) -> None:
    page = browser.page()
    page.open(site / f"{name}.html", width=width, dark=dark)
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    scheme = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
    assert scheme == ("slate" if dark else "default")
    shown = "[...document.querySelectorAll('article img')].filter(i => i.offsetParent !== null)"
    assert page.evaluate(f"{shown}.every(i => i.naturalWidth > 0)")
