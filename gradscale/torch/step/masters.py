"""Steps of optimizers that step float32 masters while the model has half weights.

An entry may have an adapter for that, in its slot `masters`. Gradients are collected and measured
as the weights have them, in half the traffic; only when the step is decided upon, the adapter puts
masters with float32 gradients into the optimizer's groups, unscaled, clipped and weighed by one
factor. The gradients of the weights stay as they are, so nothing is lost if the optimizer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gradscale.policy import GradStats
from gradscale.torch.grads import backend
from gradscale.torch.grads.collect import Gradients, with_grad, with_grad_of
from gradscale.torch.grads.reference import clamp
from gradscale.torch.grads.scale import Scale
from gradscale.torch.step.checks import refuse_others
from gradscale.torch.step.entries import UNSCALED, OptimizerEntry
from gradscale.torch.step.rescale import limit_elements
from gradscale.torch.step.result import Step

if TYPE_CHECKING:
    from gradscale.torch.step.pipeline import Pipeline


class MasterAdapter(Protocol):
    """What keeps the masters of one optimizer's half weights."""

    @property
    def in_place(self) -> bool:
        """Whether masters are in the optimizer's groups now."""

    def needed(self, params: Sequence[Tensor]) -> bool:
        """Whether one of `params` must have a master to be stepped, or may have had one."""

    def gradients(self, factor: Tensor) -> None:
        """Puts masters into the groups, with the weights' gradients times `factor`, in float32."""

    def write_back(self, done: bool) -> None:
        """Puts the weights back into the groups; if `done`, written from the masters."""

    def stepped(self, factor: Tensor) -> AbstractContextManager[None]:
        """`gradients()` before the block, and `write_back()` after it, done unless it raises."""

    def weight_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, with weights also while masters are in their places."""

    def enter(self) -> None:
        """Puts the masters of all half weights into the groups, with the gradients they have."""

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, computed with the weights of masters, and with its gradients moved to them."""

    def aliases(self) -> dict[int, Tensor]:
        """The weights of the masters that are in the groups now, by the id of the master."""


def fits_float32(stats: GradStats, scale: Scale) -> Any:
    """bool: whether unscaled gradients of these `stats` fit float32, or were not finite before."""
    inverse = scale.inverse
    unscaled = torch.as_tensor(stats.amax, dtype=torch.float32, device=inverse.device) * inverse
    fits = torch.isfinite(unscaled)
    return (fits if scale.number is None else fits.item()) | (stats.finite ^ True)


def judge_fit(step: Step) -> None:
    """Finds whether unscaled gradients fit the float32 of masters, not the format of weights."""
    for entry in step.entries:
        stats: GradStats | None = entry.stats
        if stats is None or entry.masters is None:
            continue
        entry.stats = stats._replace(fits=fits_float32(stats, step.scale))


def clip_masters(optimizer: Any, limit: float, clip: Any) -> None:
    """Clips the gradients of masters that are in the groups, by value and then by a factor."""
    grads = Gradients(with_grad(optimizer.param_groups))
    clamp(grads.values, limit)
    _multiply(grads, clip)


def clip_value_of_masters(
    pipeline: Pipeline, step: Step, limit: float, max_norm: float | None
) -> None:
    """Finds what clips gradients after they are clipped by value, all of them in float32."""
    factor, entered = step.factor(), []
    plain = [entry.held for entry in step.entries if entry.masters is None]
    if plain:
        backend.multiply(Gradients(with_grad_of(plain)), factor)
    if plain or max_norm is not None:
        weights = step.grads
        try:
            for entry in step.entries:
                if entry.masters is not None:
                    entry.masters.gradients(factor)
                    entered.append(entry.masters)
            step.grads = Gradients(with_grad_of([entry.held for entry in step.entries]))
            limit_elements(pipeline, step, limit, max_norm)
        finally:
            step.grads = weights
            for masters in entered:
                masters.write_back(False)
    if plain:
        _multiply(Gradients(with_grad_of(plain)), step.clip)
        for entry in step.entries:
            if entry.masters is None:
                entry.stage, entry.unscaled_in = UNSCALED, pipeline.passes.ended
    step.limit = limit


def _multiply(grads: Gradients, clip: Any) -> None:
    """Multiplies gradients by what clips their norm, a number or a tensor."""
    if isinstance(clip, Tensor):
        backend.multiply(grads, clip.float())
    elif clip != 1.0:
        backend.multiply(grads, torch.full((), clip, dtype=torch.float32, device="cpu"))


def with_masters_in(
    pipeline: Pipeline, entry: OptimizerEntry, closure: Any, run: Callable[[Any], Any]
) -> Any:
    """What `run(closure)`, a step with a closure, returned, run with masters in the groups."""
    refuse_others(pipeline.passes)  # the first evaluation forgets what was unscaled
    masters: MasterAdapter | None = entry.masters
    params = [param for group in entry.held.param_groups for param in group["params"]]
    if masters is None or not masters.needed(params):
        return run(closure)
    names = pipeline.monitor.names
    masters.enter()
    names.aliases = masters.aliases()
    try:
        return run(masters.around(closure))
    finally:
        names.aliases = {}
        # Written in any case: evaluations have moved the weights.
        masters.write_back(True)
