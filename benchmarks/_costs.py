"""One rank of the cost: what agreeing takes, and all that follows the backward pass.

    python _costs.py RANK WORLD FOLDER ROUNDS agreement RANKS...
    python _costs.py RANK WORLD FOLDER ROUNDS "after backward"

- *agreement*: the gather of our words, alone and with all that goes with it, against what torch's
  ShardedGradScaler does: it sums one word, asynchronously, and waits. For each number of RANKS, the
  first of all that there are; and the gather against that of the first number.
- *after backward*: for models of two sizes on FSDP1 and FSDP2, our `apply()`, the same without
  agreement, and our scaler in torch's loop, against torch's `step()`, `update()`, `zero_grad()`.

What is compared takes turns in the same processes, begins after a barrier, and has lasted as long
as on the slowest rank. A ratio is taken round by round: times on a shared CPU mean nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: else gloo may abort at the end
from _sharing import (
    ALONE,
    BATCH,
    OURS,
    WIDTH,
    fsdp1,
    fsdp2,
    net,
    optimizer_for,
    scaler_for,
    scalers_for,
)
from torch.distributed.device_mesh import init_device_mesh

from gradscale.torch.distributed.consensus import Report, all_reports
from gradscale.torch.distributed.groups import Groups

Call = Callable[[], object]
WARM_UP, BURST = 5, 10
"""Rounds that do not count, and how often something short is called in a round."""
WIDTHS = (WIDTH, 512)
"""Of the models: about 300 parameters, and a million."""
STEPPING = (("FSDP1", "foreach"), ("FSDP2", "foreach"), ("FSDP2", "fused"))
"""Not FSDP1 with a fused optimizer, which torch's scaler gets wrong."""


class Cost(NamedTuple):
    """One thing against another."""

    part: str
    case: str
    against: str
    ranks: int
    parameters: int
    rounds: int
    case_ms: float
    """The median over the rounds, of the slowest rank."""
    against_ms: float
    ratio: float
    """The median over the rounds."""
    lower: float
    """The quartiles of the ratio."""
    upper: float


class Work(NamedTuple):
    """Something to time, after something that is not."""

    call: Call
    group: Any
    """Who takes part. The others wait, which takes no time of a core."""
    before: Call = lambda: None
    times: int = 1


def by_turns(works: Sequence[Work], rounds: int) -> list[list[float]]:
    """Milliseconds of each round on the slowest rank, for each of the works."""
    taken: list[list[float]] = [[] for _ in works]
    places = list(range(len(works)))
    for round_ in range(WARM_UP + rounds):
        for place in places[:: 1 if round_ % 2 else -1]:  # nobody always comes first
            taken[place].append(_time(works[place]))
            dist.barrier()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, taken)
    return [
        [max(times) for times in zip(*(each[place] for each in everywhere), strict=True)][WARM_UP:]
        for place in places
    ]


def _time(work: Work) -> float:
    """Milliseconds of a call on this rank; 0 if it takes no part."""
    if dist.get_rank(work.group) < 0:
        return 0.0
    work.before()
    dist.barrier(work.group)
    start = time.perf_counter()
    for _ in range(work.times):
        work.call()
    return (time.perf_counter() - start) * 1e3 / work.times


def compare(names: tuple[str, str, str], sizes: tuple[int, int], *times: Sequence[float]) -> Cost:
    """The medians of two, and their ratio with its quartiles."""
    ratios = [a / b for a, b in zip(*times, strict=True)]
    lower, ratio, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    case, against = map(statistics.median, times)
    return Cost(*names, *sizes, len(ratios), case, against, ratio, lower, upper)


def agreeing(rounds: int, sizes: Sequence[int]) -> list[Cost]:
    """The gather, alone and with what goes with it, among so many ranks each."""
    groups = [dist.new_group(list(range(size))) for size in sizes]
    works = [
        Work(call, group, times=BURST)
        for size, group in zip(sizes, groups, strict=True)
        for call in _agreements(group, size)
    ]
    taken = by_turns(works, rounds)
    costs = []
    for place, size in enumerate(sizes):
        torchs, gather, whole = taken[3 * place : 3 * place + 3]
        for name, times in (("gather", gather), ("agreement", whole)):
            costs.append(compare(("agreement", name, "torch's sum"), (size, 0), times, torchs))
        names = ("agreement", "gather", f"gather of {sizes[0]}")
        costs.append(compare(names, (size, 0), gather, taken[1]))
    return costs


def _agreements(group: Any, size: int) -> tuple[Call, Call, Call]:
    """torch's, our gather, and all of ours."""
    found = torch.zeros(1)
    words = torch.zeros(len(Report._fields))
    gathered = torch.empty(size * len(words))
    report = words.unsqueeze(0)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    groups = Groups(group).among([]) if dist.get_rank(group) >= 0 else []

    def torchs() -> None:
        work: Any = dist.all_reduce(found, async_op=True, group=group)
        work.wait()

    return (
        torchs,
        lambda: gather(gathered, words, group=group),
        lambda: all_reports(report, groups),
    )


def stepping(rounds: int, name: str, kind: str, width: int) -> list[Cost]:
    """All that follows the backward pass."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def work(which: str, applies: bool) -> Work:
        setup = (fsdp1 if name == "FSDP1" else fsdp2)(mesh, width)
        optimizer, scaler = optimizer_for(setup, kind), scaler_for(setup, which)

        def loop() -> None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        call = (lambda: scaler.apply(optimizer)) if applies else loop
        return Work(call, dist.group.WORLD, lambda: setup.backward(scaler.scale, x))

    torchs = scalers_for(name)[0]
    ways = {"apply()": (OURS, True), "apply(), alone": (ALONE, True), "torch's loop": (OURS, False)}
    works = [work(torchs, False), *(work(*how) for how in ways.values())]
    theirs, *ours = by_turns(works, rounds)
    sizes = dist.get_world_size(), sum(param.numel() for param in net(width).parameters())
    return [
        compare(("after backward", f"{name}, {kind} AdamW, {way}", torchs), sizes, times, theirs)
        for way, times in zip(ways, ours, strict=True)
    ]


def main(rank: int, world: int, folder: Path, rounds: int, part: str, sizes: list[int]) -> None:
    """Times everything; the first rank leaves a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    if part == "agreement":
        costs = agreeing(rounds, sizes)
    else:
        cases = [(name, kind, width) for name, kind in STEPPING for width in WIDTHS]
        costs = [cost for case in cases for cost in stepping(rounds, *case)]
    if rank == 0:
        (folder / "costs.json").write_text(json.dumps(costs))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    _, this, size, where, count, what, *groups = sys.argv
    main(int(this), int(size), Path(where), int(count), what, [int(each) for each in groups])
