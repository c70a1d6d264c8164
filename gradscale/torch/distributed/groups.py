"""Which ranks decide together: process groups, from DTensors, from wrapped modules, or as given.

Nothing is guessed: a scaler that only some ranks step must not hang. DTensors have meshes, DDP and
FSDP modules that were given to `name()` have process groups, and all else must be passed.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.grads.collect import Gradients
from gradscale.torch.grads.dtensor import all_plain
from gradscale.torch.grads.reference import measure
from gradscale.torch.grads.scale import Scale

if dist.is_available():
    # Its default arguments keep the group of all ranks, if there is one when it is imported; torch
    # imports it with the first optimizer, and gloo then aborts or hangs at exit (torch 2.13).
    import torch.distributed.nn.functional

AUTO = "auto"
WORLD = "world"
"""The group of all ranks, which may not exist yet."""


class Shards(NamedTuple):
    """Ranks that hold different parameters, or different parts of parameters, in plain tensors.

    Examples are the stages of a pipeline, or experts. Without `Shards`, plain gradients in a group
    are taken to be copies, as in data parallelism, and count once in the norm.

        GradScaler(groups=[dp, Shards(tp, of=[model.up.weight, model.down.weight])])
    """

    group: Any
    """A process group or a DeviceMesh."""
    of: Iterable[Tensor] | None = None
    """The parameters that differ between ranks; all others are copies. None: all of them differ."""


class Group(NamedTuple):
    """A process group, and which plain tensors differ from rank to rank in it."""

    process: Any
    shards: bool = False
    """Whether some do."""
    of: Any = None
    """Those that do, as the keys of a dictionary; None: all."""

    def parts(self, param: Tensor) -> bool:
        """Whether every rank has another `param`."""
        return self.shards and (self.of is None or param in self.of)

    def ranks(self) -> frozenset[int]:
        """Its ranks among all."""
        return frozenset(dist.get_process_group_ranks(self.process))

    def weak(self) -> Group:
        """The same with a weak reference to the process group."""
        return self._replace(process=weakref.ref(self.process))


class Groups:
    """The process groups whose ranks decide together.

    Args:
        groups: "auto", None, a process group, a DeviceMesh, `Shards` of one, or several of these.
    """

    def __init__(self, groups: Any = AUTO) -> None:
        self._auto = isinstance(groups, str)
        if self._auto and groups != AUTO:
            raise SettingError(f'groups must be "auto", None or process groups, got {groups!r}.')
        self._silent = groups is None
        self.has_losses = False
        """Whether all ranks have a loss, although they have different parameters."""
        self.sharded = False
        """Whether given groups hold different parameters, so that a rank may have no loss."""
        self.wrappers: list[tuple[weakref.ref[nn.Module], Callable[[Any], Any]]] = []
        """The modules in named models that reduce gradients, and what says whether each does."""
        self.version = 0
        """Changes with the groups that are known."""
        self._known: list[Group] = []
        """Process groups weakly: one of gloo's that outlives its end can abort the process."""
        # The group of all ranks may be made later than this.
        self._later = groups if isinstance(groups, Shards) and groups.group == WORLD else None
        self._saved = groups if self._silent or self._later else AUTO
        if groups is not None and not self._auto and self._later is None:
            self._use(groups)

    def _use(self, groups: Any) -> None:
        """Stores the groups that were given."""
        given = list(_members(groups))
        if len({id(group.process) for group in given}) < len(given):
            raise SettingError(
                "groups contains a process group twice. Pass it once, as Shards(group, of=...) if "
                "some parameters differ from rank to rank."
            )
        self._known = [group.weak() for group in given]
        self.sharded = any(group.shards for group in given)
        self.version += 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Without process groups, which another process finds anew."""
        return _restored, (self._saved, self.has_losses)

    def __copy__(self) -> Groups:
        return self

    def __deepcopy__(self, _: Any) -> Groups:
        return self

    def name(self, module: nn.Module) -> None:
        """Adds the process groups of the wrappers in `module`."""
        for each in module.modules() if self._auto and _several() else ():
            groups = list(_groups_of(each))
            if groups or hasattr(each, "set_requires_gradient_sync"):
                self.wrappers.append((weakref.ref(each), _reducing(each)))
                self.version += 1
            for group in groups:
                known = next((k for k in self._known if k.process() is group.process), None)
                if known is None:
                    self._known.append(group.weak())
                elif known.of is not None and group.of is not None:
                    known.of.update(group.of)

    def has_stages(self) -> bool:
        """Whether ranks were declared to have different parameters, so perhaps no loss."""
        return self.sharded and not self.has_losses

    def among(self, params: Iterable[Tensor]) -> list[Group]:
        """The groups in which `params` must be agreed on.

        The same on every rank, also where there are no gradients.
        """
        if not _several() or self._silent:
            return []
        if self._later is not None:
            later, self._later = self._later, None
            self._use(later._replace(group=dist.group.WORLD))
        found = [known._replace(process=known.process()) for known in self._known]
        if any(group.process is None for group in found):
            raise CallOrderError(
                "A process group of the scaler has been destroyed. Create a new scaler, or call "
                "step() before destroy_process_group()."
            )
        if self._auto:
            several = list(params)
            meshes = {} if all_plain(several) else {_mesh_of(param): None for param in several}
            for mesh in meshes:
                for process in () if mesh is None else mesh.get_all_groups():
                    if all(known.process is not process for known in found):
                        found.append(Group(process))
        large = [group for group in found if _size(group.process) > 1]
        return large if len(large) < 2 else _without_parts(large)

    def is_unknown(self) -> bool:
        """Whether there are several ranks, and `groups` is not None."""
        return _several() and not self._silent


def counts_all(groups: Sequence[Group]) -> bool | None:
    """Whether this rank counts plain gradients in a norm; None if that differs by parameter."""
    if any(group.of is not None for group in groups):
        return None
    here = dist.get_rank()
    return all(group.shards or min(group.ranks()) == here for group in groups)


def part_of_norm(params: list[Tensor], groups: Sequence[Group], norm: Any, scale: Scale) -> Any:
    """The 2-norm of the gradients that this rank counts; `norm` is that of all it has.

    A gradient of which several ranks have copies is counted by the first of them.
    """
    if not params:
        return norm
    ranks, here = [group.ranks() for group in groups], dist.get_rank()
    holders = functools.cache(_holders)

    def counts(param: Tensor) -> bool:
        """Whether this rank is the first of all that have the gradient of `param`."""
        mesh = _mesh_of(param.grad)
        same, others = (_NONE, _NONE) if mesh is None else holders(mesh, param.grad.placements)  # type: ignore[union-attr]
        if same and min(same) != here:
            return False
        # Ranks outside of a mesh have copies of all that is in it.
        copies = [
            min(members)
            for group, members in zip(groups, ranks, strict=True)
            if not others.issuperset(members) and not group.parts(param)
        ]
        return all(first == here or first in others for first in copies)

    everything = counts_all(groups) if all_plain(params) else None
    if everything is None:
        mine = [param for param in params if counts(param)]
    else:
        mine = params if everything else []
    if len(mine) == len(params):
        return norm
    if not mine:
        return norm * 0 if isinstance(norm, float) else torch.zeros_like(norm)
    return measure(Gradients(mine), scale, max_norm=math.inf).stats.norm


_NONE: frozenset[int] = frozenset()


def _holders(mesh: Any, placements: Any) -> tuple[frozenset[int], frozenset[int]]:
    """The ranks that have the same part of a DTensor, and all ranks that have some of it."""
    kept = tuple(
        slice(None) if placement.is_replicate() else number
        for placement, number in zip(placements, mesh.get_coordinate(), strict=True)
    )
    ranks = mesh.mesh
    return frozenset(ranks[kept].flatten().tolist()), frozenset(ranks.flatten().tolist())


def _without_parts(groups: list[Group]) -> list[Group]:
    """`groups` without those of which another has all ranks: to agree with that is enough.

    Two of those that are left may share one rank, as the dimensions of a mesh do.
    """
    ranks = [group.ranks() for group in groups]
    left: dict[frozenset[int], Group] = {}
    for group, mine in zip(groups, ranks, strict=True):
        around = [each for each, theirs in zip(groups, ranks, strict=True) if mine < theirs]
        if group.shards and not all(each.shards for each in around):
            raise SettingError(
                f"The ranks {sorted(mine)} have shards, but a group that contains all of them was "
                "passed as one with copies. Pass the ranks that have copies of the same shards as "
                "that group."
            )
        if not around:
            left.setdefault(mine, group)
    for one, other in itertools.combinations(left, 2):
        if len(one & other) > 1:
            raise SettingError(
                f"Two groups of ranks that must agree share the ranks {sorted(one & other)}, so "
                "gradients would be counted twice in norms. Pass GradScaler(groups=...) with one "
                "group that contains all of them."
            )
    return list(left.values())


def _restored(groups: Any, has_losses: bool) -> Groups:
    """What was pickled."""
    restored = Groups(groups)
    restored.has_losses = has_losses
    return restored


def _size(process: Any) -> int:
    """How many ranks are in a process group, or in what has a `size()`."""
    real = isinstance(process, dist.ProcessGroup)
    return dist.get_world_size(process) if real else process.size()


def has_ranks() -> bool:
    """Whether torch.distributed is initialized, perhaps with one rank."""
    return dist.is_available() and dist.is_initialized()


def _several() -> bool:
    return has_ranks() and dist.get_world_size() > 1


def _members(groups: Any) -> Iterable[Group]:
    """The process groups that were given, and which plain tensors differ in them."""
    if isinstance(groups, Shards):
        of = None if groups.of is None else _by_identity(groups.of)
        yield from (Group(group.process, True, of) for group in _members(groups.group))
    elif groups is dist.GroupMember.NON_GROUP_MEMBER:
        return  # what new_group() returns to a rank that is not in it
    elif isinstance(groups, dist.ProcessGroup):
        yield Group(groups)
    elif hasattr(groups, "get_all_groups"):
        yield from map(Group, groups.get_all_groups())
    elif isinstance(groups, list | tuple):
        for each in groups:
            yield from _members(each)
    elif callable(getattr(groups, "rank", None)) and callable(getattr(groups, "size", None)):
        yield Group(groups)
    else:
        raise SettingError(
            "groups must be process groups, DeviceMeshes, Shards of them, or several of these, "
            f"got {type(groups).__name__}."
        )


def _by_identity(params: Iterable[Tensor]) -> Any:
    """A dictionary with `params` for keys, which does not keep them alive."""
    found = WeakIdKeyDictionary()
    for param in params:
        if not isinstance(param, Tensor):
            raise SettingError(
                f"The parameters of Shards(of=...) must be tensors, got {type(param).__name__}."
            )
        found[param] = True
    return found


def _groups_of(module: nn.Module) -> Iterable[Group]:
    """The process groups of a wrapper, and whether its plain tensors are shards."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        yield Group(module.process_group)
    strategy = getattr(module, "sharding_strategy", None)
    if strategy is not None and hasattr(module, "process_group"):  # FSDP1
        handle = getattr(module, "_handle", None)
        flat = [] if handle is None or "NO_SHARD" in str(strategy) else [handle.flat_param]
        parts = [param for each in flat for param in (getattr(each, "_params", None) or [each])]
        yield Group(module.process_group, True, _by_identity(parts))
        copies = getattr(module, "_inter_node_pg", None)  # in hybrid strategies
        if copies is not None and "HYBRID" in str(strategy):
            yield Group(copies)


def _reducing(module: Any) -> Callable[[Any], Any]:
    """What says whether a wrapper reduces the gradients of a backward pass that begins now."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return attrgetter("require_backward_grad_sync")
    return attrgetter("_sync_gradients") if hasattr(module, "_sync_gradients") else _fsdp2_reduces


def _fsdp2_reduces(module: Any) -> bool:
    """Whether a module of FSDP2 reduces the gradients of a backward pass that begins now."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    return bool(getattr(getattr(state, "_fsdp_param_group", None), "reduce_grads", True))


def _mesh_of(tensor: Any) -> Any:
    return getattr(tensor, "device_mesh", None)
