"""Losses with a scale of their own, also where they share parameters with others.

And losses that are left out of a step, rather than cost it, if their gradients are not finite.

One `.grad` can hold one scale only. So the backward pass of such a loss starts from empty
gradients; what comes of it is read on its own, brought to the common scale of the window and added
to what was there. If it is not finite it adds nothing, so that the others' gradients can
still be judged, and the step is skipped because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
from gradscale.torch.agree import has_ranks
from gradscale.torch.unscale import (
    Reading,
    clear,
    count_bad,
    move,
    multiply,
    read,
    readable,
    values_of,
)

if TYPE_CHECKING:
    from gradscale.torch.window import Window


class OwnLoss:
    """What a window knows of one loss with a scale of its own."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        """A snapshot of its scale (float32)."""
        yes = torch.ones_like(scale, dtype=torch.bool)
        self.finite = yes
        """bool: every gradient that it made was finite."""
        self.loss_finite = yes
        """bool: it was finite itself."""
        self.amax = torch.zeros_like(scale)
        """float32: the largest magnitude of its scaled gradients."""
        self.passes = 0
        """How many backward passes it has had."""
        self.bad: dict[int, tuple[int, int]] = {}
        """Infinities and NaNs by the id of the parameter, where the host could count them."""
        self.present: Tensor | None = None
        """bool: whether any rank has had it in this window; None where this one has."""
        self.judged = False
        """Whether an `update()` has moved its scale by what is known here."""
        self._params: set[int] = set()

    def note_loss(self, loss: Tensor) -> None:
        """Remembers whether `loss` was finite."""
        flag = torch.isfinite(loss.detach()).all()
        self.loss_finite = self.loss_finite & move(flag, self.scale.device)

    def note(self, params: Iterable[Tensor], reading: Reading) -> None:
        """Remembers whose gradients it made, and what they were like."""
        self.passes += 1
        there = list(params)
        self._params.update(map(id, there))
        if reading.amax is not None:
            self.amax = torch.maximum(self.amax, move(reading.amax, self.amax.device))
        for flag in reading.found_inf.values():
            self.finite = self.finite & (move(flag, self.scale.device) == 0)
        if readable(self.finite) and not self.finite and not self.bad:
            self.bad = count_bad(there)

    def reaches(self, optimizer: Optimizer) -> bool:
        """Whether it made gradients for `optimizer`."""
        params = (id(p) for group in optimizer.param_groups for p in group["params"])
        return not self._params.isdisjoint(params)


@torch.no_grad()
def backward_alone(
    scaled: list[Tensor],
    window: Window,
    own: OwnLoss,
    known: Iterable[Tensor],
    kwargs: Mapping[str, Any],
) -> None:
    """Runs the backward pass of `scaled` losses, and adds its gradients at the window's scale.

    `known` parameters may have gradients of it although they are not in its graph.
    """
    with _apart(scaled, window, known, kwargs, "a loss_id") as made:
        window.begun += 1
        window.own_passes += 1
        window.blank = None
        values = values_of(made)
        own.note(made, read(values, torch.ones_like(own.scale)))
        multiply(values, window.scale / own.scale)
        clear(values, ~own.finite)


@torch.no_grad()
def backward_spared(
    scaled: list[Tensor],
    window: Window,
    known: Iterable[Tensor],
    agreed: Callable[[Tensor, Sequence[Tensor]], Tensor],
    kwargs: Mapping[str, Any],
) -> None:
    """Runs the backward pass of `scaled` losses, and adds its gradients if they are finite.

    On all ranks, or on none: `agreed` asks the others about gradients of certain parameters.
    """
    begun = window.begun
    with _apart(scaled, window, known, kwargs, "spare=True") as made:
        values = values_of(made)
        reading = read(values, window.inv_scale)
        finite = reading.fits
        for flag in reading.found_inf.values():
            finite = finite & (move(flag, finite.device) == 0)
        finite = agreed(finite, made)
        clear(values, ~finite)
        window.note_spared(finite, window.begun - begun)


def weigh_up(params: Iterable[Tensor], window: Window) -> None:
    """Has the passes of `window` that were not left out weigh as much as all of them, once."""
    if window.dropped is None:
        return
    if window.spared_begun != window.begun:
        raise CallOrderError(
            f"{window.spared_begun} of {window.begun} losses had spare=True, so what is left out "
            "cannot be made up for. Give it to all losses of a step, or to none."
        )
    rest = (window.spared - window.dropped).clamp(min=1)
    new = window.weigh(params)
    multiply(values_of(new), (window.spared / rest).to(torch.float32))


@contextmanager
def _apart(
    scaled: list[Tensor],
    window: Window,
    known: Iterable[Tensor],
    kwargs: Mapping[str, Any],
    what: str,
) -> Iterator[list[Tensor]]:
    """The tensors that a backward pass of `scaled` has made gradients for, with these alone.

    Afterwards they are added to those that were there before.
    """
    if kwargs.get("create_graph"):
        raise SettingError(
            f"create_graph does not go with {what}: the gradients are changed afterwards. Use "
            "scaler.grad() for gradient penalties."
        )
    leaves = _leaves(scaled, kwargs.get("inputs"))
    if kwargs.get("inputs") is not None:
        kwargs = {**kwargs, "inputs": leaves}  # it may have been a generator
    # FSDP takes gradients away from the leaves of the graph, and gives them to its parameters.
    inside = {id(leaf) for leaf in leaves}
    others = [param for param in known if id(param) not in inside]
    leaves = [leaf for leaf in leaves if not _is_hidden(leaf, others)]
    if window.unscaled([*leaves, *others]):
        raise CallOrderError(
            f"A loss with {what} would add to gradients that are unscaled already. Call "
            "optimizer.zero_grad() before its backward pass."
        )
    window.look_at_waiting()
    before = [(leaf, leaf.grad, _set_aside(leaf)) for leaf in leaves]
    before += [(param, param.grad, None) for param in others]
    for param in others:
        param.grad = None
    try:
        with torch.enable_grad():
            torch.autograd.backward(scaled, **kwargs)
    except BaseException:
        for leaf, grad, copy in before:
            leaf.grad = grad if copy is None or grad is None else grad.copy_(copy)
        raise
    lost = any(leaf.grad is None for leaf in leaves) and has_ranks()
    if lost and all(param.grad is None for param in others):
        raise CallOrderError(
            f"The gradients of a loss with {what} have gone to tensors that the scaler does not "
            "know, as those of FSDP do. Call optimizer.zero_grad(), and scaler.name(model) before "
            "the first loss."
        )
    yield [leaf for leaf, _, _ in before if leaf.grad is not None]
    for leaf, grad, copy in before:
        if copy is not None and leaf.grad is not None:
            leaf.grad.add_(copy)
        elif leaf.grad is None:
            leaf.grad = grad
        elif grad is not None and grad.layout is torch.strided is leaf.grad.layout:
            leaf.grad.add_(grad)  # in place: FSDP1 has the memory
        elif grad is not None:  # in a sum a dense one must come first
            leaf.grad = leaf.grad + grad
    window.note_added()


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
                "A loss with a loss_id or spare=True cannot see the parameters inside a reentrant "
                "checkpoint. Call checkpoint() with use_reentrant=False."
            )
        for nearer, _ in node.next_functions:
            if nearer is not None and nearer not in seen:
                seen.add(nearer)
                waiting.append(nearer)
    return list(found.values())
