"""Who must agree, and how: one small collective, after which all ranks decide alike.

Every rank reads its own gradients and writes what it found into a few words. The words of all ranks
of a group are gathered and put together in a fixed order, so everybody has the same answer to the
bit: was anything not finite, does everything fit, were all losses finite, how large is the largest
gradient and how long are all of them together. Nothing of it waits on the host.

Which ranks those are is never guessed: DTensors tell their meshes, modules that were named to the
scaler (DDP, FSDP) their process groups, and the rest is asked for. A scaler that only some ranks
step must not hang.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradscale.errors import CallOrderError, SettingError, caller_level
from gradscale.torch import kernels
from gradscale.torch.shards import all_plain
from gradscale.torch.unscale import move, read_all, readable, values_of

AUTO = "auto"
LARGE = 256
"""Ranks from which on a group gathers in two rounds, along the rows and columns of a square."""
ALONE = 1
"""Ranks of a group in which there is nobody to agree with."""


class Shards(NamedTuple):
    """Ranks that hold different parameters, or different parts of them, in plain tensors.

    Such as the stages of a pipeline, or experts. Without it, the plain gradients of a group are
    taken for copies of one another, as in data parallelism, which count once in the norm.

        GradScaler(groups=[dp, Shards(tp, of=[model.up.weight, model.down.weight])])
    """

    group: Any
    """A process group, or a DeviceMesh."""
    of: Iterable[Tensor] | None = None
    """The parameters that are different ones; all others are copies. Without it all of them."""


class Group(NamedTuple):
    """A process group, and which plain tensors differ from rank to rank in it."""

    process: Any
    shards: bool = False
    """Whether some do."""
    of: Any = None
    """Those that do, as the keys of a dictionary; None for all."""

    def parts(self, param: Tensor) -> bool:
        """Whether every rank has another `param`."""
        return self.shards and (self.of is None or param in self.of)


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


class Agreement:
    """The groups whose ranks agree, and the collective by which they do.

    Args:
        groups: "auto", None, a process group, a DeviceMesh, `Shards` of one, or several of these.
    """

    def __init__(self, groups: Any = AUTO) -> None:
        self._auto = isinstance(groups, str)
        if self._auto and groups != AUTO:
            raise SettingError(f'groups must be "auto", None or process groups, got {groups!r}.')
        # Weakly: a group of gloo's that outlives its destruction can abort the process at its end.
        given = [] if groups is None or self._auto else list(_members(groups))
        if len({id(group.process) for group in given}) < len(given):
            raise SettingError(
                "groups names a process group twice. Name it once, as Shards(group, of=...) if some "
                "parameters differ from rank to rank."
            )
        self._known = [_loose(group) for group in given]
        self._silent = groups is None
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Process groups stay in their process: elsewhere it finds out anew."""
        return type(self), (None if self._silent else AUTO,)

    def __copy__(self) -> Agreement:
        return self

    def __deepcopy__(self, _: Any) -> Agreement:
        return self

    def name(self, module: nn.Module) -> None:
        """Takes over the process groups that the wrappers in `module` know."""
        if not self._auto or not _several():
            return
        for each in module.modules():
            for group in _groups_of(each):
                if all(known.process() is not group.process for known in self._known):
                    self._known.append(_loose(group))

    def among(self, params: Iterable[Tensor]) -> list[Group]:
        """The groups in which `params` must be agreed on.

        The same on every rank, also where there are no gradients.
        """
        if not _several() or self._silent:
            return []
        found = [known._replace(process=known.process()) for known in self._known]
        if any(group.process is None for group in found):
            raise CallOrderError(
                "A process group of the scaler has been destroyed. Make the scaler anew, or step "
                "it before destroy_process_group()."
            )
        if self._auto:
            several = list(params)
            meshes = {} if all_plain(several) else {_mesh_of(param): None for param in several}
            for mesh in meshes:
                for process in () if mesh is None else mesh.get_all_groups():
                    if all(known.process is not process for known in found):
                        found.append(Group(process))
            if not found and not self._warned:
                self._warned = True
                warnings.warn(
                    f"There are {dist.get_world_size()} ranks, and nothing tells which of them "
                    "must decide together. Call scaler.name(model) with the DDP or FSDP model, or "
                    "pass GradScaler(groups=...): a process group, Shards(group) for pipeline "
                    "stages and plain shards, or None if every rank is on its own.",
                    stacklevel=caller_level(),
                )
        return [group for group in found if dist.get_world_size(group.process) > ALONE]

    def is_unknown(self) -> bool:
        """Whether there are several ranks, and nobody has said that they are on their own."""
        return _several() and not self._silent


def part_of_norm(
    params: Sequence[Tensor], groups: Sequence[Group], norm: Tensor, inv_scale: Tensor
) -> Tensor:
    """The 2-norm of the gradients that this rank counts; `norm` is that of all it has.

    A gradient of which several ranks have copies is counted by the first of them.
    """
    if all_plain(params) and all(group.of is None for group in groups):
        mine = list(params) if not params or _counts(params[0], groups) else []
    else:
        mine = [param for param in params if _counts(param, groups)]
    if len(mine) == len(params):
        return norm.float()
    if not mine:
        return torch.zeros_like(norm, dtype=torch.float32)
    return read_all(values_of(mine), inv_scale)[1].total.float()


def _counts(param: Tensor, groups: Sequence[Group]) -> bool:
    """Whether this rank counts the gradient of `param`: it is the first of all that have it."""
    grad: Any = param.grad
    mesh = _mesh_of(grad)
    own = [] if mesh is None else mesh.get_all_groups()
    for group in groups:
        dim = next((place for place, known in enumerate(own) if known is group.process), None)
        alone = group.parts(param) if dim is None else not grad.placements[dim].is_replicate()
        if not alone and dist.get_rank(group.process) > 0:
            return False
    return True


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


def _several() -> bool:
    """Whether there are several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > ALONE


def _loose(group: Group) -> Group:
    """`group` with its process group held weakly."""
    return group._replace(process=weakref.ref(group.process))


def _members(groups: Any) -> Iterable[Group]:
    """The process groups that were given, and which plain tensors differ in them."""
    if isinstance(groups, Shards):
        of = None if groups.of is None else _by_identity(groups.of)
        yield from (Group(group.process, True, of) for group in _members(groups.group))
    elif groups is dist.GroupMember.NON_GROUP_MEMBER:
        return  # what new_group() gives a rank that is not in it
    elif isinstance(groups, dist.ProcessGroup):
        yield Group(groups)
    elif hasattr(groups, "get_all_groups"):
        yield from map(Group, groups.get_all_groups())
    elif isinstance(groups, list | tuple):
        for each in groups:
            yield from _members(each)
    else:
        raise SettingError(
            "groups takes process groups, DeviceMeshes, Shards of them, or several, got "
            f"{type(groups).__name__}."
        )


def _by_identity(params: Iterable[Tensor]) -> Any:
    """A dictionary with `params` for keys, which does not keep them alive."""
    found = WeakIdKeyDictionary()
    for param in params:
        if not isinstance(param, Tensor):
            raise SettingError(f"Shards(of=...) takes parameters, got {type(param).__name__}.")
        found[param] = True
    return found


def _groups_of(module: nn.Module) -> Iterable[Group]:
    """The process groups that a wrapper knows, and whether its plain tensors are shards."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield Group(module.process_group)
    strategy = getattr(module, "sharding_strategy", None)
    if strategy is not None and hasattr(module, "process_group"):  # FSDP1
        yield Group(module.process_group, "NO_SHARD" not in str(strategy))
        copies = getattr(module, "_inter_node_pg", None)  # of whom hybrid strategies have some
        if copies is not None and "HYBRID" in str(strategy):
            yield Group(copies)


def _mesh_of(tensor: Any) -> Any:
    """The mesh of a DTensor; None of a plain tensor."""
    return getattr(tensor, "device_mesh", None)
