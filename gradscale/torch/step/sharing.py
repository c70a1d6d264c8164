"""Gradients that several optimizers share, and passes that reach several: each counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import CallOrderError
from gradscale.torch.grads.collect import values_of, with_grad
from gradscale.torch.grads.reference import multiply
from gradscale.torch.step.contract import writes_back
from gradscale.torch.step.entries import STEPPED, UNSCALED, OptimizerEntry, version_of

if TYPE_CHECKING:
    from gradscale.torch.step.passes import Passes
    from gradscale.torch.step.result import Step


class DroppablePass(NamedTuple):
    """A backward pass that is left out of a step if its gradients are not finite."""

    number: int
    """How many passes had begun with it."""
    params: frozenset[int]
    """The ids of the parameters that it reached."""
    dropped: Any
    """bool: whether it was left out."""


class Watched:
    """Unscaled gradients as they were when a pass began."""

    __slots__ = ("_grads", "entry")

    def __init__(self, params: list[Tensor], entry: OptimizerEntry | None) -> None:
        self.entry = entry
        """Whose they are; None for those that several optimizers share."""
        self._grads = [(p, p.grad, -1 if p.grad is None else version_of(p.grad)) for p in params]

    def changed(self) -> list[Tensor]:
        """The parameters whose gradients were made, replaced or written to; not those cleared."""
        return [
            param
            for param, grad, version in self._grads
            if param.grad is not None
            and (param.grad is not grad or version_of(param.grad) != version)
        ]


def forget_cleared(passes: Passes, others: Sequence[Tensor] = ()) -> None:
    """Removes parameters whose gradients were cleared from the droppable passes."""
    groups = [group for entry in passes.entries.all for group in entry.param_groups()]
    params = [*others, *(param for group in groups for param in group["params"])]
    gone = {id(param) for param in params if param.grad is None}
    if gone:
        left = [each._replace(params=each.params - gone) for each in passes.droppable]
        passes.droppable = left


def droppable_passes(passes: Passes, entry: OptimizerEntry) -> list[DroppablePass]:
    """The droppable passes that reached an entry since its last step."""
    mine = [each for each in passes.droppable if each.number > entry.stepped_at]
    if not mine:
        return []
    ids = entry.param_ids()
    reached = [each for each in mine if not each.params.isdisjoint(ids)]
    begun_at = max(entry.stepped_at, entry.empty_at)  # passes before have left it nothing
    if reached and passes.last_plain > begun_at:
        raise CallOrderError(
            f"{len(mine)} of {passes.count - begun_at} losses had droppable=True, so the "
            "gradients cannot be corrected for dropped passes. Pass droppable=True for all losses "
            "of a step, or for none."
        )
    return reached


def _unscale_skipped(passes: Passes, params: list[Tensor], step: Step) -> None:
    """Unscales gradients that a step on a device left scaled if, and only if, it was skipped."""
    scaled = [p for p in params if not passes.is_unscaled(p)]
    one = torch.ones_like(step.scale.tensor)
    multiply(values_of(scaled), torch.where(step.skip != 0, step.scale.inverse, one))
    passes.note_unscaled(scaled)


def unscaled_ids(passes: Passes) -> set[int]:
    """The ids of parameters whose gradients are unscaled, so that no entry may rescale them."""
    entries = passes.entries
    groups = [e.param_groups() for e in entries.all if e.stage is UNSCALED]
    ids = {id(param) for each in groups for param in with_grad(each)}
    return ids | {id(p) for p in entries.params_in(passes.unscaled) if passes.is_unscaled(p)}


def unscaled_among(
    passes: Passes, params: list[Tensor], sharing: list[OptimizerEntry]
) -> list[Tensor]:
    """Those of `params` whose gradients were unscaled for an optimizer that shares them."""
    used: set[int] = set()
    for entry in sharing:
        if entry.mixed and not entry.param_ids().isdisjoint(map(id, params)):
            raise CallOrderError(
                "A backward pass has added scaled gradients to unscaled ones of an optimizer that "
                "shares parameters with this one. Call zero_grad() after unscale_() and before "
                "that pass."
            )
        if entry.stage is UNSCALED:
            used |= entry.param_ids()
        elif entry.step is not None and entry.stepped_at == passes.count:
            # Without a pass in between, who has written to it has clipped or edited it.
            if entry.has_new_gradients(with_grad(entry.param_groups()), written=False):
                continue
            ids, step = entry.param_ids(), entry.step
            if entry.older or (step.skip is True and not step.in_place):
                continue  # it has not touched them
            known = step.in_place or writes_back(entry.optimizer)
            if known and isinstance(step.skip, Tensor) and not step.in_place:
                _unscale_skipped(passes, [p for p in params if id(p) in ids], step)
            if not known and not ids.isdisjoint(map(id, params)):
                raise CallOrderError(
                    "A parameter that two optimizers share was stepped by an optimizer that "
                    "unscales gradients itself. Call scaler.unscale_() for that optimizer before "
                    "its step()."
                )
            used |= ids
        elif entry.stage is STEPPED and entry.witness is not None and not entry.older:
            # Stepped before the last pass, when this optimizer was not known.
            grad, ids = entry.witness[0](), entry.param_ids()
            kept = any(p.grad is grad for p in with_grad(entry.param_groups()))
            changed = kept and version_of(grad) != entry.witness[1]
            ids &= set(map(id, entry.stepped_params))  # those that had a gradient then
            if changed and not ids.isdisjoint(map(id, params)):
                raise CallOrderError(
                    "A backward pass has added to gradients that another optimizer has unscaled "
                    "and stepped. Call zero_grad() of that optimizer before the pass."
                )
    return [p for p in params if id(p) in used or passes.is_unscaled(p)]
