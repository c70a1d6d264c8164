"""Runs: blocks that are called one after the other, with nothing in between.

In most models, and in all passes that look like the last one that measured, the output of a block
is the input of the next one, and nobody else uses it. Then it needs no border of its own, and the
block no hooks: while the model runs, `Runs` is called in their place, which takes a microsecond or
two. Where the scale changes, the operation that has made the output gets a hook that multiplies its
gradient: no operation is added to the graph.

That nobody else uses an output is an assumption, and every pass checks it. Autograd numbers its
operations: if none was made between the end of a block and the beginning of the next, none has used
anything. And what nobody refers to any more cannot be used later. If a pass turns out to be another
one after all, all of its scales are taken as 1 (`Terms`): its gradients are those without
BlockScales. The outputs that were used have a border from then on.

The last run of a pass mostly has the scale 1, as what comes after it has. For its blocks there is
nothing to do, so what is called is `forward()`: they are like operations outside of all blocks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gradscale.torch.blocks.edges import Change, is_untouched
from gradscale.torch.blocks.gaps import step_from
from gradscale.torch.blocks.references import extra, is_held, uses
from gradscale.torch.blocks.units import Unit

if TYPE_CHECKING:
    from gradscale.torch.blocks.hooks import BlockHooks

_number: Any = getattr(torch.autograd, "_get_sequence_nr", None)
"""The number of the operation that autograd will record next, in this thread; None if this torch
does not say so."""


class Source(NamedTuple):
    """Where the only argument of a block came from, in a pass that measures."""

    maker: int
    """The block whose output it was, or was made from by one operation."""
    output: list[Tensor]
    """That output."""
    made: list[Tensor] | None = None
    """What the operation has made from it."""

    def is_used(self) -> bool:
        """Whether somebody else may use it."""
        # The border of a block with a gap before it refers to its input.
        return is_held(self.output) or (self.made is not None and is_held(self.made, known=1))


class Call(NamedTuple):
    """A call of a block in a pass that measures."""

    place: int
    maker: int | None
    """Of the source of its argument; None if there is none."""


class Part(NamedTuple):
    """A module of a block, and what has to be done when it is called."""

    place: int
    module: nn.Module
    unit: Unit | None
    first: bool
    last: bool


class End(NamedTuple):
    """The last run of a pass, if it has the scale 1."""

    first: int | None
    """Its first block, if the block before it has no border: it has none itself."""
    next: int | None
    """The block after that: when it is called, it is known who has used what was before."""
    free: frozenset[int]
    """The blocks for which there is nothing else to do."""


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
        self._watched: Source | None = None
        self._shared: set[int] = set()
        """The blocks whose outputs somebody else has used, or may use."""
        self._inner: set[int] = set()
        """The blocks whose outputs need no border."""
        self._order: list[int] = []
        """The blocks, as they were called in the last pass that measured."""
        self._end = End(None, None, frozenset())
        self._planned: Any = None
        self._parts = list(_parts(hooks, units))
        self._callers: list[tuple[Part, Callable[..., Any], Callable[..., Any]]] = []
        """What to call instead of each module: in general, and in the last run."""
        self._called: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        """What is called while a pass is running."""
        self._output: Tensor | None = None
        """What the last block has returned, if it has no border."""
        self._maker = 0
        self._entered = 0
        """The id of the input of the block that is running."""
        self._before: list[Tensor] = []
        """The input of the last block, if it had no border of its own."""
        self._before_maker = 0
        self._behind: list[Tensor] = []
        """What that was made from, by one operation, if it was no output itself."""
        self._version = 0
        self._at = -1
        """The number of the next operation when the last block returned."""

    # What passes that measure have to say.

    def note(self, place: int, source: Source | None) -> None:
        """Notes a call in a pass that measures, with the source of its argument."""
        if self._watched is not None and self._watched.is_used():
            self._shared.add(self._watched.maker)
        self._watched = source
        self.calls.append(Call(place, None if source is None else source.maker))

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
            self._order = places
        self._inner -= self._shared
        now = self._inner, self._hooks.exponents, self._order
        if self._planned != now:
            self._planned = set(self._inner), list(self._hooks.exponents), self._order
            self.end()  # if an interrupt has left them
            self._end, self._called = self._find_end(), []

    def _find_end(self) -> End:
        """The last blocks that have the scale 1.

        A gradient that comes to them from anywhere has their scale already.
        """
        order, exponents = self._order, self._hooks.exponents
        if not any(exponents):
            return End(None, None, frozenset(range(len(exponents))))
        first = len(order)
        while first and not exponents[order[first - 1]]:
            first -= 1
        if not 0 < first < len(order):
            return End(None, None, frozenset())
        if order[first - 1] not in self._inner:
            return End(None, order[first], frozenset(order[first:]) - frozenset(order[:first]))
        free = frozenset(order[first + 1 :]) - frozenset(order[: first + 1])
        return End(order[first], order[first + 1], free)

    def forget(self) -> None:
        """Forgets the tensors of a pass."""
        self._watched, self._output, self._before, self._behind = None, None, [], []

    # A pass.

    def begin(self) -> None:
        """Begins a forward pass of the model that does not measure."""
        hooks = self._hooks
        if not (self._inner or self._end.free) or torch._C._current_graph_task_id() != -1:
            return
        if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state():
            return
        if _number is None or extra() is None or _has_global_hooks():
            return
        if not self._callers:
            self._callers = [
                (part, self._caller(part), self._free_caller(part)) for part in self._parts
            ]
        if not self._called:
            free = self._end.free
            self._called = [
                (part.module.__dict__, freely if part.place in free else caller)
                for part, caller, freely in self._callers
            ]
        if not hooks.idle:
            hooks.terms.holds = False  # until the pass has ended as it should
        self.on = True
        for module, caller in self._called:
            if module.get("_compiled_call_impl") is None:
                module["_compiled_call_impl"] = caller

    def end(self) -> None:
        """Ends a forward pass of the model, also one that has raised."""
        if not self.on:
            return
        self.on = False
        for module, caller in self._called:
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
        self._output, self._before, self._behind = None, [], []

    def _is_used(self) -> bool:
        """Whether somebody else may use the input of the last block."""
        cells = (self._before, self._behind) if self._behind else (self._before,)
        return any([is_held(cell) or not is_untouched(cell[0]) for cell in cells])  # noqa: C419

    def _behind_step(self, x: Tensor) -> Tensor | None:
        """The last output, if one operation has made `x` from it and nothing else was done."""
        output, node = self._output, x.grad_fn
        if output is None or node is None or _number() != self._at + 1:
            return None
        return output if step_from(node) == (output.grad_fn, output.output_nr) else None

    def _share(self, maker: int) -> None:
        """The output of a block is used by others: the scales of this pass are off."""
        self._hooks.terms.void = True
        for x in (*self._before, *self._behind):
            self._hooks.watch(x)
        makers = {maker, self._before_maker} if self._before else {maker}
        if self._behind:  # the operation comes after the border that there will be
            pairs = zip(self._order, self._order[1:], strict=False)
            makers |= {one for one, two in pairs if two == self._before_maker}
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
        number, most = _number, 2 + (extra() or 0)

        def call(*args: Any, **kwargs: Any) -> Any:
            if (
                kwargs
                or len(args) != 1
                or len(befores) + len(afters) != own
                or backs
                or befores_back
                or not is_grad_enabled()
                or is_compiling()
                or type(x := args[0]) is not tensor
            ):
                return module._call_impl(*args, **kwargs)
            swaps = weights.ready.get(start, ())
            for owned, name, param, _ in swaps:
                if owned[name] is not param:  # torch.func.functional_call has replaced it
                    return module._call_impl(*args, **kwargs)
            directly = first and x is self._output and number() == self._at
            if first:
                behind = None if directly else self._behind_step(x)
                if directly or behind is not None:
                    before = self._before
                    if self._behind and self._is_used():
                        self._share(self._before_maker)
                    elif before and (
                        # A tensor that a graph has saved may count one more: see extra().
                        ((num := count(before[0])) > 2 and (num > most or uses(before[0]) < 2))
                        or weakly(before[0])
                        or before[0]._backward_hooks
                    ):
                        self._share(self._before_maker)
                    maker = self._maker
                    self._output, self._before, self._before_maker = None, [x], maker
                    self._version, self._behind = x._version, []
                    if behind is not None:
                        self._behind, directly = [behind], True
                    if hooks.exponents[place] != hooks.exponents[maker]:
                        self._change(x if behind is None else behind, place, maker)
                else:
                    self.settle()
                    x = hooks.arrive(place, x)
                self._entered = id(x)
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
            if not directly:
                hooks.drop()
            if place == self._end.first:
                self._output = None
                self._at = number()
                return y
            # What came in may have been used before.
            if place in self._inner and type(y) is tensor and id(y) != self._entered:
                self._output, self._maker = y, place
                self._at = number()
                return y
            self._output = None
            y = hooks.depart(place, y)
            self._at = number()
            return y

        return call

    def _change(self, x: Tensor, place: int, maker: int) -> None:
        """Has the gradient of `x` go from the scale of a block to that of the block before it."""
        node = x.grad_fn
        if node is None:  # a leaf, which a gradient comes to without a scale
            self._share(maker)
        else:
            hooks = self._hooks
            node.register_prehook(Change(x.output_nr, hooks.factor(place, maker), hooks.live))

    def _free_caller(self, part: Part) -> Callable[..., Any]:
        """What is called instead of a module of the last run."""
        module, own = part.module, self._hooks.num_hooks[part.module]
        befores, afters = module._forward_pre_hooks, module._forward_hooks
        backs, befores_back = module._backward_hooks, module._backward_pre_hooks
        is_compiling = torch.compiler.is_dynamo_compiling

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(befores) + len(afters) != own or backs or befores_back or is_compiling():
                return module._call_impl(*args, **kwargs)
            if self._before and part.place == self._end.next:
                self.settle()
            return module.forward(*args, **kwargs)

        return call

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: no functions, which belong to the modules of the original."""
        self.forget()
        return {**self.__dict__, "_callers": [], "_called": []}


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
