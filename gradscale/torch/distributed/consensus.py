"""All-gathers a report of ten floats per rank, and folds the reports in a fixed order.

So all ranks have the same answers to the bit, whichever path the rest of their step takes: was
anything not finite, does everything fit, were all losses finite, how large is the largest gradient
and what is the norm of all of them. Nothing of it waits on the host.
"""

from __future__ import annotations

import atexit
import functools
import math
import time
import weakref
from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.torch.distributed.drift import Drift, Marks
from gradscale.torch.distributed.groups import Group, Groups
from gradscale.torch.grads import dispatch
from gradscale.torch.grads.fields import REPORT, offset
from gradscale.torch.grads.scale import Scale, constant, move

LARGE = 256
"""Ranks from which on a group gathers in two rounds, along the rows and columns of a square."""


_NAMES = [field.name for field in REPORT]
_DEFAULTS = [math.inf if field.fold == "min" else 0.0 for field in REPORT]
make_report: Any = namedtuple
Report: Any = make_report("Report", _NAMES, defaults=_DEFAULTS)
"""What one rank has found in its gradients, or all of them together: numbers or tensors."""
_CHECKSUM = offset(REPORT, "checksum")


class Consensus:
    """The groups of ranks that decide together, and the collective by which they do.

    Args:
        groups: As in `GradScaler`.
        on_drift: As in `GradScaler`.
    """

    def __init__(self, groups: Any, on_drift: str) -> None:
        self.groups = Groups(groups)
        self.drift = Drift(on_drift)

    def name(self, model: nn.Module) -> None:
        """Takes over the process groups of DDP and FSDP in `model`."""
        self.groups.name(model)

    def combine(
        self, reports: Sequence[Any], groups: Sequence[Group], scale: Scale, state: Any
    ) -> list[Any]:
        """What all ranks of `groups` have found together, for each of `reports`.

        Args:
            reports: What this rank found: of its gradients, and of each loss with its own scale.
            groups: One collective each, or two for a large one.
            scale: Where the results go, as numbers or tensors.
            state: What must be the same on all ranks, for the checksum.
        """
        marked = not self.drift.wait
        if marked:
            reports = [reports[0]._replace(checksum=self.drift.mark(state)), *reports[1:]]
        else:
            self.drift.wait -= 1
        host = scale.number is not None
        words, marks = all_reports(_words(reports, scale), groups, host)
        if marked:
            self.drift.take(marks)
        if host:
            return [Report(*row) for row in words.tolist()]
        return [Report(*row.unbind()) for row in words.unbind()]

    def any(self, flags: Sequence[Any], groups: Sequence[Group], scale: Scale) -> list[Any]:
        """Which of the bool `flags` hold on any rank of `groups`."""
        if not groups:
            return list(flags)
        words = torch.stack([_word(flag, scale.tensor.device) for flag in flags])
        found = largest(words, groups) > 0
        return found.tolist() if scale.number is not None else list(found.unbind())

    def largest(self, value: Any, groups: Sequence[Group], scale: Scale) -> Any:
        """The largest `value` on all ranks of `groups`."""
        found = largest(_word(value, scale.tensor.device).reshape(1), groups)[0]
        return found.item() if scale.number is not None else found


def all_reports(words: Tensor, groups: Sequence[Group], host: bool = False) -> tuple[Tensor, Marks]:
    """What all ranks found together, and the checksums of the ranks of every group.

    `words` are the rows of this rank's reports; so is what comes back. On the `host` no kernel
    folds them.
    """
    marks: Marks = []
    kernel = not host and dispatch.uses_triton(words.device)
    for process in _rounds(groups):
        rows = _gathered(words.reshape(-1), process).view(-1, *words.shape)
        marks.append((process, rows[:, 0, _CHECKSUM]))
        words = dispatch.module("consensus").fold(rows) if kernel else fold(rows)
    return words, marks


def largest(values: Tensor, groups: Sequence[Group]) -> Tensor:
    """The largest of each of `values` on all ranks; a NaN is larger than anything."""
    for process in _rounds(groups):
        values = _gathered(values, process).amax(0)
    return values


def fold(rows: Tensor) -> Tensor:
    """The report that the `rows` of all ranks (ranks, reports, words) amount to."""
    words = list(torch.where(torch.isnan(rows), torch.inf, rows).amax(0).unbind(1))
    for place, (field, column) in enumerate(zip(REPORT, rows.unbind(2), strict=True)):
        if field.fold == "min":
            words[place] = column.amin(0)
        elif field.fold == "norm":
            # By the largest, because squares may overflow where the root does not.
            top = words[place]
            safe = torch.where((top > 0) & torch.isfinite(top), top, torch.ones_like(top))
            length = safe * (column / safe).square().sum(0).sqrt()
            words[place] = torch.where(torch.isfinite(top), length, top)
        elif field.fold == "checksum":
            # Ranks that gather with one of these later must learn of a difference, too.
            words[place] = torch.where((column == column[0]).all(0), column[0], -1.0)
    return torch.stack(words, dim=1)


def _words(reports: Sequence[Any], scale: Scale) -> Tensor:
    """The words of `reports`, a row for each, on the device of the scale."""
    device = scale.tensor.device
    if scale.number is not None:
        rows = [[float(word) for word in report] for report in reports]
        return torch.tensor(rows, dtype=torch.float32, device="cpu")
    words = [_word(word, device) for report in reports for word in report]
    return torch.stack(words).view(len(reports), -1)


def _word(value: Any, device: torch.device) -> Tensor:
    """A number or tensor as float32 on `device`."""
    if isinstance(value, Tensor):
        return move(value, device).float()
    if device.type == "cpu":
        return constant(float(value))
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _gathered(words: Tensor, process: Any) -> Tensor:
    """The `words` of all ranks, a row for each; where they were."""
    here = words
    if words.is_cpu and dist.get_backend(process) == "nccl":
        here = words.cuda()
    size = dist.get_world_size(process)
    rows = torch.empty(size * len(here), dtype=here.dtype, device=here.device)
    # torch calls it by another name from 2.13 on.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, here, group=process)
    if here.is_cpu:
        _outlive_gloo()
    rows = rows.view(size, len(here))
    return rows if here is words else move(rows, words.device)


@functools.cache
def _outlive_gloo() -> None:
    """Has the interpreter end a little later, once, so that gloo's threads are done by then.

    Such a thread takes the GIL to release the tensors of a collective; while the interpreter ends,
    that aborts the process ("terminate called without an active exception", torch 2.13, 1 run of
    8). It happens to groups that outlive `destroy_process_group()`, as those of FSDP2 do.
    """
    atexit.register(time.sleep, 0.05)


_squares: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""The rows and columns of large process groups, held weakly as well."""


def _rounds(groups: Iterable[Group]) -> Iterable[Any]:
    """The process groups that gather, one after the other."""
    for group in groups:
        size = dist.get_world_size(group.process)
        if size <= LARGE or (side := _side(size)) == 1:
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
