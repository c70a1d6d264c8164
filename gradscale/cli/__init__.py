"""The command line. This module uses the standard library only, to report what is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradscale.cli.launch import Script


def main() -> None:
    """Runs `gradscale`; exits with 1 and a one-line message if typer or rich is missing."""
    try:
        from gradscale.cli.commands import app
    except ModuleNotFoundError as error:
        name = (error.name or "gradscale").split(".")[0]
        if name == "gradscale":
            raise  # a bug of ours, not a missing package
        sys.exit(f'The command line needs {name}: pip install "gradscale[cli]".')
    scripts: list[Script] = []
    hook = sys.excepthook
    try:
        app(obj=scripts)
    except SystemExit as done:
        if done.code or not scripts:
            raise
    if scripts:
        sys.excepthook = hook  # typer has set its own
        scripts[0].start()
