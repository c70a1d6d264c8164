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

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradscale.errors import CallOrderError, SettingError, StateError, caller_level
from gradscale.torch.outcome import Sent
from gradscale.torch.unscale import move, read_all, values_of

AUTO = "auto"
EVERY = 64
"""Steps from one mark to the next."""


Group = tuple[Any, bool]
"""A process group, and whether plain tensors in it are shards."""


class Shards(NamedTuple):
    """Ranks that hold different parameters, or different parts of them, in plain tensors.

    Such as the stages of a pipeline, or experts. Without it, the plain gradients of a group are
    taken for copies of one another, as in data parallelism, which count once in the norm.
    """

    group: Any


class Report(NamedTuple):
    """What was found in gradients: by one rank, or by all of them together. All float32."""

    found: Tensor
    """1 if something is not finite, else 0."""
    unfit: Tensor
    """1 if something does not fit where it is stored, else 0."""
    bad_loss: Tensor
    """1 if a loss is not finite, else 0."""
    bad_penalty: Tensor
    """1 if a gradient that `grad()` handed out was not finite, else 0."""
    present: Tensor
    """1 if there is a gradient, else 0."""
    amax: Tensor
    """The largest magnitude."""
    norm: Tensor
    """The 2-norm, of what counts as this rank's."""
    mark: Tensor
    """A checksum of the scale and what goes with it."""
    rank: Tensor
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
        self._given = [(weakref.ref(group), shards) for group, shards in given]
        self._silent = groups is None
        self._named: list[tuple[weakref.ref[Any], bool]] = []
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
            for group, shards in _groups_of(each):
                if all(known() is not group for known, _ in self._named):
                    self._named.append((weakref.ref(group), shards))

    def among(self, params: Iterable[Tensor]) -> list[Group]:
        """The groups in which `params` must be agreed on, and whether plain tensors are shards.

        The same on every rank, also where there are no gradients.
        """
        if not _several() or self._silent:
            return []
        found = [(ref(), shards) for ref, shards in (*self._given, *self._named)]
        if any(group is None for group, _ in found):
            raise CallOrderError(
                "A process group of the scaler has been destroyed. Make the scaler anew, or step "
                "it before destroy_process_group()."
            )
        if self._auto:
            for mesh in {_mesh_of(param): None for param in params} if params else ():
                for group in () if mesh is None else mesh.get_all_groups():
                    if all(known is not group for known, _ in found):
                        found.append((group, False))
            if not found and not self._warned:
                self._warned = True
                warnings.warn(
                    f"There are {dist.get_world_size()} ranks, and nothing tells which of them "
                    "must decide together. Call scaler.name(model) with the DDP or FSDP model, or "
                    "pass GradScaler(groups=...): a process group, Shards(group) for pipeline "
                    "stages and plain shards, or None if every rank is on its own.",
                    stacklevel=caller_level(),
                )
        return [(group, shards) for group, shards in found if dist.get_world_size(group) > 1]

    def is_unknown(self) -> bool:
        """Whether there are several ranks, and nobody has said that they are on their own."""
        return _several() and not self._silent


def part_of_norm(
    params: Sequence[Tensor], groups: Sequence[Group], norm: Tensor, inv_scale: Tensor
) -> Tensor:
    """The 2-norm of the gradients that this rank counts; `norm` is that of all it has.

    A gradient of which several ranks have copies is counted by the first of them.
    """
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
    for group, shards in groups:
        dim = next((place for place, known in enumerate(own) if known is group), None)
        if dim is not None:
            alone = grad.placements[dim].is_shard()
        else:
            alone = shards and mesh is None
        if not alone and dist.get_rank(group) > 0:
            return False
    return True


def settle(reports: Sequence[Report], groups: Sequence[Group]) -> tuple[list[Report], list[Tensor]]:
    """What all ranks found together, of each loss; and the marks of the ranks of every group.

    One collective for each group.
    """
    marks: list[Tensor] = []
    together = list(reports)
    for group, _ in groups:
        device = together[0].found.device
        words = torch.stack([word for report in together for word in report])
        here = words.to(_device_for(group, device))
        size = dist.get_world_size(group)
        gathered = torch.empty(size * len(here), dtype=here.dtype, device=here.device)
        _gather(gathered, here, group)
        rows = move(gathered.view(size, len(together), len(Report._fields)), device)
        marks.append(rows[:, 0, Report._fields.index("mark")])
        together = [_together(rows[:, place]) for place in range(len(together))]
    return together, marks


def largest(values: Tensor, groups: Sequence[Group]) -> Tensor:
    """The largest of each of `values` on all ranks; a NaN is larger than anything."""
    for group, _ in groups:
        here = values.to(_device_for(group, values.device))
        size = dist.get_world_size(group)
        gathered = torch.empty(size * len(here), dtype=here.dtype, device=here.device)
        _gather(gathered, here, group)
        values = move(gathered.view(size, -1).amax(0), values.device)
    return values


def _together(rows: Tensor) -> Report:
    """What the `rows` of all ranks say together; in this order on every rank."""
    found, unfit, bad_loss, bad_penalty, present, amax, norm, mark, rank = rows.unbind(1)
    # By the largest, because squares may overflow where the root does not.
    top = norm.amax()
    safe = torch.where(top > 0, top, torch.ones_like(top))
    length = safe * (norm / safe).square().sum().sqrt()
    length = torch.where(torch.isfinite(top), torch.where(top > 0, length, top), top)
    return Report(
        found.amax(),
        unfit.amax(),
        bad_loss.amax(),
        bad_penalty.amax(),
        present.amax(),
        torch.where(torch.isnan(amax).any(), torch.inf, amax.amax()),
        length,
        mark[0],
        rank.amin(),
    )


def _gather(into: Tensor, words: Tensor, group: Any) -> None:
    """Gathers the `words` of all ranks, which torch calls by another name from 2.13 on."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, words, group=group)


def _device_for(group: Any, device: torch.device) -> torch.device:
    """Where `group` can gather: `device`, unless its backend knows GPUs alone."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _several() -> bool:
    """Whether there are several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _members(groups: Any) -> Iterable[Group]:
    """The process groups that were given, and whether plain tensors are shards in them."""
    if isinstance(groups, Shards):
        yield from ((group, True) for group, _ in _members(groups.group))
    elif isinstance(groups, dist.ProcessGroup):
        yield groups, False
    elif hasattr(groups, "get_all_groups"):
        yield from ((group, False) for group in groups.get_all_groups())
    elif isinstance(groups, list | tuple):
        for each in groups:
            yield from _members(each)
    else:
        raise SettingError(
            "groups takes process groups, DeviceMeshes, Shards of them, or several, got "
            f"{type(groups).__name__}."
        )


def _groups_of(module: nn.Module) -> Iterable[Group]:
    """The process groups that a wrapper knows, and whether its plain tensors are shards."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield module.process_group, False
    strategy = getattr(module, "sharding_strategy", None)
    if strategy is not None and hasattr(module, "process_group"):  # FSDP1
        yield module.process_group, "NO_SHARD" not in str(strategy)


def _mesh_of(tensor: Any) -> Any:
    """The mesh of a DTensor; None of a plain tensor."""
    return getattr(tensor, "device_mesh", None)


class Drift:
    """Whether ranks that should agree have the same scale, looked at every now and then.

    A mark travels with the words of every 64th step, and is looked at with the next one, so that
    nobody waits for the device.
    """

    def __init__(self, on_drift: str = "raise") -> None:
        if on_drift not in ("raise", "repair"):
            raise SettingError(f'on_drift must be "raise" or "repair", got {on_drift!r}.')
        self._repairs = on_drift == "repair"
        self._count = 0
        self._sent: list[tuple[weakref.ref[Any], Sent]] = []
        self._due: list[tuple[weakref.ref[Any], Sent]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ("repair" if self._repairs else "raise",)

    def mark(self, state: Sequence[Tensor]) -> Tensor:
        """A checksum of `state`, in a step in which marks travel; else 0."""
        self._count += 1
        first: Tensor = state[0]
        if self._count % EVERY != 1:
            return torch.zeros_like(first)
        whole = [value.view(torch.int32) if value.is_floating_point() else value for value in state]
        total = torch.zeros_like(first, dtype=torch.int64)
        for place, value in enumerate(whole):
            total = total * 31 + value.to(torch.int64) + place
        return (total % 2**24).to(torch.float32)

    def take(self, marks: Sequence[Tensor], groups: Sequence[Group]) -> None:
        """Has the `marks` of all ranks come to the host, by the time that others are sent."""
        if self._count % EVERY != 1:
            return
        self._due, self._sent = (
            self._sent,
            [
                (weakref.ref(group), Sent.away(each.clone()))
                for (group, _), each in zip(groups, marks, strict=True)
            ],
        )

    def check(self, state: Sequence[Tensor]) -> None:
        """Raises, or repairs `state`, if the marks that have come differ: on all ranks alike."""
        due, self._due = self._due, []
        for ref, sent in due:
            group = ref()
            if group is None:
                continue
            marks = sent.read().tolist()
            odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
            if not odd:
                continue
            ranks = [dist.get_global_rank(group, rank) for rank in odd]
            first = dist.get_global_rank(group, 0)
            if not self._repairs:
                raise StateError(
                    f"The scale of the ranks {ranks} differs from that of rank {first}. Load the "
                    'same state and give the same settings everywhere, or pass on_drift="repair".'
                )
            warnings.warn(
                f"The scale of the ranks {ranks} differed from that of rank {first}, and is the "
                "same now.",
                stacklevel=caller_level(),
            )
            for value in state:
                here = value.to(_device_for(group, value.device))
                dist.broadcast(here, first, group=group)
                value.copy_(here)
