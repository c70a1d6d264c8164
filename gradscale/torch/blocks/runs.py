"""Runs: blocks that are called one after the other, with nothing in between.

In most models, and in all passes that look like the last one that measured, the output of a block
is the input of the next one, and nobody else uses it. Then it needs no border of its own, and the
block no hooks: while the model runs, `Runs` is called in their place, which takes a microsecond or
two. Where the scale changes there is one border between the two blocks.

That nobody else uses an output is an assumption, and every pass checks it. Autograd numbers its
operations: if none was made between the end of a block and the beginning of the next, none has used
anything. And what nobody refers to any more cannot be used later. If a pass turns out to be another
one after all, all of its scales are taken as 1 (`Terms`): its gradients are those without
BlockScales. The outputs that were used have a border from then on.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscale.torch.blocks.edges import change, is_untouched
from gradscale.torch.blocks.references import extra, is_held, uses
from gradscale.torch.blocks.units import Unit

if TYPE_CHECKING:
    from gradscale.torch.blocks.hooks import BlockHooks

_number: Any = getattr(torch.autograd, "_get_sequence_nr", None)
"""The number of the operation that autograd will record next, in this thread; None if this torch
does not say so."""


class Call(NamedTuple):
    """A call of a block in a pass that measures."""

    place: int
    maker: int | None
    """The block whose output was the only argument; None if it was something else."""


class Part(NamedTuple):
    """A module of a block, and what has to be done when it is called."""

    place: int
    module: nn.Module
    unit: Unit | None
    first: bool
    last: bool


class Runs:
    """Calls the modules of blocks, and checks that they are called one after the other.

    Args:
        hooks: Of the blocks.
        units: The weights of the blocks.
    """

    def __init__(self, hooks: BlockHooks, units: Sequence[Unit]) -> None:
        self._hooks = hooks
        self.on = False
        """Whether a pass is running whose blocks are called from here."""
        self.calls: list[Call] = []
        """Those of a pass that measures."""
        self._watched: tuple[int, list[Tensor]] | None = None
        self._shared: set[int] = set()
        """The blocks whose outputs somebody else has used, or may use."""
        self._inner: set[int] = set()
        """The blocks whose outputs need no border."""
        self._parts = list(_parts(hooks, units))
        self._callers: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        self._output: Tensor | None = None
        """What the last block has returned, if it has no border."""
        self._maker = 0
        self._before: list[Tensor] = []
        """The input of the last block, if it had no border of its own."""
        self._before_maker = 0
        self._version = 0
        self._at = -1
        """The number of the next operation when the last block returned."""

    # What passes that measure have to say.

    def note(self, place: int, maker: int | None, x: Any) -> None:
        """Notes a call in a pass that measures, with what it was given."""
        if self._watched is not None and is_held(self._watched[1]):
            self._shared.add(self._watched[0])
        self._watched = None if maker is None else (maker, [x])
        self.calls.append(Call(place, maker))

    def plan(self) -> None:
        """Takes over what was noted in the last pass that measured."""
        self._shared |= self._hooks.terms.used
        calls, self.calls = self.calls, []
        if calls:
            places = [call.place for call in calls]
            # What the output of a block is used for is known when the block after it is done, and
            # the one after that is called.
            self._inner = {
                one.place
                for one, two, three in zip(calls, calls[1:], calls[2:], strict=False)
                if two.maker == one.place and three.maker == two.place
            }
            self._inner -= {place for place in places if places.count(place) > 1}
        self._inner -= self._shared

    def forget(self) -> None:
        """Forgets the tensors of a pass."""
        self._watched, self._output, self._before = None, None, []

    # A pass.

    def begin(self) -> None:
        """Begins a forward pass of the model that does not measure."""
        if not self._inner or _number is None or torch._C._current_graph_task_id() != -1:
            return
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state():
            return
        if extra() is None or _has_global_hooks():
            return
        self._hooks.terms.holds = False  # until the pass has ended as it should
        self.on = True
        if not self._callers:
            self._callers = [(part.module.__dict__, self._caller(part)) for part in self._parts]
        for module, caller in self._callers:
            if module.get("_compiled_call_impl") is None:
                module["_compiled_call_impl"] = caller

    def end(self) -> None:
        """Ends a forward pass of the model, also one that has raised."""
        if not self.on:
            return
        self.on = False
        for module, caller in self._callers:
            if module.get("_compiled_call_impl") is caller:
                del module["_compiled_call_impl"]

    def close(self) -> None:
        """After a forward pass of the model that has not raised: whether it was as expected."""
        self.settle()
        terms = self._hooks.terms
        terms.holds = not terms.void

    def settle(self) -> None:
        """Something else than the next block of a run uses what there is, or may have done so."""
        if self._output is not None:
            self._share(self._maker)
        elif self._before and (_number() != self._at or self._is_used()):
            self._share(self._before_maker)
        self._output, self._before = None, []

    def _is_used(self) -> bool:
        """Whether somebody else may use the input of the last block."""
        return is_held(self._before) or not is_untouched(self._before[0])

    def _share(self, maker: int) -> None:
        """The output of a block is used by others: the scales of this pass are off."""
        self._hooks.terms.void = True
        makers = {maker, self._before_maker} if self._before else {maker}
        self._shared |= makers
        self._inner -= makers

    def _caller(self, part: Part) -> Callable[..., Any]:
        """What is called instead of a module.

        Most of the time that BlockScales takes is spent here, so it calls as little as it can.
        """
        place, module, unit, first, last = part
        hooks, weights = self._hooks, self._hooks.weights
        own, start = hooks.num_hooks[module], -1 if unit is None else unit.start
        befores, afters = module._forward_pre_hooks, module._forward_hooks
        backs, befores_back = module._backward_hooks, module._backward_pre_hooks
        # begin() has asked whether everything is compiled; that is two calls less.
        is_compiling, count = torch.compiler.is_dynamo_compiling, sys.getrefcount
        weakly = weakref.getweakrefcount
        is_grad_enabled, tensor = torch.is_grad_enabled, Tensor
        number, more = _number, extra() or 0

        def call(*args: Any, **kwargs: Any) -> Any:
            if (
                kwargs
                or len(args) != 1
                or type(x := args[0]) is not tensor
                or not is_grad_enabled()
                or len(befores) + len(afters) != own
                or backs
                or befores_back
                or is_compiling()
            ):
                return module._call_impl(*args, **kwargs)
            swaps = weights.ready.get(start, ())
            for owned, name, param, _ in swaps:
                if owned[name] is not param:  # torch.func.functional_call has replaced it
                    return module._call_impl(*args, **kwargs)
            if first:
                if (
                    x is self._output
                    and number() == self._at
                    and not x._backward_hooks
                    and not x.retains_grad
                ):
                    before = self._before
                    if before and (
                        count(before[0]) > 2 + more * (uses(before[0]) > 1)
                        or weakly(before[0])
                        or before[0]._backward_hooks
                        or before[0].retains_grad
                    ):
                        self._share(self._before_maker)
                    self._output, self._before = None, [x]
                    self._before_maker = maker = self._maker
                    self._version = x._version
                    if hooks.exponents[place] != hooks.exponents[maker]:
                        route = (hooks.mark, place, maker)
                        x = change(x, hooks.factor(place, maker), route, hooks.live)
                else:
                    self.settle()
                    x = hooks.arrive(place, x)
            for owned, name, _, view in swaps:
                owned[name] = view
            try:
                y = module.forward(x)
            finally:
                for owned, name, param, _ in swaps:
                    owned[name] = param
            if not last:
                return y
            before = self._before
            if before and before[0]._version != self._version:
                hooks.refuse_write(place)
            if place in self._inner and type(y) is tensor:
                if hooks.made or hooks.given:
                    hooks.drop()
                self._output, self._maker = y, place
            else:
                self._output = None
                y = hooks.depart(place, y)
            self._at = number()
            return y

        return call

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: no functions, which belong to the modules of the original."""
        self.forget()
        return {**self.__dict__, "_callers": []}


def _parts(hooks: BlockHooks, units: Sequence[Unit]) -> Iterator[Part]:
    """The modules of blocks that can be called without their hooks."""
    for place, block in enumerate(hooks.blocks):
        own = {unit.module: unit for unit in units if unit.place == place}
        is_plain = set(own) <= set(block.modules) and not any(u.gathers for u in own.values())
        if not is_plain or not all(map(_is_plain, block.modules)):
            continue
        num = len(block.modules)
        for index, module in enumerate(block.modules):
            part = Part(place, module, own.get(module), index == 0, index == num - 1)
            if part.first or part.last or part.unit is not None:
                yield part


def _has_global_hooks() -> bool:
    """Whether there are hooks that every module calls.

    torch has a function for it from 2.8 on; these are in all versions.
    """
    torch_modules = nn.modules.module
    return bool(
        torch_modules._global_forward_pre_hooks
        or torch_modules._global_forward_hooks
        or torch_modules._global_backward_pre_hooks
        or torch_modules._global_backward_hooks
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of `module` does nothing but to call its hooks and `forward()`."""
    kind = type(module)
    return (
        kind.__call__ is nn.Module.__call__
        and kind._call_impl is nn.Module._call_impl
        and hasattr(nn.Module, "_compiled_call_impl")
        and not isinstance(module, torch.jit.ScriptModule)
    )
