"""What ranks tell one another: a few words each, gathered and put together in a fixed order."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradscale.torch import kernels
from gradscale.torch.unscale import move, readable

if TYPE_CHECKING:
    from gradscale.torch.agree import Group

LARGE = 256
"""Ranks from which on a group gathers in two rounds, along the rows and columns of a square."""


class Report(NamedTuple):
    """What was found in gradients: by one rank, or by all of them together.

    float32 tensors, or plain numbers where the host knows them.
    """

    found: Any
    """1 if something is not finite, else 0."""
    unfit: Any
    """1 if something does not fit where it is stored, else 0."""
    bad_loss: Any
    """1 if a loss is not finite, else 0."""
    bad_penalty: Any
    """1 if a gradient that `grad()` handed out was not finite, else 0."""
    present: Any
    """1 if there is a gradient, or, of a loss with a scale of its own, if there is that loss."""
    common: Any
    """1 if there was a backward pass of a loss with the common scale, else 0."""
    amax: Any
    """The largest magnitude."""
    norm: Any
    """The 2-norm, of what counts as this rank's."""
    near: Any
    """How many elements are near the ceiling, where the policy wants to know."""
    elements: Any
    """Of how many."""
    mark: Any
    """A checksum of the scale and what goes with it."""
    rank: Any
    """The lowest rank that found something not finite; infinity if none did."""


Marks = list[tuple[Any, Tensor]]
"""Process groups, and the mark of each of their ranks."""


def settle(words: Tensor, groups: Sequence[Group]) -> tuple[Tensor, Marks]:
    """What all ranks found together, and the marks of the ranks of every group.

    `words` are those of this rank's reports: a row for its gradients, and one for each loss with a
    scale of its own; so is what comes back. One collective for each group, or two for a large one.
    """
    marks: Marks = []
    for process in _rounds(groups):
        rows = _gathered(words.reshape(-1), process).view(-1, *words.shape)
        marks.append((process, rows[:, 0, Report._fields.index("mark")]))
        # The same on all ranks to the bit, whichever path the rest of their step takes.
        fold = kernels.agreeing().fold if kernels.take(rows.device) else together
        words = fold(rows)
    return words, marks


def largest(values: Tensor, groups: Sequence[Group]) -> Tensor:
    """The largest of each of `values` on all ranks; a NaN is larger than anything."""
    for process in _rounds(groups):
        values = _gathered(values, process).amax(0)
    return values


def together(rows: Tensor) -> Tensor:
    """What the `rows` of all ranks (ranks, reports, words) say together."""
    if readable(rows):
        # By plain numbers, which twenty operations on twelve of them are slower than.
        reports = zip(*rows.tolist(), strict=True)
        words = [_put_together(list(starmap(Report, each))) for each in reports]
        return torch.tensor(words, dtype=torch.float32)
    columns = Report(*rows.unbind(2))
    norm, mark = columns.norm, columns.mark
    # By the largest, because squares may overflow where the root does not.
    top = torch.where(torch.isnan(norm), torch.inf, norm).amax(0)
    safe = torch.where((top > 0) & torch.isfinite(top), top, torch.ones_like(top))
    length = safe * (norm / safe).square().sum(0).sqrt()
    found = Report(*rows.amax(0).unbind(1))._replace(
        amax=torch.where(torch.isnan(columns.amax), torch.inf, columns.amax).amax(0),
        norm=torch.where(torch.isfinite(top), length, top),
        near=columns.near.sum(0),
        elements=columns.elements.sum(0),
        # Ranks that gather with one of these later must hear of a difference, too.
        mark=torch.where((mark == mark[0]).all(0), mark[0], -1.0),
        rank=columns.rank.amin(0),
    )
    return torch.stack(found, dim=1)


def _put_together(reports: list[Any]) -> Report:
    """The same, for one report of every rank, in plain numbers."""
    columns: Any = Report(*zip(*reports, strict=True))
    sizes, norms, marks = columns.amax, columns.norm, columns.mark
    flags = Report(*map(max, columns))
    return flags._replace(
        amax=math.inf if any(map(math.isnan, sizes)) else max(sizes),
        norm=math.inf if any(map(math.isnan, norms)) else math.hypot(*norms),
        near=math.fsum(columns.near),
        elements=math.fsum(columns.elements),
        mark=marks[0] if all(mark == marks[0] for mark in marks) else -1.0,
        rank=min(columns.rank),
    )


def _gathered(words: Tensor, process: Any) -> Tensor:
    """The `words` of all ranks, a row for each; where they were."""
    here = words.to(device_for(process, words.device))
    size = dist.get_world_size(process)
    rows = torch.empty(size * len(here), dtype=here.dtype, device=here.device)
    # torch calls it by another name from 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, here, group=process)
    return move(rows.view(size, len(here)), words.device)


_squares: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""The rows and columns of large process groups, held weakly as well."""


def _rounds(groups: Iterable[Group]) -> Iterable[Any]:
    """The process groups that gather, one after the other."""
    for group in groups:
        size = dist.get_world_size(group.process)
        side = _side(size)
        if size <= LARGE or side == 1:
            yield group.process
            continue
        known = [ref() for ref in _squares.get(group.process, ())]
        if not known or None in known:
            known = _split(group.process, side)
            _squares[group.process] = [weakref.ref(each) for each in known]
        yield from known


def _side(size: int) -> int:
    """The largest divisor of `size` that is at most its root."""
    return next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)


def _split(process: Any, side: int) -> list[Any]:
    """The row and the column of this rank, with its group laid out in rows of `side` ranks.

    Ranks of other groups need not be there: they may have no scaler.
    """
    ranks = dist.get_process_group_ranks(process)
    here = dist.get_rank(process)
    row, column = ranks[here - here % side :][:side], ranks[here % side :: side]
    backend = dist.get_backend(process)
    return [
        dist.new_group(each, backend=backend, use_local_synchronization=True)
        for each in (row, column)
    ]


def device_for(group: Any, device: torch.device) -> torch.device:
    """Where `group` can gather: `device`, unless its backend knows GPUs alone."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device
