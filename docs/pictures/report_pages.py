"""The pictures of reports in docs/how-to/report.md, taken of made-up logs in Chromium.

Run it with `PYTHONPATH=tests/support python docs/pictures/report_pages.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

import run_logs
from browser import Page, chromium
from gradscale.report import compare, comparison_page, report_page, summarise
from gradscale.runlog import read
from style import HERE

COLOURS = 256
TOP = "0"
HEATMAP = "document.getElementById('layers').getBoundingClientRect().top + scrollY - 8"


def take(page: Page, path: Path, name: str, place: str, width: int, height: int) -> None:
    """Takes a picture of a page, from `place` (an expression) down; dark where it is narrow."""
    page.open(path, width=width, dark=width < 600)
    image = HERE.parent / "images" / f"report-{name}.png"
    clip = {"x": 0, "y": page.evaluate(place), "width": width, "height": height}
    page.screenshot(image, clip=clip)
    Image.open(image).quantize(COLOURS).save(image, optimize=True)


def main() -> None:
    """Takes all pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = read(run_logs.write_run(folder / "first"))
        second = read(
            run_logs.write_run(folder / "second", 900, scale=2.0**12, seed=1, findings=False)
        )
        alone, both = folder / "report.html", folder / "both.html"
        alone.write_text(report_page(first, summarise(first, "first")), encoding="utf-8")
        found = compare(first, second, ("first", "second"))
        both.write_text(comparison_page(first, second, found), encoding="utf-8")
        with chromium(folder / "profile") as browser:
            page = browser.page()
            take(page, alone, "findings", TOP, 1120, 1360)
            take(page, both, "compare", TOP, 1120, 1640)
            take(page, alone, "heatmap", HEATMAP, 1120, 740)
            take(page, alone, "phone", HEATMAP, 390, 1180)


if __name__ == "__main__":
    main()
