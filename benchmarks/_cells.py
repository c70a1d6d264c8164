"""One rank of the matrix: trains cell after cell, and tells what it saw of each.

    python _cells.py RANK WORLD FOLDER

Nothing is judged here. A rank tells what became of its own parameters and its own scale, in a file
of its own, because ranks that disagree may not be able to talk to one another any more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: else gloo may abort at the end
from _sharing import (
    BATCH,
    OPTIMIZERS,
    SETUPS,
    WIDTH,
    Setup,
    optimizer_for,
    scaler_for,
    scalers_for,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

FAULTS = ("none", "inf", "nan", "no gradient")
WAYS = ("step()", "unscale_(), step()")
STEPS, BAD = 5, 3
"""How many steps are trained, and which of them is spoilt: one comes after it."""
INIT_SCALE, GROWTH_INTERVAL = 2.0**8, 3


class Cell(NamedTuple):
    """One of the cases."""

    scaler: str
    setup: str
    optimizer: str
    fault: str
    way: str


class Told(NamedTuple):
    """What one rank saw."""

    error: str = ""
    """The type and the first line of an error."""
    moved: tuple[str, ...] = ()
    """Whether "all", "some" or "none" of its parameters moved, in each step."""
    scales: tuple[float, ...] = ()
    """After each step."""
    as_without: bool = False
    """Whether its parameters are what they are without a scaler, less the bad step."""


def cells() -> list[Cell]:
    """All of them; those of one setup and scaler after one another."""
    return [
        Cell(scaler, setup, optimizer, fault, way)
        for setup in SETUPS
        for scaler in scalers_for(setup)
        for optimizer in OPTIMIZERS
        for fault in FAULTS
        for way in WAYS
    ]


def train(cell: Cell, mesh: Any) -> Told:
    """Trains with the scaler, and without."""
    setup = SETUPS[cell.setup](mesh)
    optimizer = optimizer_for(setup, cell.optimizer)
    settings = {"init_scale": INIT_SCALE, "growth_interval": GROWTH_INTERVAL}
    scaler = scaler_for(setup, cell.scaler, **settings)
    moved, scales = [], []
    for step in range(STEPS):
        setup.backward(scaler.scale, setup.mine(batch(step)))
        before = local(setup)
        if step == BAD:
            spoil(setup, cell.fault)
        if cell.way != "step()":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = {not torch.equal(a, b) for a, b in zip(before, local(setup), strict=True)}
        moved.append("some" if len(changed) > 1 else "all" if True in changed else "none")
        scales.append(float(scaler.get_scale()))
    plain = without(cell, mesh)
    same = all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(local(setup), local(plain), strict=True)
    )
    return Told("", tuple(moved), tuple(scales), same)


def without(cell: Cell, mesh: Any) -> Setup:
    """What it is trained to without a scaler, by a loop that knows which step is bad."""
    setup = SETUPS[cell.setup](mesh)
    optimizer = optimizer_for(setup, cell.optimizer)
    for step in range(STEPS):
        setup.backward(lambda loss: loss, setup.mine(batch(step)))
        if step == BAD and cell.fault == "no gradient":
            spoil(setup, cell.fault)
        if step != BAD or cell.fault not in ("inf", "nan"):
            optimizer.step()
        optimizer.zero_grad()
    return setup


def batch(step: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def local(setup: Setup) -> list[Tensor]:
    """Copies of what this rank holds of the parameters, less those of which it holds nothing."""
    parts = [_part(param.detach()) for param in setup.flat()]
    return [part.clone() for part in parts if part.numel()]


def _part(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def spoil(setup: Setup, fault: str) -> None:
    """Plants a fault in the gradients of the last rank."""
    if dist.get_rank() < dist.get_world_size() - 1 or fault == "none":
        return
    params = setup.flat()
    if fault == "no gradient":
        for param in params:
            param.grad = None
        return
    grads = [_part(p.grad) for p in params[setup.struck :] if p.grad is not None]
    next(grad for grad in grads if grad.numel()).view(-1)[0] = float(fault)


def tell(path: Path, told: Told) -> None:
    """Leaves a file, all at once."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(told))
    draft.rename(path)


def heard(path: Path) -> Told | None:
    """What a rank has told, if it has."""
    if not path.exists():
        return None
    error, moved, scales, as_without = json.loads(path.read_text())
    return Told(error, tuple(moved), tuple(scales), as_without)


def main(rank: int, world: int, folder: Path) -> None:
    """Trains the cells that lie in the folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (world,))
    tell(folder / f"ready-{rank}", Told())
    for place, values in enumerate(json.loads((folder / "cells.json").read_text())):
        try:
            told = train(Cell(*values), mesh)
            dist.barrier()  # else a cell might be taken for the one after it
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            tell(folder / f"{place}-{rank}", Told(f"{type(error).__name__}: {line[:100]}"))
            time.sleep(3600)  # the other one must not see it go
        tell(folder / f"{place}-{rank}", told)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
