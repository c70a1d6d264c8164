"""What an iteration does to weights and their gradients, besides what is counted by exponent.

Whether steps change the weights, whether weights are finite, whether gradients of a step before are
still there when the next pass begins, and what their norm is when the optimizer steps. Numbers stay
on the device until the sample is read. Per parameter 4,096 elements are compared: that gives shares
to 2 percentage points, for 16 KB each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from gradscale.torch.grads.dtensor import local
from gradscale.torch.inspect.counts import FLOATING, flat, gradient
from gradscale.torch.telemetry.transport import Sent

COMPARED = 4096
HALVES = (torch.float16, torch.bfloat16)


class Weights:
    """The weights of one sampled iteration.

    Args:
        params: Those of the model, by name.
        idle: Some elements of the weights that had no gradient in the sample before, as they were
            at its end; replaced by those of this sample.
    """

    def __init__(self, params: Mapping[str, Tensor], idle: dict[str, Tensor] | None = None) -> None:
        self._idle = {} if idle is None else idle
        plain = {name: p for name, p in params.items() if local(p).dtype in FLOATING}
        self._params = {n: p for n, p in plain.items() if local(p).numel() and not p.is_meta}
        # In float32 a step that changes nothing is a small learning rate, as in a warm-up.
        halves = [n for n, p in self._params.items() if local(p).dtype in HALVES]
        self._halves = [name for name in halves if self._params[name].requires_grad]
        self._before: list[Tensor] = []
        self._grads: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        self._numbers: dict[tuple[str, str], Tensor] = {}
        """Facts on the device, by their names and where they are."""

    def begin(self) -> None:
        """Keeps some of the weights, as they are before the step."""
        self._before = [_some(local(self._params[name])).clone() for name in self._halves]
        self._note_sizes("weights_before")
        for name, before in self._idle.items():
            now = _some(local(self._params[name]))
            if now.shape == before.shape and now.device == before.device:
                self._numbers["trained_between", name] = (now != before).any().float()
        self._idle.clear()

    def at_pass(self, stepped: Iterable[Tensor] | None) -> None:
        """Looks for gradients that were there before the first pass of the iteration.

        Args:
            stepped: The parameters that the last iteration has stepped; None: all.
        """
        used = None if stepped is None else {id(param) for param in stepped}
        for name, param in self._params.items():
            if param.grad is not None and (used is None or id(param) in used):
                value = gradient(param)
                if value is not None:
                    self._left[name] = torch.linalg.vector_norm(value, math.inf)

    def after_pass(self) -> None:
        """Keeps what the last pass left: some of the gradients, and their norm."""
        self._numbers["norm_made", ""] = self.norm()
        for name in self._halves:
            grad = gradient(self._params[name])
            if grad is not None:
                self._grads[name] = _some(grad).clone()

    def norm(self) -> Tensor:
        """float32: the 2-norm of all gradients as they are."""
        found = map(gradient, self._params.values())
        grads = [grad for grad in found if grad is not None]
        if not grads:
            return torch.zeros(())
        norms = torch._foreach_norm(grads, 2, torch.float32)
        return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))

    def at_step(self, scale: Tensor | float) -> None:
        """Keeps the norm of the gradients that an optimizer steps with, times `scale`."""
        self._numbers["norm_used", ""] = self.norm() * scale

    def end(
        self,
        stepped: Iterable[Tensor] | None,
        with_masters: Iterable[Tensor],
        with_grad: Collection[str],
    ) -> None:
        """Looks at the weights after the step.

        Args:
            stepped: The parameters that were stepped; None: all.
            with_masters: Those whose steps add up in masters of more bits.
            with_grad: The names of those that had a gradient.
        """
        for name, param in self._params.items():
            if param.requires_grad and name not in with_grad:
                self._idle[name] = _some(local(param)).clone()
        kept = {id(param) for param in with_masters}
        used = None if stepped is None else {id(param) for param in stepped}
        for name, before in zip(self._halves, self._before, strict=False):
            param, grad = self._params[name], self._grads.get(name)
            there = used is None or id(param) in used
            if grad is None or id(param) in kept or not there:
                continue
            still = (_some(local(param)) == before) & (grad != 0)
            self._numbers["update_lost", name] = still.sum() / (grad != 0).sum().clamp(min=1)
            self._numbers["updates", name] = (grad != 0).sum().float()
        for name, left in self._left.items():
            if used is None or id(self._params[name]) in used:
                self._numbers["leftover", name] = left
        self._note_sizes("weights_after")

    def _note_sizes(self, fact: str) -> None:
        """Keeps the largest weight of every parameter; NaN if there is one."""
        if self._params:
            values = [local(param.detach()) for param in self._params.values()]
            for name, amax in zip(self._params, torch._foreach_norm(values, math.inf), strict=True):
                self._numbers[fact, name] = amax

    def send(self) -> Numbers:
        """Everything that was found, on its way to the host."""
        return Numbers(self._numbers)


class Numbers:
    """Named numbers on their way to the host, in few copies."""

    def __init__(self, numbers: Mapping[tuple[str, str], Tensor]) -> None:
        by_device: dict[torch.device, list[tuple[str, str]]] = {}
        for key, number in numbers.items():
            by_device.setdefault(number.device, []).append(key)
        self._parts = [
            (keys, Sent.away(torch.stack([numbers[key].detach().float() for key in keys])))
            for keys in by_device.values()
        ]

    def arrived(self) -> bool:
        """Whether reading them would wait for nothing."""
        return all(sent.arrived() for _, sent in self._parts)

    def read(self) -> dict[tuple[str, str], float]:
        """The numbers."""
        found: dict[tuple[str, str], float] = {}
        for keys, sent in self._parts:
            found.update(zip(keys, sent.read().tolist(), strict=True))
        return found


@torch.no_grad()
def _some(tensor: Tensor) -> Tensor:
    """At most so many elements of a tensor, evenly spread."""
    value = flat(tensor)
    if value is None:
        return tensor.new_zeros(1)
    return value[:: -(-value.numel() // COMPARED)]
