"""Draws all pictures from the recorded rows: `make pictures`."""

from __future__ import annotations

import importlib

from style import HERE, save

SCRIPTS = sorted(
    path.stem for path in HERE.glob("*.py") if "\nNAME = " in path.read_text(encoding="utf-8")
)

if __name__ == "__main__":
    for script in SCRIPTS:
        module = importlib.import_module(script)
        save(module.NAME, module.draw)
        print(f"docs/images/{module.NAME}.svg")
