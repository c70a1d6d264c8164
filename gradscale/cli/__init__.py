"""The command line. This module needs the standard library alone, to say what else is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs `gradscale`; where typer or rich is missing, says so in one line and exits with 1."""
    try:
        from gradscale.cli.commands import app
    except ModuleNotFoundError as error:
        name = (error.name or "gradscale").split(".")[0]
        if name == "gradscale":
            raise  # a fault of ours, not a missing package
        sys.exit(f'The command line needs {name}: pip install "gradscale[cli]".')
    app()
