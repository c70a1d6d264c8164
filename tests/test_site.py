"""The documentation site: it builds without a warning, and needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50
    assert [page for page in pages if not (site / page.with_suffix(".html")).exists()] == []


def test_site_has_every_example(site: Path) -> None:
    names = [path.stem for path in (ROOT / "examples").glob("*.py")]
    assert [name for name in names if not (site / "examples" / f"{name}.html").exists()] == []


def test_site_fetches_nothing(site: Path) -> None:
    fetched = re.compile(r"""<(?:script|img|iframe|link)\s[^>]*(?:src|href)=["']?(?:https?:)?//""")
    pages = sorted(site.rglob("*.html"))
    assert [page.name for page in pages if fetched.search(page.read_text(encoding="utf-8"))] == []
    assert fetched.search('<script defer src="https://example.org/a.js"></script>')
