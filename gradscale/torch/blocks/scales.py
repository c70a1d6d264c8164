"""BlockScales: gradients keep a scale of their own inside of every block.

Gradients that enter a block through its outputs are multiplied by its scale, those that leave it
for its weights are divided by it. Those that leave it through its inputs keep it, through whatever
operations lie before the block, until they enter another block or arrive at a weight.

That is right for any model, also where paths branch and meet, weights are tied and blocks are
called twice, because what a block carries to the blocks before it never meets other gradients on
the way (gaps.py). What cannot be carried is unscaled at the border of the block.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradscale.errors import CallOrderError, SettingError, StateError
from gradscale.torch.blocks import paths, report
from gradscale.torch.blocks.chains import find
from gradscale.torch.blocks.hooks import BlockHooks
from gradscale.torch.blocks.rule import MAX_EXPONENT, NUM_ROWS, BlockPolicy, BlockState
from gradscale.torch.tenants import Tenancy, has_tenant

_EARLY = 16
"""The first updates: they all measure, and move the scales at once."""


class BlockScales:
    """Gives every block of `model` its own scale, a power of two that follows its gradients.

        blocks = BlockScales(model)                  # after fully_shard and .to(device)
        for inputs, targets in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = loss_fn(model(inputs), targets)
            scaler.backward(loss)
            scaler.apply(optimizer)
            blocks.update()                          # once per step

    Weight gradients have the same values as without it, with less underflow. All scales are 1 until
    the first `update()`. A gradient keeps the scale of a block through the operations before that
    block, up to the blocks and weights that they use; `report()` shows where it cannot. The loss
    scale is still needed for the operations between the last block and the loss.

    Gradients of float16 weights in blocks become float32 (`grad_dtype`), because in float16 they
    would underflow when the scale is divided out. Gradients of gradients (`create_graph`) are not
    supported.

    Args:
        model: The model. Some of its forward passes are checked, see `check()`.
        blocks: Modules, in the order in which they are called. Modules that always follow each
            other can be one block, as a sequence. Default: the children of the outermost
            `nn.Sequential` and `nn.ModuleList` modules.
        rule: The rule that chooses the scales.
        every: Interval, in updates, at which gradients are measured, after the first 16; compiled
            models are measured in every update.
        group: A process group whose ranks use the same scales. Only needed if the ranks compute one
            block together; ranks with different batches (DDP, FSDP2) need none.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module | Sequence[nn.Module]] | None = None,
        *,
        rule: BlockPolicy | None = None,
        every: int = 128,
        group: Any = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SettingError(f"every must be a whole number >= 1, got {every!r}.")
        if has_tenant(model, "Inspector"):
            raise SettingError(
                "BlockScales cannot be combined with Inspector, which would take the scales of "
                "blocks out of gradients. Call inspector.close() first. print(blocks.report()) "
                "shows the gradients of every block."
            )
        self._rule = BlockPolicy() if rule is None else rule
        self._group = group
        self._checked_in: int | None = None
        self._model = model
        self._every = every
        self._num_updates = 0
        self._hooks = hooks = BlockHooks(model, find(model, blocks), self._check_once)
        self._state = self._rule.init(len(hooks.blocks), hooks.device)
        self._awaited: tuple[Tensor, Any] | None = None
        """Exponents on their way to the host, and the event that says that they are there."""
        self._amax = torch.zeros(NUM_ROWS, len(hooks.blocks), device=hooks.device)
        self._weight_amax = torch.zeros_like(hooks.meters.weights)
        self._tenancy = Tenancy(model, "BlockScales")

    def _check_once(self, output: Any) -> None:
        """Checks one forward pass with gradients of every update that measures, but early ones."""
        if not torch.is_grad_enabled() or not self._hooks.measures:
            return
        if self._checked_in is None or _EARLY <= self._num_updates != self._checked_in:
            self.check(*(out for out in tree_leaves(output) if isinstance(out, Tensor)))

    def remove(self) -> None:
        """Removes the hooks and restores `grad_dtype`, so that the model is as before."""
        self._hooks.remove()
        self._tenancy.end()

    @torch.no_grad()
    def update(self) -> None:
        """Moves the scales by the gradients since the last update.

        Call it after the step, once per iteration. The first 16 updates wait for the device. Later
        ones do not: the scales move in the update after the one that measured.
        """
        hooks = self._hooks
        if hooks.additions.pending:  # a compiled pass has not asked
            hooks.additions.check()
        hooks.forget()
        if hooks.captured:
            self._awaited = None  # the device has them
        self._arrive()
        measured = hooks.measures or hooks.captured
        self._num_updates += 1
        if measured:
            self._read()
            at_once = self._num_updates <= _EARLY
            self._state_to(self._rule.update(self._state, self._amax, early=at_once))
            self._send(at_once)
        hooks.meters.clear()  # also if not: a compiled model measures always
        early = self._num_updates < _EARLY
        hooks.measures = self._awaited is None and (early or self._num_updates % self._every == 0)
        hooks.refresh()
        if self._num_updates == _EARLY and not hooks.captured:
            self._warn_of_zeros()

    def _read(self) -> None:
        """Reads the meters."""
        amax = self._hooks.meters.read()
        if self._group is not None:
            # A maximum over ranks may lose a NaN, but no infinity.
            amax.nan_to_num_(nan=float("inf"), posinf=float("inf"))
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=self._group)
        self._amax.copy_(amax)
        self._weight_amax.copy_(self._hooks.meters.weights)

    def _state_to(self, state: BlockState) -> None:
        """Takes over `state`, in place: a CUDA graph may have captured it."""
        for kept, new in zip(self._state, state, strict=True):
            kept.copy_(new)

    def _send(self, at_once: bool) -> None:
        """Sends the exponents to the host; waits for them if that must be `at_once`."""
        exponents = self._state.exponents
        if self._hooks.captured:
            self._move(None)
        elif at_once or exponents.device.type != "cuda":
            self._move(exponents.tolist())
        else:
            host = torch.empty_like(exponents, device="cpu", pin_memory=True)
            host.copy_(exponents, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._awaited = host, event

    def _arrive(self) -> None:
        """Moves to the exponents that were sent, if any."""
        if self._awaited is not None:
            host, event = self._awaited
            self._awaited = None
            event.synchronize()  # recorded an iteration ago
            self._move(host.tolist())
            self._hooks.refresh()

    @torch.no_grad()
    def _move(self, exponents: list[int] | None) -> None:
        """Moves to the exponents of the state, which the host knows unless they are captured."""
        hooks = self._hooks
        if exponents is not None:
            if exponents == hooks.exponents:
                return
            hooks.exponents = exponents
        both = torch.stack([self._state.exponents, -self._state.exponents])
        # Written as bits: a power of two must be exact, which pow() on a device need not be.
        hooks.factors.copy_(((both + 127) * 2**23).view(torch.float32))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: an event cannot be copied."""
        self._arrive()
        return self.__dict__

    def report(self) -> report.BlocksReport:
        """Returns the state of the gradients of every block, as of the last measured update.

        **Waits for the device.** As text it is a table:

            print(blocks.report())
        """
        hooks = self._hooks
        amax = self._weight_amax.tolist()
        weights = [
            (name, unit.place, amax[unit.start + slot])
            for unit in hooks.weights.units
            for slot, name in enumerate(self._names_of(unit))
        ]
        exponents = list(self.exponents.values())
        never = self._never_alive()
        amax_rows = self._amax.tolist()
        return report.make(self.names, exponents, amax_rows, weights, hooks.reasons, never)

    def _names_of(self, unit: Any) -> list[str]:
        """The names of the weights of a unit."""
        modules = {module: name for name, module in self._model.named_modules()}
        return [".".join(filter(None, (modules.get(o, "?"), n))) for o, n in unit.owners]

    def _never_alive(self) -> list[str]:
        """The weights whose gradients were measured, and were zero every time."""
        meters = self._hooks.meters
        dead = (meters.zeros & ~meters.alive).tolist()
        units = self._hooks.weights.units
        return [
            name
            for unit in units
            if any(dead[unit.start : unit.start + len(unit.owners)])
            for name, is_dead in zip(self._names_of(unit), dead[unit.start :], strict=False)
            if is_dead
        ]

    def _warn_of_zeros(self) -> None:
        """Warns of weights that never had a gradient."""
        never = self._never_alive()
        if never:
            some = ", ".join(never[:5]) + (f" and {len(never) - 5} more" if len(never) > 5 else "")
            warnings.warn(
                f"The gradients of these weights were zero in all of the first {_EARLY} updates of "
                f"BlockScales: {some}. print(blocks.report()) shows where gradients vanish. If "
                "they vanish inside a block, split it into several blocks. If they vanish between "
                "two blocks, make the modules between them part of a block. If they are already "
                "zero when they enter the last block, the loss scale is too low.",
                stacklevel=3,
            )

    def check(self, *outputs: Tensor) -> None:
        """Raises if a gradient enters or leaves a block other than through its inputs or outputs.

        It traverses the graph of `outputs`, which are losses or what the model returned. The first
        forward pass of the model is checked automatically, and later one in every update that
        measures, unless they are compiled.

        Raises:
            SettingError: It names the block and what to do.
            CallOrderError: The pass was not measured, so some blocks have no borders.
        """
        if not (self._hooks.measures or self._hooks.captured):
            raise CallOrderError(
                f"check() must be called for a pass that measures: one of the first {_EARLY} "
                "updates, or any pass with every=1."
            )
        names = {id(param): name for name, param in self._model.named_parameters()}
        paths.check(outputs, self._hooks, names)
        self._checked_in = self._num_updates

    @property
    def names(self) -> list[str]:
        """The blocks, in order, by the name of their first module."""
        return [block.name for block in self._hooks.blocks]

    @property
    def exponents(self) -> dict[str, int]:
        """log2 of the scale of each block; may **wait for the device**."""
        hooks = self._hooks
        found = self._state.exponents.tolist() if hooks.captured else hooks.exponents
        return dict(zip(self.names, found, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Returns the scales as plain numbers, by block; **waits for the device**."""
        self._arrive()
        rows = self._state._asdict().items()
        numbers = {k: dict(zip(self.names, v.tolist(), strict=True)) for k, v in rows}
        return {"version": 1, **numbers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict()` returned, for the same blocks.

        Raises:
            StateError: It cannot be read; nothing was loaded.
        """
        if state_dict.get("version") != 1:
            raise StateError(f"version must be 1, got {state_dict.get('version')!r}.")
        rows = []
        bounds = {"exponents": (-MAX_EXPONENT, MAX_EXPONENT), "resting": (0, 2**31 - 1)}
        for key, (low, high) in bounds.items():
            row = state_dict.get(key)
            if not isinstance(row, Mapping) or set(row) != set(self.names):
                raise StateError(
                    f"{key} must have a number for each of the blocks {self.names}, got {row!r}."
                )
            bad = {k: v for k, v in row.items() if type(v) is not int or not low <= v <= high}
            if bad:
                raise StateError(f"{key} must be whole numbers from {low} to {high}, got {bad}.")
            rows.append([row[name] for name in self.names])
        with torch.no_grad():
            new = torch.tensor(rows, dtype=torch.int32, device=self._hooks.device)
            self._awaited = None
            self._state_to(BlockState(*new))
            self._move(None if self._hooks.captured else rows[0])
            self._hooks.meters.clear()
            self._hooks.refresh()
