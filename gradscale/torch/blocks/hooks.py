"""The hooks that put a border around every block of a model while it runs.

Borders lie around what FSDP2 does to inputs and outputs; weights are replaced inside of that, where
they are gathered and their gradients are not reduced yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.blocks.chains import Block
from gradscale.torch.blocks.edges import OUTSIDE, cross, lend
from gradscale.torch.blocks.rule import ENTERING, LEAVING, WEIGHTS
from gradscale.torch.features import HAS_GRAD_DTYPE, TRACES_REPLACED_WEIGHTS

_marks = itertools.count()
_NO_GRAD_DTYPE = (
    f"BlockScales of float16 weights need torch.Tensor.grad_dtype, which torch {torch.__version__} "
    "does not have. Use torch 2.10 or later, or float32 weights with autocast."
)
_EARLY = 16
"""The first updates, in which gradients are measured every time."""


class BlockHooks:
    """The blocks of a model, the factors at their borders and what was measured there.

    Args:
        model: Whose blocks they are.
        blocks: The blocks, in order.
        every: Measure in every so many updates.
        ended: Called with what the model returned, after every forward pass that was not compiled.
    """

    def __init__(
        self, model: nn.Module, blocks: list[Block], every: int, ended: Callable[[Any], None]
    ) -> None:
        if not HAS_GRAD_DTYPE and any(map(_is_half, _params_of(blocks))):
            raise SettingError(_NO_GRAD_DTYPE)
        self._model, self.blocks, self._every, self._ended = model, blocks, every, ended
        self.mark = next(_marks)
        self._num_updates = 0
        self.made: list[tuple[Tensor, Any, Tensor, int]] = []
        """What the last block returned: behind its border, the `grad_fn` of that (None while
        compiling), the tensor before the border, and the place of the block."""
        self._own: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        """The weights that were replaced, of modules whose forward pass is running."""
        self._widened: list[Tensor] = []
        self.device = _device_of(blocks)
        self.factors = torch.ones(2, len(blocks), device=self.device)
        self._opened, self._shut = (row.unbind() for row in self.factors.unbind())
        self.amax = torch.zeros(3, len(blocks), device=self.device)
        self.meters = [[_meter(place) for place in row.unbind()] for row in self.amax.unbind()]
        self._handles = list(self._hook())

    def _hook(self) -> Iterator[Any]:
        """Registers the hooks; yields their handles."""
        for place, block in enumerate(self.blocks):
            enter, leave = partial(self._enter, place), partial(self._leave, place)
            yield block.modules[0].register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            units = (pair for module in block.modules for pair in _units(module).items())
            for unit, owners in units:
                yield unit.register_forward_pre_hook(partial(self._lend, place, type(unit), owners))
                # torch.compile of torch 2.11 loses count of hooks that were put before others.
                before = bool(unit._forward_hooks)
                yield unit.register_forward_hook(self._take_back, prepend=before, always_call=True)
                self._widen(owner._parameters[name] for owner, name in owners)
            yield block.modules[-1].register_forward_hook(leave)
        yield self._model.register_forward_hook(self._end)

    def _enter(
        self, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a block, behind its border: a forward pre-hook."""
        if not torch.is_grad_enabled():
            return None
        if not TRACES_REPLACED_WEIGHTS and torch.compiler.is_compiling():
            from gradscale.torch.blocks import refusal  # loads Dynamo, which is there by now

            refusal.refuse_graph()
        if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:  # 0.1 ms less
            return (self._arrive(place, args[0]),), kwargs
        return tree_map_only(Tensor, partial(self._arrive, place), (args, kwargs))

    def _arrive(self, place: int, x: Tensor) -> Tensor:
        """`x` inside of the block at `place`."""
        if not x.requires_grad:
            return x
        if x.device != self.device:
            raise CallOrderError(
                f"The model was on {self.device} when BlockScales was made, and block "
                f"{self.blocks[place].name!r} is called on {x.device}. Make it after .to(device), "
                "one for each device."
            )
        shut, leaving = self._shut[place], self._meter(LEAVING, place)
        for seen, node, made, maker in self.made:
            if seen is x and _is_untouched(x, node):
                route, entering = (self.mark, place, maker), self._meter(ENTERING, maker)
                return cross(made, self._opened[maker], shut, entering, leaving, route)
        return cross(x, None, shut, None, leaving, (self.mark, place, OUTSIDE))

    def _leave(self, place: int, module: nn.Module, args: Any, output: Any) -> Any:
        """The output of a block, behind its border: a forward hook."""
        if not torch.is_grad_enabled():
            return None
        self.made = []
        if isinstance(output, Tensor):
            return self._depart(place, output)
        return tree_map_only(Tensor, partial(self._depart, place), output)

    def _depart(self, place: int, made: Tensor) -> Tensor:
        """`made`, which the block at `place` has computed, outside of it."""
        if not made.requires_grad:
            return made
        route = (self.mark, OUTSIDE, place)
        entering = self._meter(ENTERING, place)
        seen = cross(made, self._opened[place], None, entering, None, route)
        node = None if torch.compiler.is_compiling() else seen.grad_fn
        self.made.append((seen, node, made, place))
        return seen

    def _lend(
        self,
        place: int,
        kind: type,
        owners: Sequence[tuple[nn.Module, str]],
        module: nn.Module,
        args: Any,
    ) -> None:
        """Replaces the weights of a module by views behind the border of the block at `place`."""
        if not torch.is_grad_enabled():
            return
        if type(module) is not kind:
            raise CallOrderError(
                f"Block {self.blocks[place].name!r} has become a {type(module).__name__} since "
                "BlockScales was made. Call fully_shard() first."
            )
        self._take_back(module, args, None)  # if an interrupt has left them
        own = [(owner, name, owner._parameters[name]) for owner, name in owners]
        lent = [(o, n, param) for o, n, param in own if param is not None and param.requires_grad]
        if not lent:
            return
        params = [param for _, _, param in lent]
        if not torch.compiler.is_compiling():
            self._refuse(place, params)
            self._widen(params)
        route = (self.mark, place, OUTSIDE)
        views = lend(self._shut[place], self._meter(WEIGHTS, place), route, *params)
        self._own[module] = lent
        for (owner, name, _), view in zip(lent, views, strict=True):
            owner._parameters[name] = view  # type: ignore[assignment]

    def _take_back(self, module: nn.Module, args: Any, output: Any) -> None:
        """Restores the weights of a module."""
        for owner, name, param in self._own.pop(module, ()):
            owner._parameters[name] = param

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a forward pass of the model."""
        self.made = []
        if not torch.compiler.is_compiling():
            self._ended(output)

    def end_update(self) -> bool:
        """Ends the passes of one update; whether the largest gradients were measured in them."""
        self.made = []
        measured = self._is_due() or torch.compiler.is_compiling()
        self._num_updates += 1
        return measured

    def _meter(self, row: int, place: int) -> Tensor | None:
        """Where the largest gradient of a block goes, in an update in which it is measured."""
        # In this order: the number would be a constant of what is compiled.
        if torch.compiler.is_compiling() or self._is_due():
            return self.meters[row][place]
        return None

    def _is_due(self) -> bool:
        """Whether the update that comes next measures."""
        return self._num_updates < _EARLY or self._num_updates % self._every == 0

    def _refuse(self, place: int, params: Iterable[Tensor]) -> None:
        """Raises if one of `params` is not whole, or may not have a gradient in float32."""
        for param in params:
            if type(param) is not nn.Parameter and hasattr(param, "device_mesh"):
                raise SettingError(
                    f"Block {self.blocks[place].name!r} has weights that are DTensors, which "
                    "BlockScales cannot scale. After fully_shard() that happens when a part of a "
                    "sharded module is called on its own. Leave the block out of blocks=."
                )
            if param.dtype is torch.float16 and not HAS_GRAD_DTYPE:
                raise SettingError(_NO_GRAD_DTYPE)
            in_ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None
            if param.dtype is torch.float16 and in_ddp:
                raise SettingError(
                    f"Block {self.blocks[place].name!r} has float16 weights, whose gradients are "
                    "float32 with BlockScales, and DDP takes float16 alone. Use float32 weights "
                    "with autocast, or fully_shard()."
                )

    def _widen(self, params: Iterable[Any]) -> None:
        """Sets `grad_dtype` of float16 weights to float32."""
        for param in params:
            if _is_half(param) and param.grad_dtype is not torch.float32:
                param.grad_dtype = torch.float32
                self._widened.append(param)

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        for module in list(self._own):
            self._take_back(module, None, None)
        for param in self._widened:
            param.grad = None
            param.grad_dtype = param.dtype
        self._handles, self._widened, self.made = [], [], []


def _is_untouched(x: Tensor, node: Any) -> bool:
    """Whether `x`, made by `node`, was not written to since, and has no hooks on its gradient."""
    if torch.compiler.is_compiling():
        return True
    return x.grad_fn is node and not x._backward_hooks and not x.retains_grad


def _meter(place: Tensor) -> Tensor:
    """A number whose gradient is added up in `place`."""
    meter = torch.zeros_like(place).requires_grad_()
    meter.grad = place
    return meter


def _device_of(blocks: Sequence[Block]) -> torch.device:
    """The device of all weights of `blocks`."""
    members = (module for block in blocks for module in block.modules)
    devices = {param.device for module in members for param in module.parameters()}
    if len(devices) != 1:
        raise SettingError(
            "blocks must have weights on one device, got "
            f"{', '.join(sorted(map(str, devices))) or 'no weights'}. Make one BlockScales for the "
            "blocks of each device."
        )
    return devices.pop()


def _units(module: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """The weights of `module`, as (owner, name), by the module whose forward pass gathers them.

    That is `module` itself, or modules below it that FSDP2 has sharded on their own.
    """
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


def _is_half(param: Any) -> bool:
    """Whether `param` is a float16 weight that gets a gradient."""
    return param is not None and param.requires_grad and param.dtype is torch.float16


def _params_of(blocks: list[Block]) -> Iterator[nn.Parameter]:
    """The parameters of all modules of `blocks`."""
    return (param for block in blocks for each in block.modules for param in each.parameters())
