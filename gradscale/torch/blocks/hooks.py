"""The hooks that put borders around the blocks of a model while it runs.

Where two neighbours have the same scale there is no border between them, unless gradients are
measured there. And where all scales are 1 there are none at all. In passes that do not measure,
most blocks are called without their hooks (runs.py).

Borders lie around what FSDP2 does to inputs and outputs; weights are replaced inside of that, where
they are gathered and their gradients are not reduced yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.blocks.additions import Additions
from gradscale.torch.blocks.chains import Block, device_of
from gradscale.torch.blocks.edges import (
    OUTSIDE,
    Clock,
    Factor,
    Live,
    Terms,
    enter,
    enter_now,
    is_one,
    is_untouched,
    leave,
    leave_now,
)
from gradscale.torch.blocks.gaps import Gap
from gradscale.torch.blocks.meters import ENTERING, LEAVING, Meters
from gradscale.torch.blocks.runs import Runs, Source
from gradscale.torch.blocks.units import (
    NO_GRAD_DTYPE,
    Unit,
    WeightViews,
    find_units,
    in_ddp,
    is_half,
)
from gradscale.torch.features import HAS_GRAD_DTYPE, TRACES_REPLACED_WEIGHTS

_marks = itertools.count()


class BlockHooks:
    """The blocks of a model, the factors at their borders and what was measured there.

    Args:
        model: Whose blocks they are.
        blocks: The blocks, in order.
        ended: Called with what the model returned, after every forward pass that was not compiled.
    """

    def __init__(self, model: nn.Module, blocks: list[Block], ended: Callable[[Any], None]) -> None:
        self._model, self.blocks, self._ended = model, blocks, ended
        self.mark = next(_marks)
        self.clock = Clock()
        self.measures = True
        """Whether the passes up to the next update measure; compiled ones always do."""
        self.captured = False
        """Whether a CUDA graph may use the scales: then the host does not know them."""
        self.exponents = [0] * len(blocks)
        """As the host knows them."""
        self.reasons: dict[int, str] = {}
        """Why the scale of a block is taken out of the gradients of its inputs, by place."""
        self.made: list[tuple[Tensor, Any, Tensor, int]] = []
        """What the last block returned: behind its border, the `grad_fn` of that (None while
        compiling), the tensor before the border, and the place of the block."""
        self.given: list[tuple[int, Tensor, int]] = []
        """Inputs without a border: the place of the block, the tensor and its version."""
        self._direct: Source | None = None
        """Where the last input came from, None if it was something else than a block."""
        self._used: set[Any] = set()
        """The operations of all gaps of this forward pass."""
        self._watched: set[Any] = set()
        """The operations that have made inputs of blocks whose gradients somebody wants."""
        self._known_gaps: dict[int, set[tuple[str, ...]]] = {}
        """The operations in gaps since the last pass that measured, by place."""
        self._returned = False
        """Whether the last forward pass has come to its end."""
        self.device = device_of(blocks)
        self.factors = torch.ones(2, len(blocks), device=self.device)
        self._opened, self._shut = (row.unbind() for row in self.factors.unbind())
        units = find_units(blocks)
        if not HAS_GRAD_DTYPE and any(is_half(param) for unit in units for param in unit.params()):
            raise SettingError(NO_GRAD_DTYPE)
        self.additions = Additions(model, blocks)
        self.meters = Meters(len(blocks), units, self.factors)
        self.terms = Terms()
        self.weights = WeightViews(self, units)
        self.runs = Runs(self, units)
        self._out_for: Any = None
        self._is_sharded = any(map(_is_dtensor, model.parameters()))
        self._params: set[int] = set()
        """The ids of the weights that are whole, once a pass has begun."""
        self.refresh()
        modules = [module for block in blocks for module in block.modules]
        before = [_num_hooks(module) for module in modules]
        self._handles = list(self._hook(units))
        self.num_hooks = {
            module: _num_hooks(module) - num for module, num in zip(modules, before, strict=True)
        }
        """How many of the hooks of a module are those of its block."""

    def refresh(self) -> None:
        """Has the next passes use `measures`, `captured` and `exponents` as they are now."""
        self.clock.time += 1
        self.runs.plan()
        self._renew()
        now = self.measures, self.captured, list(self.exponents)
        if self._out_for == now:
            return
        self._out_for = now
        self.idle = not (self.measures or self.captured or any(self.exponents))
        """Whether there is nothing to scale and nothing to measure."""
        self._out = [
            (self.factor(OUTSIDE, place), self._meter(ENTERING, place), (self.mark, OUTSIDE, place))
            for place in range(len(self.blocks))
        ]

    def _renew(self) -> None:
        """Has the next passes use scales that hold."""
        if self.terms.void or not self.terms.holds:
            self.terms.void, self.terms.holds = True, False
            self.terms = Terms()
            self.weights.forget()
        log = self.meters.log if self.measures and not self.captured else None
        self.live = Live(self.clock, self.clock.time, self.terms, log)

    def _hook(self, units: Sequence[Unit]) -> Iterator[Any]:
        """Registers the hooks; yields their handles."""
        yield self._model.register_forward_pre_hook(self._begin)
        for place, block in enumerate(self.blocks):
            own = [unit for unit in units if unit.place == place]
            first, last = block.modules[0], block.modules[-1]
            alone = len(own) == 1 and own[0].module is first is last and not own[0].gathers
            # One hook instead of two, if nobody comes in between.
            unit = (
                own[0] if alone and not (first._forward_pre_hooks or first._forward_hooks) else None
            )
            arrive, depart = partial(self._enter, place, unit), partial(self._leave, place, unit)
            yield first.register_forward_pre_hook(arrive, prepend=True, with_kwargs=True)
            if unit is None:
                for each in own:
                    yield from self.weights.hook(each)
            # Others may want the gradient of the output; those of FSDP2 are inside.
            prepend = bool(last._forward_hooks) and not any(each.gathers for each in own)
            yield last.register_forward_hook(depart, prepend=prepend, always_call=unit is not None)
        yield self._model.register_forward_hook(self._return)
        yield self._model.register_forward_hook(self._end, always_call=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Begins a forward pass of the model: a forward pre-hook."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if not self.idle and torch._C._are_functorch_transforms_active():
            raise SettingError(
                "torch.func transforms of a model with BlockScales are not supported. Call "
                "blocks.remove() first, or transform under torch.no_grad()."
            )
        self.runs.end()  # if an interrupt has left them
        if self.additions.pending:
            self.additions.check()
        self._returned = False
        if not self._params:
            whole = [param for param in self._model.parameters() if not _is_dtensor(param)]
            self._params = set(map(id, whole))
            if self._is_sharded and HAS_GRAD_DTYPE:
                # FSDP2 reduces them together, also those outside of blocks: in one format.
                self.weights.widen(whole)
        self.forget()
        self._notice_capture()
        if not self.terms.holds:  # a pass has not come to its end, or was not what was assumed
            self._renew()
        self.weights.prepare()
        self.runs.calls = []
        if not (self.measures or self.captured):
            self.runs.begin()

    def _notice_capture(self) -> None:
        """The scales belong to the device once that a CUDA graph uses them."""
        if self.captured or self.device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
            self.weights.forget()
            self.refresh()

    def _enter(
        self,
        place: int,
        unit: Unit | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a block, behind its border: a forward pre-hook."""
        if not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            if not TRACES_REPLACED_WEIGHTS:
                from gradscale.torch.blocks import refusal  # loads Dynamo, which is there by now

                refusal.refuse_graph()
            arrive = partial(self._arrive_compiled, place)
        elif self.idle:
            return None
        else:
            arrive = partial(self.arrive, place)
            if self.runs.on:
                self.runs.settle()
        inside: Any
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):  # 0.1 ms less
            inside = (arrive(args[0]),), kwargs
        else:
            inside = tree_map_only(Tensor, arrive, (args, kwargs))
        if not torch.compiler.is_compiling() and self.measures:
            alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            self.runs.note(place, self._direct if alone else None)
            self._direct = None
        if unit is not None:
            self.weights.replace(unit, module, args)
        return inside

    def arrive(self, place: int, x: Tensor) -> Tensor:
        """`x` inside of the block at `place`."""
        self._direct = None
        if not x.requires_grad:
            return x
        for seen, node, made, maker in self.made:
            if seen is x and x.grad_fn is node and is_untouched(x):
                self._direct = Source(maker, [x])
                return self._arrive_from(place, maker, made)
        if x.device != self.device:
            raise CallOrderError(
                f"The model was on {self.device} when BlockScales was created, but block "
                f"{self.blocks[place].name!r} is called on {x.device}. Create BlockScales after "
                ".to(device), one for each device."
            )
        self.watch(x)
        for seen, *_ in self.made:
            self.watch(seen)
        factor = self.factor(place, OUTSIDE)
        if is_one(factor) and not self.measures:
            return x
        gap = self._gap(place, x)
        leaves = () if gap is None else gap.leaves
        factors = [] if gap is None else [self.factor(place, n.route[2]) for n in gap.blocks]
        live = self.live._replace(x=x, gap=gap, factors=factors)
        if gap is not None and gap.is_step():
            for seen, node, _, maker in self.made:
                if node is gap.blocks[0] and is_untouched(seen):
                    self._direct = Source(maker, [seen], [x])
        route = (self.mark, place, OUTSIDE)
        return enter_now(x, factor, self._meter(LEAVING, place), None, route, live, *leaves)

    def watch(self, x: Tensor) -> None:
        """Has no gradient carried past `x`, at the border of a block, if somebody wants its own."""
        if not is_untouched(x):
            self._watched.add(x.grad_fn)

    def _arrive_from(self, place: int, maker: int, made: Tensor) -> Tensor:
        """`made`, which the block at `maker` has made, inside of the block at `place`."""
        if not (self.measures or self.captured):
            if self.exponents[place] == self.exponents[maker]:
                self.given.append((place, made, made._version))
                return made
        else:
            self.reasons.pop(place, None)
        leaving, entering = self._meter(LEAVING, place), self._meter(ENTERING, maker)
        factor, route = self.factor(place, maker), (self.mark, place, maker)
        return enter_now(made, factor, leaving, entering, route, self.live)

    def _arrive_compiled(self, place: int, x: Tensor) -> Tensor:
        """`x` inside of the block at `place`, in a compiled function, where graphs have no gaps."""
        if not x.requires_grad:
            return x
        leaving, shut = self.meters.borders_of[LEAVING][place], self._shut[place]
        for seen, _, made, maker in self.made:
            if seen is x:
                entering, factor = (
                    self.meters.borders_of[ENTERING][maker],
                    self._opened[maker] * shut,
                )
                return enter(made, factor, leaving, entering, (self.mark, place, maker), None)
        return enter(x, shut, leaving, None, (self.mark, place, OUTSIDE), None)

    def _gap(self, place: int, x: Tensor) -> Gap | None:
        """What lies between `x` and the blocks that it comes from; None if it cannot be used."""
        if x.grad_fn is None or (place in self.reasons and not self.measures):
            return None
        if torch._C._current_graph_task_id() != -1:  # a checkpoint, whose graph is thrown away
            return None
        gap = Gap()
        known = set() if self.measures else self._known_gaps.get(place, set())
        self._known_gaps[place] = known
        reason = gap.find(x, self.mark, self._params, self._used, self._watched, known)
        half = [leaf for leaf in gap.leaves if is_half(leaf)]
        if half and (not HAS_GRAD_DTYPE or in_ddp()):
            reason = "a weight there is float16"
        if reason:
            self.reasons[place] = reason
            return None
        self.reasons.pop(place, None)
        self.weights.widen(half)
        return gap

    def factor(self, place: int, to: int) -> Factor:
        """What brings a gradient from the scale of one place to that of another."""
        if self.captured:
            if place == OUTSIDE:
                return self._opened[to]
            return self._shut[place] if to == OUTSIDE else self._shut[place] * self._opened[to]
        own = 0 if place == OUTSIDE else self.exponents[place]
        return 2.0 ** ((0 if to == OUTSIDE else self.exponents[to]) - own)

    def factor_of_weights(self, place: int) -> Factor:
        """What unscales the gradients of the weights of a block."""
        if torch.compiler.is_compiling():
            return self._shut[place]
        return self.factor(place, OUTSIDE)

    def _meter(self, row: int, place: int) -> Tensor | None:
        """The meter of a block, if gradients are measured by a CUDA graph."""
        return self.meters.borders_of[row][place] if self.captured else None

    def _leave(
        self, place: int, unit: Unit | None, module: nn.Module, args: Any, output: Any
    ) -> Any:
        """The output of a block, behind its border: a forward hook."""
        if unit is not None:
            self.weights.take_back(module, args, output)
        if output is None or not torch.is_grad_enabled():  # None also if the block has raised
            return None
        if torch.compiler.is_compiling():
            depart = partial(self._depart_compiled, place)
        elif self.idle:
            return None
        else:
            return self.depart(place, output)
        self.made = []
        return tree_map_only(Tensor, depart, output)

    def depart(self, place: int, output: Any) -> Any:
        """What the block at `place` has returned, outside of it."""
        self.drop()
        if isinstance(output, Tensor):
            return self._depart(place, output)
        return tree_map_only(Tensor, partial(self._depart, place), output)

    def drop(self) -> None:
        """Forgets what the last block has returned, and what this block was given.

        Raises:
            SettingError: It has written to what it was given without a border.
        """
        if self.made:
            self.made = []
        if self.given:
            given, self.given = self.given, []
            for place, x, version in given:
                if x._version != version:
                    self.refuse_write(place)

    def refuse_write(self, place: int) -> NoReturn:
        """Raises, because the block at `place` has written to one of its inputs."""
        raise SettingError(
            f"Block {self.blocks[place].name!r} writes to one of its inputs in place. Start the "
            "block one operation earlier, or do not write in place."
        )

    def _depart(self, place: int, made: Tensor) -> Tensor:
        """`made`, which the block at `place` has computed, outside of it."""
        if not made.requires_grad:
            return made
        seen = leave_now(made, *self._out[place], self.live)
        self.made.append((seen, seen.grad_fn, made, place))
        return seen

    def _depart_compiled(self, place: int, made: Tensor) -> Tensor:
        """`made` outside of the block at `place`, in a compiled function."""
        if not made.requires_grad:
            return made
        entering, route = self.meters.borders_of[ENTERING][place], (self.mark, OUTSIDE, place)
        seen = leave(made, self._opened[place], entering, route, None)
        self.made.append((seen, None, made, place))
        return seen

    def _return(self, module: nn.Module, args: Any, output: Any) -> None:
        """Notes that a forward pass of the model has not raised: it may return None."""
        self._returned = True

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a forward pass of the model; `output` is None also if it has raised."""
        self.made = []
        if not torch.compiler.is_compiling():
            if self.runs.on:
                self.runs.end()
                if self._returned:
                    self.runs.close()
            self.forget()
            if output is not None:
                self._ended(output)

    def forget(self) -> None:
        """Forgets the tensors of a forward pass."""
        self.made, self.given, self._direct = [], [], None
        self._used, self._watched = set(), set()
        self.runs.forget()
        self.weights.fresh = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has borders of its own: what comes from the original is not from its blocks."""
        self.__dict__.update(state)
        self.mark, self._out_for, self._params = next(_marks), None, set()
        self._out = [(factor, meter, (self.mark, *route[1:])) for factor, meter, route in self._out]

    def remove(self) -> None:
        """Removes the hooks from the model."""
        self.runs.end()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.forget()
        self.weights.remove()


def _num_hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


def _is_dtensor(param: Tensor) -> bool:
    return hasattr(param, "device_mesh")
