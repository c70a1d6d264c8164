"""Backward passes that are checked on their own.

A loss with a `loss_id` has a scale of its own, also where it shares parameters with others; a
droppable pass is left out of a step, rather than cost it, if its gradients are not finite. One
`.grad` can hold one scale only. So such a pass starts from empty gradients; what comes of it is
measured, brought to the scale of the iteration and added to what was there, or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.distributed.groups import has_ranks
from gradscale.torch.grads.collect import Gradients, with_grad
from gradscale.torch.grads.reference import count_bad, measure, multiply, zero
from gradscale.torch.grads.scale import Scale, move
from gradscale.torch.step.entries import UNSCALED, OptimizerEntry
from gradscale.torch.step.passes import Iteration, Passes
from gradscale.torch.step.sharing import DroppablePass, forget_cleared


class OwnLoss:
    """What an iteration has found of one loss with a scale of its own."""

    __slots__ = (
        "_entries",
        "_params",
        "amax",
        "bad",
        "finite",
        "loss_finite",
        "moved",
        "passes",
        "present",
        "scale",
    )

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        yes: Any = True
        none: Any = 0.0
        if scale.number is None:
            yes = torch.ones_like(scale.tensor, dtype=torch.bool)
            none = torch.zeros_like(scale.tensor)
        self.finite = yes
        """bool: every gradient that it made was finite."""
        self.loss_finite = yes
        """bool: it was finite itself."""
        self.amax = none
        """The largest magnitude of its scaled gradients."""
        self.passes = 0
        """How many backward passes it has had."""
        self.bad: dict[int, tuple[int, int]] = {}
        """Infinities and NaNs by the id of the parameter, where the host could count them."""
        self.present: Any = None
        """bool: whether any rank has had it in this iteration; None where this one has."""
        self.moved = False
        """Whether an `update()` has moved its scale by what is known here."""
        self._params: set[int] = set()
        self._entries: list[OptimizerEntry] = []
        """Those that have been marked: `lacking` is None if their gradients were cleared since."""

    def note_loss(self, loss: Tensor) -> None:
        """Records whether `loss` was finite."""
        flag: Any = torch.isfinite(loss.detach()).all()
        flag = flag.item() if self.scale.number is not None else flag
        self.loss_finite = self.loss_finite & _at(flag, self.scale)

    def note(self, grads: Gradients) -> Any:
        """bool: whether the gradients of a pass are finite; records them and their statistics."""
        self.passes += 1
        self._params.update(map(id, grads.params))
        stats = measure(grads, self.scale.unit(), amax=True).stats
        if self.scale.number is not None:
            self.amax = math.nan if math.isnan(stats.amax) else max(self.amax, stats.amax)
        else:
            self.amax = torch.maximum(self.amax, _at(stats.amax, self.scale))
        finite = _at(stats.finite, self.scale)
        self.finite = self.finite & finite
        if finite is False and not self.bad:
            self.bad = count_bad(grads.params)()[0]
        return finite

    def forget_cleared(self) -> None:
        """Has it reach no more the entries whose gradients were cleared since they were marked."""
        for entry in [each for each in self._entries if each.lacking is None]:
            self._entries.remove(entry)
            self._params -= entry.param_ids()

    def mark(self, entries: Sequence[OptimizerEntry], finite: Any) -> None:
        """Has those of `entries` that the last pass reached lack its gradients, unless `finite`.

        A pass that begins with no gradients for an entry takes that back.
        """
        for entry in entries:
            bad = finite ^ True
            entry.lacking = bad if entry.lacking is None else entry.lacking | bad
            if all(entry is not each for each in self._entries):
                self._entries.append(entry)

    def reaches(self, entry: OptimizerEntry) -> bool:
        """Whether it made gradients for the optimizer of `entry` that were bad, or may have been.

        Not if they were cleared since.
        """
        if any(entry is each for each in self._entries):
            return entry.lacking is not None and entry.lacking is not False
        return not self._params.isdisjoint(entry.param_ids())


@torch.no_grad()
def backward_own(
    scaled: list[Tensor],
    passes: Passes,
    own: OwnLoss,
    known: Sequence[Tensor],
    kwargs: Mapping[str, Any],
) -> None:
    """Runs the pass of `scaled` losses and adds its gradients at the scale of the iteration.

    `known` parameters may have gradients of it although they are not in its graph.
    """
    with _apart(scaled, passes, known, kwargs, "a loss_id", begins=True) as made:
        grads = Gradients(made)
        iteration = passes.current()
        for each in iteration.losses.values():
            each.forget_cleared()
        finite = own.note(grads)
        multiply(grads.values, iteration.scale.over(own.scale))
        zero(grads.values, finite ^ True)
        if not iteration.captured:  # replays mark nothing
            ids = set(map(id, made))
            entries = [e for e in passes.entries.all if not ids.isdisjoint(e.param_ids())]
            own.mark(entries, finite)


@torch.no_grad()
def backward_droppable(
    scaled: list[Tensor],
    passes: Passes,
    known: Sequence[Tensor],
    agreed: Callable[[Any, Sequence[Tensor]], Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Runs the pass of `scaled` losses and adds its gradients if they are finite.

    On all ranks, or on none: `agreed` combines a flag with those of other ranks.
    """
    last_plain = passes.last_plain
    for entry in passes.entries.all:
        if not with_grad(entry.param_groups()):
            entry.empty_at = passes.count
    try:
        with _apart(scaled, passes, known, kwargs, "droppable=True") as made:
            grads = Gradients(made)
            stats = measure(grads, passes.current().scale).stats
            dropped = agreed(stats.finite & stats.fits, made) ^ True
            zero(grads.values, dropped)
            passes.droppable.append(DroppablePass(passes.count, frozenset(map(id, made)), dropped))
    finally:
        passes.last_plain = last_plain  # also of a pass that raises, which leaves no gradients


@torch.no_grad()
def backward_common(
    scaled: list[Tensor], passes: Passes, known: Sequence[Tensor], kwargs: Mapping[str, Any]
) -> Any:
    """Runs the pass of `scaled` losses of the common scale; the amax of its gradients alone."""
    with _apart(
        scaled, passes, known, kwargs, "a loss in one iteration with a loss that has a loss_id"
    ) as made:
        return measure(Gradients(made), passes.current().scale.unit(), amax=True).stats.amax


@contextmanager
def _apart(
    scaled: list[Tensor],
    passes: Passes,
    known: Sequence[Tensor],
    kwargs: Mapping[str, Any],
    what: str,
    begins: bool = False,
) -> Iterator[list[Tensor]]:
    """The tensors that a backward pass of `scaled` has made gradients for, with these alone.

    Afterwards they are added to those that were there before. The pass of a loss with a scale of
    its own `begins` here: it was not scaled by `scale()`.
    """
    if kwargs.get("create_graph"):
        raise SettingError(
            f"create_graph=True is not supported with {what}, because its gradients are changed "
            "after the backward pass. Use scaler.grad() for gradient penalties."
        )
    leaves = _leaves(scaled, kwargs.get("inputs"))
    if kwargs.get("inputs") is not None:
        kwargs = {**kwargs, "inputs": leaves}  # it may have been a generator
    # FSDP takes gradients away from the leaves of the graph, and gives them to its parameters.
    inside = {id(leaf) for leaf in leaves}
    others = [param for param in known if id(param) not in inside]
    leaves = [leaf for leaf in leaves if not _is_hidden(leaf, others)]
    _refuse_unscaled([*leaves, *others], passes, what)
    iteration: Iteration = passes.current()
    if begins:
        passes.begin_pass(iteration)
        iteration.own_passes += 1
    passes.bring(iteration.scale)  # what is set aside below
    if passes.droppable:
        forget_cleared(passes, leaves)
    lacking = [(e, e.lacking) for e in passes.entries.all if with_grad(e.param_groups())]
    before = [(leaf, leaf.grad, _set_aside(leaf)) for leaf in leaves]
    before += [(param, param.grad, _set_aside(param)) for param in others]
    for param in others:
        param.grad = None  # FSDP makes them anew
    passes.aside = True
    try:
        with torch.enable_grad():
            torch.autograd.backward(scaled, **kwargs)
    except BaseException:
        for leaf, grad, copy in before:
            leaf.grad = grad if copy is None or grad is None else grad.copy_(copy)
        raise
    finally:
        passes.aside = False
        for entry, bad in lacking:  # what was aside has not been cleared
            entry.lacking = bad
    lost = any(leaf.grad is None for leaf in leaves) and has_ranks()
    if lost and all(param.grad is None for param in others):
        raise CallOrderError(
            f"The gradients of a loss with {what} were written to tensors that the scaler has not "
            "seen, as with FSDP. Call optimizer.zero_grad(), and scaler.name(model) before the "
            "first loss."
        )
    yield [leaf for leaf, _, _ in before if leaf.grad is not None]
    for leaf, grad, copy in before:
        if leaf.grad is None:
            leaf.grad = grad if copy is None or grad is None else grad.copy_(copy)
        elif copy is not None and leaf.grad.layout is torch.strided:
            leaf.grad.add_(copy)  # in place: FSDP1 has the memory
        elif grad is not None:  # in a sum a dense one must come first
            leaf.grad = _sum(leaf.grad, grad if copy is None else copy)


def _sum(made: Tensor, before: Tensor) -> Tensor:
    """The sum of two gradients of which one is sparse; half formats are added in float32."""
    if made.dtype in (torch.float16, torch.bfloat16):
        return (made.float() + before.float()).to(made.dtype)
    return made + before


def _refuse_unscaled(params: list[Tensor], passes: Passes, what: str) -> None:
    """Raises if a pass would reach gradients that are unscaled already."""
    if passes.watched:
        passes.compare()
    ids = set(map(id, params))
    entries = [e for e in passes.entries.all if e.stage is UNSCALED and with_grad(e.param_groups())]
    reached = any(not ids.isdisjoint(entry.param_ids()) for entry in entries)
    if reached or (passes.unscaled_now and any(map(passes.is_unscaled, params))):
        raise CallOrderError(
            f"The gradients of a loss with {what} would be added to gradients that are already "
            "unscaled. Call optimizer.zero_grad() before its backward pass."
        )


def _is_hidden(leaf: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether FSDP1 hides `leaf` behind `others`, whose gradients are views of its own."""
    return bool(others) and getattr(leaf, "_is_flat_param", False)


def _set_aside(leaf: Tensor) -> Tensor | None:
    """Empties the gradient of `leaf`; a copy of a dense one, which stays where it is.

    Others may hold that very tensor, as DDP does, whose gradients lie in its buckets.
    """
    grad = leaf.grad
    if grad is None or grad.layout is not torch.strided:
        leaf.grad = None
        return None
    copy = grad.clone()
    grad.zero_()
    return copy


def _leaves(outputs: list[Tensor], inputs: Any) -> list[Tensor]:
    """The tensors whose `.grad` a backward pass of `outputs` can write to."""
    if inputs is not None:
        return [inputs] if isinstance(inputs, Tensor) else list(inputs)
    found: dict[int, Tensor] = {}
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and not node.next_functions:
            found[id(leaf)] = leaf
        if node.name() == "CheckpointFunctionBackward":
            raise CallOrderError(
                "loss_id and droppable=True are not supported with reentrant checkpoints, because "
                "the scaler cannot find the parameters inside them. Call checkpoint() with "
                "use_reentrant=False."
            )
        for nearer, _ in node.next_functions:
            if nearer is not None and nearer not in seen:
                seen.add(nearer)
                waiting.append(nearer)
    return list(found.values())


def _at(value: Any, scale: Scale) -> Any:
    """`value` on the device of `scale`, if it is a tensor."""
    return move(value, scale.tensor.device) if isinstance(value, Tensor) else value
