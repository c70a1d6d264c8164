"""Checkpoints that a crash cannot spoil: the old one or the new one, never half of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradscale.torch.moment import random_state, set_random_state

__all__ = ["load", "random_state", "save", "set_random_state"]


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Writes `state` to `path`, whole or not at all.

        save("run.pt", {"mp": mp.state_dict(), "random": random_state(), "step": step})

    It is written beside `path`, brought to the disk, and put in the place of the old file at once;
    so there is a good one at any time, also while the machine is losing its power.
    """
    target = Path(path)
    _clean_up(target)
    part = target.with_name(f".{target.name}.{platform.node()}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """What `save` wrote to `path`; plain values and tensors alone are read."""
    state: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
    return state


def _clean_up(target: Path) -> None:
    """Deletes what processes that are no more have left of `target`, on this machine."""
    for part in target.parent.glob(f".{target.name}.{platform.node()}.*.part"):
        number = part.suffixes[-2][1:]
        if number.isdigit() and not _is_alive(int(number)):
            part.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether there is a process of this number, as far as that can be asked."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Brings the names in `folder` to the disk, where that can be asked for."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
