"""What the site has besides the pages: the examples, and pictures for dark backgrounds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)")
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)]+)\.svg\)")


def on_files(files: Files, config: Any) -> Files:
    """The files of the site, with a page for every example and the changelog."""
    for path in sorted(ROOT.glob("examples/*.py")):
        content = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, with links to the pages of examples and both forms of a picture."""
    folder = os.path.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        return f"]({os.path.relpath(f'examples/{found[1]}.md', folder or '.')})"

    def both(found: re.Match[str]) -> str:
        text, path = found.groups()
        if not (ROOT / "docs" / folder / f"{path}-dark.svg").exists():
            return found[0]
        return f"![{text}]({path}.svg#only-light)\n![{text}]({path}-dark.svg#only-dark)"

    return PICTURE.sub(both, EXAMPLE.sub(link, markdown))
