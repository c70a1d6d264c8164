"""The weights of blocks, which views stand in for while the blocks run.

The division happens where a weight is used, not at the weight: so DDP, FSDP2, accumulation, a
penalty on the weights and the scaler see ordinary gradients, and ranks need not agree. The views of
many blocks are made together, at the beginning of a forward pass of the model, so that
their gradients are divided by one call, and used again as long as the scales stay. A block that is
called on its own makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.blocks.chains import Block
from gradscale.torch.blocks.edges import lend
from gradscale.torch.blocks.references import counts_of_lone
from gradscale.torch.features import HAS_GRAD_DTYPE

if TYPE_CHECKING:
    from gradscale.torch.blocks.hooks import BlockHooks

NO_GRAD_DTYPE = (
    f"BlockScales of float16 weights need torch.Tensor.grad_dtype, which torch {torch.__version__} "
    "does not have. Use torch 2.10 or later, or float32 weights with autocast."
)
_MOST = 2**22
"""The most numbers whose gradients are kept until all of them are there: less than a bucket of DDP
has, which is reduced while the backward pass goes on."""


class Unit(NamedTuple):
    """A module of a block, and the weights that are there when its forward pass begins.

    That is a module of the block itself, or one below it that FSDP2 has sharded on its own.
    """

    place: int
    module: nn.Module
    kind: type
    start: int
    """The slot of its first weight."""
    owners: tuple[tuple[nn.Module, str], ...]
    """The weights, as modules and names."""
    gathers: bool
    """Whether FSDP2 gathers the weights when the forward pass begins."""

    def params(self) -> Iterator[Any]:
        """The weights, None where there is none any more."""
        return (owner._parameters[name] for owner, name in self.owners)


class Swap(NamedTuple):
    """A weight of a module, and its view."""

    params: dict[str, Any]
    """The parameters of the module."""
    name: str
    param: Any
    view: Tensor


class Group:
    """Weights whose views are made together.

    Args:
        units: Units that follow each other, if their gradients are measured.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.start = units[0].start
        self.end = units[-1].start + len(units[-1].owners)
        self.swaps: dict[int, list[Swap]] = {}
        """Of every unit, by its start; empty until views are made."""
        self._made: list[tuple[dict[str, Any], str, Any, int, torch.dtype, Any]] | None = None
        """The weights, their addresses and shapes; None if their views cannot be used again."""
        self.num_frozen = 0

    def found(self) -> list[tuple[Unit, int, dict[str, Any], str, Any]]:
        """The weights that get a gradient, with their units, slots and modules."""
        every = (
            (unit, slot, owner._parameters, name, owner._parameters[name])
            for unit in self.units
            for slot, (owner, name) in enumerate(unit.owners, unit.start - self.start)
        )
        return [each for each in every if each[-1] is not None and each[-1].requires_grad]

    def holds(self) -> bool:
        """Whether the views that were made are still those of the weights."""
        if self._made is None:
            return False
        for owned, name, param, address, dtype, shape in self._made:
            if (
                owned[name] is not param
                or not param.requires_grad
                or param.data_ptr() != address
                or param.dtype is not dtype
                or param.shape != shape
            ):
                return False
        return not self.num_frozen or len(self.found()) == len(self._made)

    def set(self, swaps: dict[int, list[Swap]]) -> None:
        """Takes over views."""
        self.swaps = swaps
        every = [swap for each in swaps.values() for swap in each]
        self._made = None
        if all(type(s.param) is nn.Parameter and type(s.view) is Tensor for s in every):
            self._made = [(*s[:3], s.view.data_ptr(), s.view.dtype, s.view.shape) for s in every]


class WeightViews:
    """Gives the modules of blocks views of their weights.

    Args:
        hooks: Of the blocks.
        units: The weights.
    """

    def __init__(self, hooks: BlockHooks, units: Sequence[Unit]) -> None:
        self._hooks, self.units = hooks, units
        self._groups: list[Group] = []
        self._groups_for: Any = None
        self._alone = {unit.start: Group([unit]) for unit in units}
        self.ready: dict[int, list[Swap]] = {}
        """Of every unit, by its start."""
        self.fresh = False
        """Whether those were looked at in the forward pass that is running."""
        self._own: dict[nn.Module, list[Swap]] = {}
        """The weights that are replaced, of modules whose forward pass is running."""
        self._widened: list[Tensor] = []
        counts_of_lone()  # which takes a backward pass, so not in one
        for unit in units:
            self.widen(unit.params())

    def hook(self, unit: Unit) -> Iterator[Any]:
        """Registers the hooks of a unit; yields their handles."""
        module = unit.module
        yield module.register_forward_pre_hook(partial(self.replace, unit))
        # torch.compile of torch 2.11 loses count of hooks that were put before others.
        before = bool(module._forward_hooks)
        yield module.register_forward_hook(self.take_back, prepend=before, always_call=True)

    def prepare(self) -> None:
        """Makes the views for a forward pass of the model, unless those of the last one hold."""
        hooks = self._hooks
        for module in list(self._own):  # if an interrupt has left them
            self.take_back(module, None, None)
        if hooks.idle or hooks.captured:
            return
        # DDP reduces gradients in the order in which the views of this pass were made.
        now = hooks.exponents, hooks.measures, _stream(hooks.device)
        if self._groups_for != now or in_ddp():
            self.forget()
            self._groups, self._groups_for = [Group(units) for units in self._group()], now
        for group in self._groups:
            if not group.holds():
                # First, because they keep nodes of autograd alive that have the old shapes.
                for start in group.swaps:
                    self.ready.pop(start, None)
                group.swaps = {}
                group.set(self._lend(group))
                self.ready.update(group.swaps)
        self.fresh = True

    def _group(self) -> Iterator[list[Unit]]:
        """Units whose views are made together."""
        group: list[Unit] = []
        size = 0
        for unit in self.units:
            measures = self._hooks.measures
            if unit.gathers or not (measures or self._hooks.exponents[unit.place]):
                continue
            num = sum(param.numel() for param in unit.params() if param is not None)
            follows = group and unit.start == group[-1].start + len(group[-1].owners)
            if group and (size + num > _MOST or (measures and not follows)):
                yield group
                group, size = [], 0
            group.append(unit)
            size += num
        if group:
            yield group

    def _lend(self, group: Group) -> dict[int, list[Swap]]:
        """Views of the weights of `group`, by the start of the unit."""
        hooks, compiling = self._hooks, torch.compiler.is_compiling()
        found = group.found()
        group.num_frozen = sum(len(unit.owners) for unit in group.units) - len(found)
        made: dict[int, list[Swap]] = {unit.start: [] for unit in group.units}
        if not found:
            return made
        params = [param for *_, param in found]
        if not compiling:
            self._refuse(group, found)
            self.widen(params)
        places = tuple(unit.place for unit, *_ in found)
        factors: Any = hooks.factor_of_weights(places[0])
        if isinstance(factors, float) and len({hooks.exponents[place] for place in places}) > 1:
            factors = [hooks.factor_of_weights(place) for place in places]
        views = lend(
            factors,
            # In this order: whether it measures would be a constant of what is compiled.
            hooks.meters.of_weights(
                group.start, group.end, compiling or hooks.measures or hooks.captured
            ),
            tuple(slot for _, slot, *_ in found),
            places,
            hooks.mark,
            None if compiling else hooks.terms,
            *params,
        )
        for (unit, _, owned, name, param), view in zip(found, views, strict=True):
            made[unit.start].append(Swap(owned, name, param, view))
        return made

    def replace(self, unit: Unit, module: nn.Module, args: Any) -> None:
        """Replaces the weights of a unit by views: a forward pre-hook."""
        if not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            swaps = self._lend(self._alone[unit.start])[unit.start]
        elif self._hooks.idle:
            return
        else:
            if self._own:
                self.take_back(module, args, None)  # if an interrupt has left them
            swaps = self._swaps(unit)
        self._own[module] = swaps
        for owned, name, _, view in swaps:
            owned[name] = view

    def _swaps(self, unit: Unit) -> list[Swap]:
        """The views of the weights of `unit`, made for it alone if they are not ready."""
        hooks = self._hooks
        ready = self.ready.get(unit.start) if self.fresh else None
        # Not those that torch.func.functional_call has put in their place.
        if ready is not None and all(each.params[each.name] is each.param for each in ready):
            return ready
        if not (hooks.measures or hooks.captured or hooks.exponents[unit.place]):
            return []
        return self._lend(self._alone[unit.start])[unit.start]

    def take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        """Restores the weights of a module."""
        for owned, name, param, _ in self._own.pop(module, ()):
            owned[name] = param

    def forget(self) -> None:
        """Forgets the views."""
        self._groups, self._groups_for, self.ready = [], None, {}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: views cannot be copied."""
        self.forget()
        return self.__dict__

    def _refuse(self, group: Group, found: Iterable[Any]) -> None:
        """Raises if a weight is not whole, or may not have a gradient in float32."""
        hooks = self._hooks
        for unit in group.units:
            if type(unit.module) is not unit.kind:
                raise CallOrderError(
                    f"Block {hooks.blocks[unit.place].name!r} became a "
                    f"{type(unit.module).__name__} after BlockScales was created. Call "
                    "fully_shard() first."
                )
        for unit, _, _, _, param in found:
            if type(param) is not nn.Parameter and hasattr(param, "device_mesh"):
                raise SettingError(
                    f"Block {hooks.blocks[unit.place].name!r} has weights that are DTensors, which "
                    "BlockScales cannot scale. After fully_shard(), this happens if a part of a "
                    "sharded module is called directly. Leave the block out of blocks=."
                )
            if param.dtype is torch.float16 and not HAS_GRAD_DTYPE:
                raise SettingError(NO_GRAD_DTYPE)
            if param.dtype is torch.float16 and in_ddp():
                raise SettingError(
                    f"Block {hooks.blocks[unit.place].name!r} has float16 weights, whose gradients "
                    "are float32 with BlockScales, but DDP supports only float16 gradients for "
                    "them. Use float32 weights with autocast, or fully_shard()."
                )

    def widen(self, params: Iterable[Any]) -> None:
        """Sets `grad_dtype` of float16 weights to float32."""
        for param in params:
            if is_half(param) and param.grad_dtype is not torch.float32:
                param.grad_dtype = torch.float32
                self._widened.append(param)

    def remove(self) -> None:
        """Gives all weights back, as they were."""
        self.forget()
        for module in list(self._own):
            self.take_back(module, None, None)
        for param in self._widened:
            param.grad = None
            param.grad_dtype = param.dtype
        self._widened = []


def find_units(blocks: Sequence[Block]) -> list[Unit]:
    """The weights of all `blocks`, in order."""
    units: list[Unit] = []
    start = 0
    for place, block in enumerate(blocks):
        for member in block.modules:
            for module, owners in _owners(member).items():
                gathers = hasattr(module, "_get_fsdp_state")
                units.append(Unit(place, module, type(module), start, tuple(owners), gathers))
                start += len(owners)
    return units


def _owners(module: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """The weights of `module`, by the module whose forward pass gathers them."""
    units: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    waiting = [(module, module)]
    seen = set()
    while waiting:
        owner, unit = waiting.pop()
        if owner in seen:
            continue
        seen.add(owner)
        unit = owner if hasattr(owner, "_get_fsdp_state") else unit
        names = [(owner, name) for name, param in owner._parameters.items() if param is not None]
        if names:
            units.setdefault(unit, []).extend(names)
        waiting.extend((child, unit) for child in reversed(list(owner.children())))
    return units


def is_half(param: Any) -> bool:
    """Whether `param` is a float16 weight that gets a gradient."""
    return param is not None and param.requires_grad and param.dtype is torch.float16


def in_ddp() -> bool:
    """Whether the forward pass of a DDP module is running."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def _stream(device: torch.device) -> int:
    """The stream on which gradients are accumulated: that of the pass that made the views."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
