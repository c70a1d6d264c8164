"""Losses with a scale of their own, also where they share parameters with others.

One `.grad` can hold one scale only. So the backward pass of such a loss starts from empty
gradients; what comes of it is read on its own, brought to the common scale of the window and added
to what was there. If it is not finite it adds nothing, so that the others' gradients can
still be judged, and the step is skipped because of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradscale.errors import CallOrderError, SettingError
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
    scaled: list[Tensor], window: Window, own: OwnLoss, kwargs: Mapping[str, Any]
) -> None:
    """Runs the backward pass of `scaled` losses, and adds its gradients at the window's scale."""
    if kwargs.get("create_graph"):
        raise SettingError(
            "create_graph does not go with a loss_id: the gradients are rescaled afterwards. Use "
            "scaler.grad() for gradient penalties."
        )
    leaves = _leaves(scaled, kwargs.get("inputs"))
    if kwargs.get("inputs") is not None:
        kwargs = {**kwargs, "inputs": leaves}  # it may have been a generator
    if window.unscaled(leaves):
        raise CallOrderError(
            "A loss with a loss_id would add to gradients that are unscaled already. Call "
            "optimizer.zero_grad() before its backward pass."
        )
    window.look_at_waiting()
    before = [(leaf, leaf.grad, _set_aside(leaf)) for leaf in leaves]
    try:
        with torch.enable_grad():
            torch.autograd.backward(scaled, **kwargs)
    except BaseException:
        for leaf, grad, copy in before:
            leaf.grad = grad if copy is None or grad is None else grad.copy_(copy)
        raise
    window.begun += 1
    window.own_passes += 1
    window.blank = None
    made = [leaf for leaf in leaves if leaf.grad is not None]
    values = values_of(made)
    own.note(made, read(values, torch.ones_like(own.scale)))
    multiply(values, window.scale / own.scale)
    clear(values, ~own.finite)
    for leaf, grad, copy in before:
        if copy is not None and leaf.grad is not None:
            leaf.grad.add_(copy)
        elif leaf.grad is None:
            leaf.grad = grad
        elif grad is not None:  # a sparse one; in a sum a dense one must come first
            leaf.grad = leaf.grad + grad
    window.note_added()


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
                "A loss with a loss_id cannot see the parameters inside a reentrant checkpoint. "
                "Call checkpoint() with use_reentrant=False."
            )
        for nearer, _ in node.next_functions:
            if nearer is not None and nearer not in seen:
                seen.add(nearer)
                waiting.append(nearer)
    return list(found.values())
