"""The weights of blocks, which views stand in for while the blocks run.

The division happens where a weight is used, not at the weight: so DDP, FSDP2, accumulation, a
penalty on the weights and the scaler see ordinary gradients, and ranks need not agree. The views of
blocks with one scale are made together, at the beginning of a forward pass of the model, so that
their gradients are divided by one call. A block that is called on its own makes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.blocks.chains import Block
from gradscale.torch.blocks.edges import OUTSIDE, Live, is_one, lend

if TYPE_CHECKING:
    from gradscale.torch.blocks.hooks import BlockHooks

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


class Lent(NamedTuple):
    """A weight, and its view."""

    owner: nn.Module
    name: str
    param: Any
    view: Tensor


class WeightViews:
    """Gives the modules of blocks views of their weights.

    Args:
        hooks: Of the blocks.
        units: The weights.
    """

    def __init__(self, hooks: BlockHooks, units: Sequence[Unit]) -> None:
        self._hooks, self.units = hooks, units
        self._groups: list[list[Unit]] = []
        self._groups_for: Any = None
        self._ready: dict[int, list[Lent]] = {}
        """Views that were made at the beginning of a forward pass, by the start of the unit."""
        self._own: dict[nn.Module, list[Lent]] = {}
        """The weights that are replaced, of modules whose forward pass is running."""
        self._widened: list[Tensor] = []
        for unit in units:
            self.widen(unit.params())

    def hook(self, unit: Unit) -> Iterator[Any]:
        """Registers the hooks of a unit; yields their handles."""
        module = unit.module
        yield module.register_forward_pre_hook(partial(self._replace, unit))
        # torch.compile of torch 2.11 loses count of hooks that were put before others.
        before = bool(module._forward_hooks)
        yield module.register_forward_hook(self._take_back, prepend=before, always_call=True)

    def prepare(self) -> None:
        """Makes the views for a forward pass of the model."""
        self._ready = {}
        hooks = self._hooks
        if hooks.is_idle or hooks.captured:
            return
        now = hooks.exponents, hooks.measures
        if self._groups_for != now:
            self._groups, self._groups_for = list(self._group()), now
        for group in self._groups:
            self._ready.update(self._lend(group))

    def _group(self) -> Iterator[list[Unit]]:
        """Units that follow each other and have one scale."""
        group: list[Unit] = []
        size = 0
        for unit in self.units:
            exponent = self._hooks.exponents[unit.place]
            if unit.gathers or not (exponent or self._hooks.measures):
                continue
            num = sum(param.numel() for param in unit.params() if param is not None)
            together = group and exponent == self._hooks.exponents[group[-1].place]
            follows = group and unit.start == group[-1].start + len(group[-1].owners)
            if group and not (together and follows and size + num <= _MOST):
                yield group
                group, size = [], 0
            group.append(unit)
            size += num
        if group:
            yield group

    def _lend(self, units: Sequence[Unit]) -> dict[int, list[Lent]]:
        """Views of the weights of `units`, which have one scale, by the start of the unit."""
        hooks, compiling = self._hooks, torch.compiler.is_compiling()
        start = units[0].start
        end = units[-1].start + len(units[-1].owners)
        found: list[tuple[int, int, nn.Module, str, Any]] = []
        for unit in units:
            if type(unit.module) is not unit.kind:
                raise CallOrderError(
                    f"Block {hooks.blocks[unit.place].name!r} has become a "
                    f"{type(unit.module).__name__} since BlockScales was made. Call fully_shard() "
                    "first."
                )
            for slot, (owner, name) in enumerate(unit.owners, unit.start - start):
                param = owner._parameters[name]
                if param is not None and param.requires_grad:
                    found.append((unit.place, slot, owner, name, param))
        if not found:
            return {}
        params = [param for *_, param in found]
        if not compiling:
            self._refuse(found)
            self.widen(params)
        views = lend(
            hooks.factor(units[0].place, OUTSIDE),
            hooks.meters.of_weights(start, end, hooks.measures),
            tuple(slot for _, slot, *_ in found),
            tuple(place for place, *_ in found),
            hooks.mark,
            None if compiling else Live(hooks.clock, hooks.clock.time),
            *params,
        )
        lent = [Lent(*each[2:], view) for each, view in zip(found, views, strict=True)]
        if len(units) == 1:
            return {start: lent}
        made: dict[int, list[Lent]] = {unit.start: [] for unit in units}
        starts = [unit.start for unit in units for _ in unit.owners]
        for (_, slot, *_), each in zip(found, lent, strict=True):
            made[starts[slot]].append(each)
        return made

    def _replace(self, unit: Unit, module: nn.Module, args: Any) -> None:
        """Replaces the weights of a unit by views: a forward pre-hook."""
        hooks = self._hooks
        if not torch.is_grad_enabled() or hooks.is_idle:
            return
        self._take_back(module, args, None)  # if an interrupt has left them
        lent = None if torch.compiler.is_compiling() else self._ready.get(unit.start)
        if lent is None or not all(o._parameters[n] is param for o, n, param, _ in lent):
            factor = hooks.factor(unit.place, OUTSIDE)
            if is_one(factor) and not hooks.measures and not torch.compiler.is_compiling():
                return
            lent = self._lend([unit]).get(unit.start, [])
        self._own[module] = lent
        for owner, name, _, view in lent:
            owner._parameters[name] = view  # type: ignore[assignment]

    def _take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        """Restores the weights of a module."""
        for owner, name, param, _ in self._own.pop(module, ()):
            owner._parameters[name] = param

    def _refuse(self, found: Iterable[tuple[int, int, nn.Module, str, Any]]) -> None:
        """Raises if a weight is not whole, or may not have a gradient in float32."""
        for place, _, _, _, param in found:
            if type(param) is not nn.Parameter and hasattr(param, "device_mesh"):
                raise SettingError(
                    f"Block {self._hooks.blocks[place].name!r} has weights that are DTensors, "
                    "which BlockScales cannot scale. After fully_shard() that happens when a part "
                    "of a sharded module is called on its own. Leave the block out of blocks=."
                )
            if param.dtype is torch.float16 and in_ddp():
                raise SettingError(
                    f"Block {self._hooks.blocks[place].name!r} has float16 weights, whose "
                    "gradients are float32 with BlockScales, and DDP takes float16 alone. Use "
                    "float32 weights with autocast, or fully_shard()."
                )

    def widen(self, params: Iterable[Any]) -> None:
        """Sets `grad_dtype` of float16 weights to float32."""
        for param in params:
            if is_half(param) and param.grad_dtype is not torch.float32:
                param.grad_dtype = torch.float32
                self._widened.append(param)

    def forget(self) -> None:
        """Forgets the views of a forward pass."""
        self._ready = {}

    def remove(self) -> None:
        """Gives all weights back, as they were."""
        for module in list(self._own):
            self._take_back(module, None, None)
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
        waiting.extend((child, unit) for child in owner.children())
    return units


def is_half(param: Any) -> bool:
    """Whether `param` is a float16 weight that gets a gradient."""
    return param is not None and param.requires_grad and param.dtype is torch.float16


def in_ddp() -> bool:
    """Whether the forward pass of a DDP module is running."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
