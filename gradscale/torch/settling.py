"""The part of the scaler that has other ranks know what this one found, and the other way round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradscale.torch.agree import Group
from gradscale.torch.drift import Drift
from gradscale.torch.keeper import LOSSES
from gradscale.torch.losses import OwnLoss
from gradscale.torch.scaling import Scaling
from gradscale.torch.shards import local
from gradscale.torch.telling import Report, largest, settle
from gradscale.torch.unscale import move, params_with_grad, readable
from gradscale.torch.window import Window


class Settling(Scaling):
    """What was found on any rank is known to all: flags, sizes, and whose fault it was."""

    _drift: Drift

    def _who(self, optimizers: Sequence[Optimizer]) -> list[Group]:
        """The groups that must agree on the gradients of `optimizers`, all together."""
        found: list[Group] = []
        for optimizer in optimizers:
            for group in self._groups[id(optimizer)]:
                if all(group.process is not known.process for known in found):
                    found.append(group)
        return found

    def _settle(
        self, optimizers: Sequence[Optimizer], window: Window, norm: Tensor | None = None
    ) -> Tensor | None:
        """Has all ranks know what any of them found in the gradients of `optimizers`.

        `norm` is that of this rank's gradients, unscaled; what comes back is that of all.
        """
        groups = self._who(optimizers)
        if not groups:
            return norm
        losses = self._losses_here(window)
        mine = self._report(optimizers, window, norm)
        own = [self._report_of(loss, optimizers) for loss in losses]
        rows, marks = settle(self._words((mine, *own)), groups)
        told, *others = (Report(*row.unbind()) for row in rows.unbind())
        self._drift.take(marks)
        for loss, report in zip(losses, others, strict=True):
            loss.finite, loss.loss_finite = report.found == 0, report.bad_loss == 0
            loss.amax, loss.present = report.amax, report.present > 0
        window.loss_finite = told.bad_loss == 0
        window.penalty_finite = told.bad_penalty == 0
        if losses:
            window.common = told.common > 0
        if not any(map(params_with_grad, optimizers)):
            window.idle = told.present == 0
        held_back = torch.stack([told.found * 0, *(each.unfit for each in others)]).amax() > 0
        for optimizer in optimizers:
            key, measured = id(optimizer), self._measured[id(optimizer)]
            self._per_optimizer_states[key]["found_inf_per_device"] = {
                told.found.device: told.found
            }
            # Nobody has a gradient: there is nothing to step, and nothing wrong with the scale.
            self._fits[key] = (told.unfit == 0) & (told.present > 0)
            if losses:
                self._held_back[key] = held_back
            if key not in self._settled:  # else everybody says by now that it was bad
                measured.bad_rank = told.rank
            if measured.amax is not None or self._policy.goes_by:
                measured.amax = told.amax
            if measured.upper is not None:
                measured.upper = told.near / told.elements.clamp(min=1)
        self._settled.update(map(id, optimizers))
        return None if norm is None else told.norm

    def _report(
        self, optimizers: Sequence[Optimizer], window: Window, norm: Tensor | None
    ) -> Report:
        """What this rank has found in the gradients of `optimizers`."""
        state = self._live("step()")
        device = state.scale.device
        # Where the host knows, plain numbers are quicker than operations on them.
        plain = readable(state.scale)

        def highest(sizes: Iterable[Any]) -> Any:
            there = [size for size in sizes if size is not None]
            if plain:
                return max([0.0, *map(float, there)], key=_order)
            zero = torch.zeros_like(state.scale)
            return torch.stack([zero, *(move(size.float(), device) for size in there)]).amax()

        def flag(fine: Tensor | None) -> Any:
            return highest([] if fine is None else [~move(fine, device)])

        params = {id(p): p for one in optimizers for p in params_with_grad(one)}.values()
        measured = [self._measured[id(one)] for one in optimizers]
        bad = highest(self._found(self._found_inf_per_device(one)) for one in optimizers)
        elements = float(sum([_size(param.grad) for param in params]))
        rank = float(dist.get_rank())
        return Report(
            found=bad,
            unfit=highest(flag(self._fits.get(id(one))) for one in optimizers),
            bad_loss=flag(window.loss_finite),
            bad_penalty=flag(window.penalty_finite),
            present=float(bool(params)),
            common=float(window.begun > window.own_passes),
            amax=highest(one.amax for one in measured),
            norm=0.0 if norm is None else norm,
            near=highest(one.upper for one in measured) * elements,
            elements=elements,
            mark=self._drift.mark(self._guarded()),
            rank=(rank if bad else math.inf) if plain else torch.where(bad > 0, rank, math.inf),
        )

    def _guarded(self) -> list[Tensor]:
        """All that ranks must have the same of: scales, and what is counted for them."""
        states = [self._live("step()"), *(self._losses[k] for k in sorted(self._losses, key=str))]
        return [*(value for state in states for value in state), self._counters[LOSSES]]

    def _settle_all(self, flags: Sequence[Tensor], groups: Sequence[Group]) -> list[Tensor]:
        """The largest of each of `flags` on all ranks of `groups`."""
        scale = self._live("update()").scale
        words = torch.stack([move(flag, scale.device).float() for flag in flags])
        return list(largest(words, groups).unbind())

    def _words(self, reports: Sequence[Report]) -> Tensor:
        """The words of `reports`, a row for each, on the device of the scale."""
        scale = self._live("step()").scale
        if readable(scale):
            rows = [[float(word) for word in each] for each in reports]
            return torch.tensor(rows, dtype=torch.float32)
        words = [
            move(word, scale.device).float()
            if isinstance(word, Tensor)
            else torch.full_like(scale, word)
            for each in reports
            for word in each
        ]
        return torch.stack(words).view(len(reports), -1)

    def _losses_here(self, window: Window) -> list[OwnLoss]:
        """All losses with a scale of their own, in an order that all ranks have.

        Also those that this rank has not had in this window: others may have.
        """
        for loss_id, state in self._losses.items():
            if loss_id not in window.losses:
                window.add_loss(loss_id, state.scale.clone()).passes = 1
                window.losses[loss_id].present = torch.zeros_like(state.scale, dtype=torch.bool)
        return [window.losses[key] for key in sorted(window.losses, key=str)]

    def _report_of(self, loss: OwnLoss, optimizers: Sequence[Optimizer]) -> Report:
        """What this rank has found of a loss with a scale of its own.

        What does not fit stands for what holds the step of `optimizers` back.
        """
        bad = (~loss.finite).float()
        zero = torch.zeros_like(bad)
        here = torch.ones_like(bad) if loss.present is None else loss.present.float()
        report = Report(*[zero] * len(Report._fields))
        return report._replace(
            found=bad,
            unfit=bad if any(map(loss.reaches, optimizers)) else zero,
            bad_loss=(~loss.loss_finite).float(),
            present=here,
            amax=loss.amax,
        )

    def _found(self, found_inf: Mapping[torch.device, Tensor]) -> Tensor:
        """bool, on the device of the scale: something is not finite on some device."""
        scale = self._live("step()").scale
        found = [move(flag, scale.device) > 0 for flag in found_inf.values()]
        if not found:
            return torch.zeros_like(scale, dtype=torch.bool)
        return found[0] if len(found) == 1 else torch.stack(found).any()

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        return self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]


def _order(size: float) -> float:
    """What numbers are compared by, so that a NaN is the largest."""
    return math.inf if math.isnan(size) else size


def _size(grad: Any) -> int:
    """How many elements of a gradient this rank has."""
    part = local(grad)
    return int(part._nnz() if part.layout is torch.sparse_coo else part.numel())
