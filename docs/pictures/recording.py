"""What several scripts need to record rows: trainings of the demo's network, on the CPU."""

from __future__ import annotations

import datetime
import platform

import torch

import gradscale


def versions() -> str:
    """Machine, versions and date, for the comment of a recorded file."""
    return (
        f"{platform.machine()} CPU, one thread, Python {platform.python_version()}, "
        f"torch {torch.__version__}, gradscale {gradscale.__version__}, "
        f"{datetime.date.today().isoformat()}"
    )
