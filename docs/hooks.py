"""What the site has besides the pages in this folder.

The README is its home page, every example is a page, and a picture that has a form for dark
backgrounds is shown in the one that suits the colours of the reader.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "index.md"} | {
    f"{name}.md": f"{name.lower()}.md"
    for name in ("CHANGELOG", "CONTRIBUTING", "ROADMAP", "SECURITY")
}
"""Pages of the repository's root, and what they are called in the site."""
ROOT_LINK = re.compile(r'(\]\(|srcset="|src=")(docs/|(?:[A-Z]+)\.md)')
EXAMPLE_LINK = re.compile(r"\]\((?:\.\./)*examples/(\w+)\.py\)")
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)]+)\.svg\)")
PICTURES = re.compile(
    r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*<img alt="([^"]+)" src="([^"]+)">'
)

BEHIND = "---\nsearch:\n  boost: 0.5\n---\n\n"
"""Puts a page behind the guides in the results of a search."""


def root_page(name: str) -> str:
    """The text of a page in the root, with links that are right in the site."""
    text = (ROOT / name).read_text(encoding="utf-8")

    def link(found: re.Match[str]) -> str:
        return found[1] + ROOT_PAGES.get(found[2], "")

    text = ROOT_LINK.sub(link, text)
    text = PICTURES.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)\n<picture hidden>", text)
    return f"---\nhide: [navigation]\n---\n\n{text}" if name == "README.md" else text


def examples() -> dict[str, str]:
    """The page of every example, by its path, and one that lists them."""
    pages, rows = {}, []
    for path in sorted(ROOT.glob("examples/*.py")):
        code = path.read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(code)) or "").splitlines()[0]
        pages[f"examples/{path.stem}.md"] = f"{BEHIND}# {path.name}\n\n```python\n{code}```\n"
        rows.append(f"| [{path.name}]({path.stem}.md) | {first} |")
    table = "\n".join(["| program | what it shows |", "|---|---|", *rows])
    text = "Complete programs to copy from. The tests run each of them.\n\n"
    return {"examples/index.md": f"# Examples\n\n{text}{table}\n"} | pages


def on_files(files: Files, config: Any) -> Files:
    """The files of the site, with those that are made here."""
    made = examples() | {target: root_page(name) for name, target in ROOT_PAGES.items()}
    for path, content in made.items():
        file = File.generated(config, path, content=content)
        if path.startswith("examples/") and not path.endswith("index.md"):
            file.inclusion = InclusionLevel.NOT_IN_NAV  # found by the list of examples
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, with links to the pages of examples and both forms of a picture."""
    if page.file.src_uri.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 0.5})  # behind the guides, as the examples are
    folder = os.path.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        return f"]({os.path.relpath(f'examples/{found[1]}.md', folder or '.')})"

    def both(found: re.Match[str]) -> str:
        text, path = found.groups()
        if not (ROOT / "docs" / folder / f"{path}-dark.svg").exists():
            return found[0]
        return f"![{text}]({path}.svg#only-light)\n![{text}]({path}-dark.svg#only-dark)"

    return PICTURE.sub(both, EXAMPLE_LINK.sub(link, markdown))
