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

from gradscale.errors import CallOrderError
from gradscale.torch.unscale import clear, move, multiply, read, values_of

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
        self.judged = False
        """Whether an `update()` has moved its scale by what is known here."""
        self._params: set[int] = set()

    def note_loss(self, loss: Tensor) -> None:
        """Remembers whether `loss` was finite."""
        flag = torch.isfinite(loss.detach()).all()
        self.loss_finite = self.loss_finite & move(flag, self.scale.device)

    def note(self, params: Iterable[Tensor], found_inf: Iterable[Tensor]) -> None:
        """Remembers whose gradients it made, and whether they were finite."""
        self._params.update(map(id, params))
        for flag in found_inf:
            self.finite = self.finite & (move(flag, self.scale.device) == 0)

    def reaches(self, optimizer: Optimizer) -> bool:
        """Whether it made gradients for `optimizer`."""
        params = (id(p) for group in optimizer.param_groups for p in group["params"])
        return not self._params.isdisjoint(params)


@torch.no_grad()
def backward_alone(
    scaled: list[Tensor], window: Window, own: OwnLoss, kwargs: Mapping[str, Any]
) -> None:
    """Runs the backward pass of `scaled` losses, and adds its gradients at the window's scale."""
    leaves = _leaves(scaled, kwargs.get("inputs"))
    before = [(leaf, leaf.grad) for leaf in leaves]
    if window.split([leaf for leaf, grad in before if grad is not None])[1]:
        raise CallOrderError(
            "A loss with a loss_id would add to gradients that have another scale or are unscaled "
            "already. Call optimizer.zero_grad() before its backward pass."
        )
    for leaf in leaves:
        leaf.grad = None
    try:
        with torch.enable_grad():
            torch.autograd.backward(scaled, **kwargs)
    except BaseException:
        for leaf, grad in before:
            leaf.grad = grad
        raise
    window.begun += 1
    window.blank = None
    made = [leaf for leaf in leaves if leaf.grad is not None]
    values = values_of(made)
    own.note(made, read(values, torch.ones_like(own.scale)).found_inf.values())
    multiply(values, window.scale / own.scale)
    clear(values, ~own.finite)
    for leaf, grad in before:
        if grad is None:
            continue
        if leaf.grad is None:
            leaf.grad = grad
        elif grad.layout is torch.strided:
            leaf.grad = grad.add_(leaf.grad)  # the same tensor: others may hold it, as DDP does
        else:
            leaf.grad = grad + leaf.grad


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
        for nearer, _ in node.next_functions:
            if nearer is not None and nearer not in seen:
                seen.add(nearer)
                waiting.append(nearer)
    return list(found.values())
