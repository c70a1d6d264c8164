"""Which ranks decide together: process groups, from DTensors, from wrapped modules, or as given.

Nothing is guessed: DTensors have meshes, DDP and FSDP modules that were given to `name()` have
process groups, and all else must be passed. A scaler that only some ranks step must not hang.
"""

from __future__ import annotations

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
"""Stands for the group of all ranks, which there need not be yet."""
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
        # Those of all ranks may come later than this.
        self._later = groups if isinstance(groups, Shards) and groups.group == WORLD else None
        self._saved = groups if self._silent or self._later else AUTO
        if groups is not None and not self._auto and self._later is None:
            self._take(list(_members(groups)))

    def _take(self, given: list[Group]) -> None:
        """Takes over the groups that were given."""
        if len({id(group.process) for group in given}) < len(given):
            raise SettingError(
                "groups names a process group twice. Name it once, as Shards(group, of=...) if "
                "some parameters differ from rank to rank."
            )
        self._known = [_loose(group) for group in given]
        self.sharded = any(group.shards for group in given)
        self.version += 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Process groups stay in their process: elsewhere it finds out anew."""
        return _restored, (self._saved, self.has_losses)

    def __copy__(self) -> Groups:
        return self

    def __deepcopy__(self, _: Any) -> Groups:
        return self

    def name(self, module: nn.Module) -> None:
        """Takes over the process groups that the wrappers in `module` know."""
        for each in module.modules() if self._auto and _several() else ():
            groups = list(_groups_of(each))
            if groups or hasattr(each, "set_requires_gradient_sync"):
                self.wrappers.append((weakref.ref(each), _reducing(each)))
                self.version += 1
            for group in groups:
                known = next((k for k in self._known if k.process() is group.process), None)
                if known is None:
                    self._known.append(_loose(group))
                elif known.of is not None and group.of is not None:
                    known.of.update(group.of)

    def has_stages(self) -> bool:
        """Whether it was said that ranks have different parameters, so perhaps no loss."""
        return self.sharded and not self.has_losses

    def among(self, params: Iterable[Tensor]) -> list[Group]:
        """The groups in which `params` must be agreed on.

        The same on every rank, also where there are no gradients.
        """
        if not _several() or self._silent:
            return []
        if self._later is not None:
            later, self._later = self._later, None
            self._take(list(_members(later._replace(group=dist.group.WORLD))))
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
        large = [group for group in found if _size(group.process) > ALONE]
        return large if len(large) < 2 else _without_parts(large)

    def is_unknown(self) -> bool:
        """Whether there are several ranks, and nobody has said that they are on their own."""
        return _several() and not self._silent


def counts_all(groups: Sequence[Group]) -> bool | None:
    """Whether this rank counts plain gradients in a norm; None if that differs by parameter."""
    if any(group.of is not None for group in groups):
        return None
    here = dist.get_rank()
    return all(group.shards or min(_ranks(group.process)) == here for group in groups)


def part_of_norm(params: list[Tensor], groups: Sequence[Group], norm: Any, scale: Scale) -> Any:
    """The 2-norm of the gradients that this rank counts; `norm` is that of all it has.

    A gradient of which several ranks have copies is counted by the first of them.
    """
    all_or_none = counts_all(groups) if all_plain(params) else None
    if all_or_none is None:
        mine = [param for param in params if _counts(param, groups)]
    else:
        mine = params if all_or_none else []
    if len(mine) == len(params):
        return norm
    if not mine:
        return norm * 0 if isinstance(norm, float) else torch.zeros_like(norm)
    return measure(Gradients(mine), scale, max_norm=math.inf).stats.norm


def _counts(param: Tensor, groups: Sequence[Group]) -> bool:
    """Whether this rank counts the gradient of `param`: it is the first of all that have it."""
    holders, others = _holders(param.grad)
    if holders and min(holders) != dist.get_rank():
        return False
    for group in groups:
        ranks = _ranks(group.process)
        if others.issuperset(ranks) or group.parts(param):
            continue
        # Ranks outside of a mesh have copies of all that is in it.
        first = min(ranks)
        if first != dist.get_rank() and first not in others:
            return False
    return True


def _holders(grad: Any) -> tuple[frozenset[int], frozenset[int]]:
    """The ranks that have the same part of a DTensor, and all ranks that have some of it."""
    mesh = _mesh_of(grad)
    if mesh is None:
        return frozenset(), frozenset()
    known = _meshes.setdefault(mesh, {})
    if grad.placements not in known:
        place: Any = mesh.get_coordinate()
        kept = [
            slice(None) if placement.is_replicate() else number
            for placement, number in zip(grad.placements, place, strict=True)
        ]
        ranks = mesh.mesh
        whole = frozenset(ranks.flatten().tolist())
        known[grad.placements] = frozenset(ranks[tuple(kept)].flatten().tolist()), whole
    found: tuple[frozenset[int], frozenset[int]] = known[grad.placements]
    return found


_meshes: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_rank_sets: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def _ranks(process: Any) -> frozenset[int]:
    """The ranks of a process group."""
    if process not in _rank_sets:
        _rank_sets[process] = frozenset(dist.get_process_group_ranks(process))
    return _rank_sets[process]


def _without_parts(groups: list[Group]) -> list[Group]:
    """`groups` without those of which another has all ranks: to agree with that is enough.

    What is left must cross at one rank alone, as the dimensions of a mesh do.
    """
    left: list[Group] = []
    for group in groups:
        mine = _ranks(group.process)
        others = [each for each in groups if each is not group]
        inside = [each for each in others if mine < _ranks(each.process)]
        if group.shards and not all(each.shards for each in inside):
            raise SettingError(
                f"The ranks {sorted(mine)} have shards, and a group that has all of them copies. "
                "Pass the ranks that have copies of the same shards as that group."
            )
        same = [each for each in left if _ranks(each.process) == mine]
        if not inside and not same:
            left.append(group)
    for place, group in enumerate(left):
        for other in left[:place]:
            shared = _ranks(group.process) & _ranks(other.process)
            if len(shared) > 1:
                raise SettingError(
                    f"Two groups of ranks that must agree share the ranks {sorted(shared)}, so "
                    "norms would count twice. Pass GradScaler(groups=...) with one group that has "
                    "all of them."
                )
    return left


def _restored(groups: Any, has_losses: bool) -> Groups:
    """What was pickled: process groups stay in their process, and are found anew elsewhere."""
    restored = Groups(groups)
    restored.has_losses = has_losses
    return restored


def _size(process: Any) -> int:
    """How many ranks are in a process group, or in what has a `size()`."""
    return (
        dist.get_world_size(process) if isinstance(process, dist.ProcessGroup) else process.size()
    )


def has_ranks() -> bool:
    """Whether this process is a rank, perhaps the only one."""
    return dist.is_available() and dist.is_initialized()


def _several() -> bool:
    """Whether there are several ranks."""
    return has_ranks() and dist.get_world_size() > ALONE


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
    elif callable(getattr(groups, "rank", None)) and callable(getattr(groups, "size", None)):
        yield Group(groups)
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
        handle = getattr(module, "_handle", None)
        flat = [] if handle is None or "NO_SHARD" in str(strategy) else [handle.flat_param]
        parts = [param for each in flat for param in (getattr(each, "_params", None) or [each])]
        yield Group(module.process_group, True, _by_identity(parts))
        copies = getattr(module, "_inter_node_pg", None)  # of whom hybrid strategies have some
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
    """The mesh of a DTensor; None of a plain tensor."""
    return getattr(tensor, "device_mesh", None)
