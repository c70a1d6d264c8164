"""Checkpoints that are written whole: after a crash there is the old one or the new one."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradscale.errors import caller_level
from gradscale.torch.scaler import GradScaler
from gradscale.torch.step.snapshot import random_state, set_random_state

__all__ = ["load", "load_sharded", "random_state", "save", "set_random_state"]


def save(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Writes `state` to `path` atomically.

        save("run.pt", {"mp": mp.state_dict(), "random": random_state(), "step": step})

    It is written to a temporary file in the same folder, synced to the disk, and then replaces the
    old file, so a complete file exists at any time, also after a power failure.
    """
    target = Path(path)
    # Left by processes on this machine that are gone.
    for old in target.parent.glob(f".{target.name}.{platform.node()}.*.part"):
        number = old.suffixes[-2][1:]
        if number.isdigit() and not _is_alive(int(number)):
            old.unlink(missing_ok=True)
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
    if os.name == "posix":  # elsewhere a folder cannot be synced
        handle = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Returns what `save` wrote to `path`; reads only tensors and plain values."""
    return torch.load(path, map_location=map_location, weights_only=True)


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Loads into `state` what `torch.distributed.checkpoint.save` wrote, for any number of ranks.

        load_sharded({"model": weights, "optimizer": states, "scaler": scaler}, "run")

    A scaler that is not in the checkpoint keeps its state, with a warning; any other missing entry
    is an error, as in torch.
    """
    # Takes long to import.
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    # For every value, its keys in the nested dictionaries that were saved.
    places: Any = FileSystemReader(path).read_metadata().planner_data
    there = {place[0] for place in places.values()}
    scalers = [key for key in state if isinstance(state[key], GradScaler)]
    for key in scalers:
        if key in there:
            continue
        warnings.warn(
            f"The checkpoint {os.fspath(path)!r} has no state of a scaler under the key {key!r}, "
            f"so the scale is not restored. Its keys are {', '.join(sorted(there)) or 'nothing'}.",
            stacklevel=caller_level(),
        )
    rest = {key: value for key, value in state.items() if key not in scalers}
    # The structure that was saved: a new scaler has no losses with their own scales yet.
    flat = {name: None for name, place in places.items() if place[0] in scalers}
    saved: dict[str, Any] = unflatten_state_dict(flat, places)
    load_parts({**rest, **saved}, checkpoint_id=path)
    for key, value in saved.items():
        state[key].load_state_dict(value)


def _is_alive(process: int) -> bool:
    """Whether there is a process of this number; True where that cannot be found out."""
    try:
        if os.name == "posix":
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
