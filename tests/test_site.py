"""The documentation site: it builds without a warning, and needs no network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_site_has_every_page(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50
    assert [page for page in pages if not (site / page.with_suffix(".html")).exists()] == []


def test_site_has_every_example(site: Path) -> None:
    names = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert [name for name in names if not (site / "examples" / f"{name}.html").exists()] == []


PUBLIC = [
    "gradscale",
    "gradscale.torch",
    "gradscale.torch.optim",
    "gradscale.torch.blocks",
    "gradscale.torch.checkpoint",
    "gradscale.jax",
    "gradscale.keras",
    "gradscale.runlog",
    "gradscale.monitor",
]
EXCEPTIONS = ("CallOrderError", "SettingError", "StateError", "StuckError")
"""Each has a section of reference/errors.md."""


def public_names() -> dict[str, set[str]]:
    """Every public name, as it is read from the sources, with all names of the same object."""
    griffe = pytest.importorskip("griffe")
    package: Any = griffe.load("gradscale", search_paths=[ROOT], resolve_aliases=True)
    same: dict[str, set[str]] = {}
    origin: dict[str, str] = {}
    for module in PUBLIC:
        names = package[module.removeprefix("gradscale").lstrip(".")] if "." in module else package
        for name in names.exports:
            path = f"{module}.{name}"
            origin[path] = names[str(name)].canonical_path
            same.setdefault(origin[path], {origin[path]}).add(path)
    return {path: same[target] for path, target in origin.items()}


def test_site_has_every_public_name(site: Path) -> None:
    anchors = set()
    for page in (site / "reference").glob("*.html"):
        anchors |= set(re.findall(r'<h\d id="([^"]+)"', page.read_text(encoding="utf-8")))
    anchors |= {f"gradscale.{name}" for name in EXCEPTIONS if name.lower() in anchors}
    names = public_names()
    assert len(names) > 80
    assert [path for path, same in names.items() if not same & anchors] == []


def test_no_power_of_two_is_bold(site: Path) -> None:
    # Markdown takes the asterisks of two powers in a sentence, 2**-14 and 2**64, for bold text.
    bold = re.compile(r"\d<strong>")
    pages = sorted(site.rglob("*.html"))
    assert [page.name for page in pages if bold.search(page.read_text(encoding="utf-8"))] == []
    assert bold.search("from 2<strong>-14 to 2</strong>64")


def test_site_fetches_nothing(site: Path) -> None:
    fetched = re.compile(r"""<(?:script|img|iframe|link)\s[^>]*(?:src|href)=["']?(?:https?:)?//""")
    pages = sorted(site.rglob("*.html"))
    assert [page.name for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
    assert fetched.search('<script defer src="https://example.org/a.js"></script>')
