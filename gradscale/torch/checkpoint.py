"""Checkpoints that a crash cannot spoil: the old one or the new one, never half of it."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gradscale.errors import caller_level
from gradscale.torch.scaler import GradScaler
from gradscale.torch.step.snapshot import random_state, set_random_state

__all__ = ["load", "load_sharded", "random_state", "save", "set_random_state"]


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


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Loads what `torch.distributed.checkpoint.save` wrote, for any number of ranks, into `state`.

        load_sharded({"model": weights, "optimizer": states, "scaler": scaler}, "run")

    A scaler of which the checkpoint has nothing, because it was written without one, stays as it
    is, with a warning; anything else that is missing is an error, as in torch.
    """
    # Takes long to import.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_parts

    # Where every value is in the nested dictionaries that were saved.
    places: Any = FileSystemReader(path).read_metadata().planner_data
    there = {place[0] for place in places.values()}
    scalers = [key for key in state if isinstance(state[key], GradScaler)]
    for key in scalers:
        if key in there:
            continue
        warnings.warn(
            f"The checkpoint {os.fspath(path)!r} has no state of a scaler under {key!r}, so its "
            f"scale begins anew. It has {', '.join(sorted(there)) or 'nothing'}.",
            stacklevel=caller_level(),
        )
    rest = {key: value for key, value in state.items() if key not in scalers}
    # By what was saved, and not by what a new scaler has: it knows no losses with a scale yet.
    saved = {key: _blank(key, places.values()) for key in scalers if key in there}
    load_parts({**rest, **saved}, checkpoint_id=path)
    for key, value in saved.items():
        state[key].load_state_dict(value)


def _blank(key: str, places: Iterable[Any]) -> dict[str, Any]:
    """What was saved under `key`, by where every value of it is, with nothing in its place."""
    found: dict[Any, Any] = {}
    for first, *rest in places:
        inner = found
        for name in rest[:-1] if first == key else ():
            inner = inner.setdefault(name, {})
        if first == key:
            inner[rest[-1]] = None
    return {name: _with_lists(value) for name, value in found.items()}


def _with_lists(value: Any) -> Any:
    """`value`, with lists for the dictionaries in it that are numbered."""
    if not isinstance(value, dict):
        return value
    inner = {name: _with_lists(each) for name, each in value.items()}
    return [inner[n] for n in sorted(inner)] if all(isinstance(n, int) for n in inner) else inner


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
