"""Runs the Python blocks of a page of the documentation. Needs no framework.

The blocks of a page share one namespace, in order, as a reader would type them. What a page needs
but should not show (a model, a batch) goes into an HTML comment that starts with `<!-- python` and
ends with `-->`, each on a line of its own; it runs at its place among the blocks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

BLOCK = re.compile(
    r"^```python\n(?P<shown>.*?)^```$|^<!-- python\n(?P<hidden>.*?)^-->$", re.MULTILINE | re.DOTALL
)
# Anything that a reader would take for a Python block, however it is spelled or indented.
LOOKS_LIKE_PYTHON = re.compile(r"^[ \t>]*(```+|~~~+)[ \t{.]*py", re.MULTILINE | re.IGNORECASE)


class Block(NamedTuple):
    """The text of a code block, the line of the page it starts on, and whether readers see it."""

    code: str
    line: int
    shown: bool


def blocks(page: str) -> list[Block]:
    """The Python blocks of a page, in order."""
    found = []
    for match in BLOCK.finditer(page):
        kind = match.lastgroup or ""
        line = page.count("\n", 0, match.start(kind)) + 1
        found.append(Block(match[kind], line, kind == "shown"))
    return found


def run_page(path: Path, whole_graphs: bool = True) -> int:
    """Run the blocks of a page; the number of shown blocks. A fault raises, at the page's line.

    Args:
        path: The page.
        whole_graphs: Whether blocks may ask torch.compile for a graph without breaks.

    Raises:
        ValueError: the page has a Python block that the runner would pass over.
    """
    page = path.read_text(encoding="utf-8")
    found = blocks(page)
    num_shown = sum(block.shown for block in found)
    num_wanted = len(LOOKS_LIKE_PYTHON.findall(page))
    if num_shown != num_wanted:
        raise ValueError(
            f"{path.name} has {num_wanted} Python blocks, of which {num_shown} can be run: "
            "open a block with ```python and close it with ```, both at the start of a line."
        )
    # A module that can be imported: the compiler of torch 2.6 imports that of a compiled function.
    page_module = sys.modules[path.name] = ModuleType(path.name)
    for block in found:
        # The blank lines make a traceback name the line of the page.
        padded, name = "\n" * (block.line - 1) + block.code, str(path)
        whole = "fullgraph=True, "
        if whole in padded and not whole_graphs:
            padded, name = padded.replace(whole, ""), f"<{path.name}>"
            # Dynamo looks for the Python code of a graph break in the file, which is not Python.
        exec(compile(padded, name, "exec", dont_inherit=True), vars(page_module))
    return num_shown
