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


class Idle:
    """Some elements of the weights that had no gradient, or only zeros, in the sample before."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensor, bool]] = {}

    def keep(self, name: str, param: Tensor, *, decays: bool) -> None:
        """Keeps elements of `param` as they are now.

        Args:
            name: The name of the parameter.
            param: The parameter.
            decays: Whether an optimizer can apply weight decay to it. It skips those without a
                gradient, but not those whose gradient is zero.
        """
        self._kept[name] = _some(local(param)).clone(), decays

    def changed(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of every parameter that was kept, whether a step has changed it since; forgets them."""
        found = {}
        for name, (before, decays) in self._kept.items():
            if name not in params:  # complex, or moved away by now
                continue
            now = _some(local(params[name]))
            if now.shape != before.shape or now.device != before.device:
                continue
            moved = now != before
            if decays:
                # Weight decay makes every weight smaller, a gradient about half of them.
                found[name] = ((now.abs() > before.abs()).sum() * 8 > moved.sum()).float()
            else:
                found[name] = moved.any().float()
        self._kept = {}
        return found


class Weights:
    """The weights of one sampled iteration.

    Args:
        params: Those of the model, by name.
        idle: The weights without a gradient in the sample before; replaced by those of this one.
    """

    def __init__(self, params: Mapping[str, Tensor], idle: Idle | None = None) -> None:
        self._idle = Idle() if idle is None else idle
        plain = {name: p for name, p in params.items() if local(p).dtype in FLOATING}
        self._params = {n: p for n, p in plain.items() if local(p).numel() and not p.is_meta}
        # In float32 a step that changes nothing is a small learning rate, as in a warm-up.
        halves = [n for n, p in self._params.items() if local(p).dtype in HALVES]
        self._halves = [name for name in halves if self._params[name].requires_grad]
        self._before: list[Tensor] = []
        self._grads: dict[str, Tensor] = {}
        self._left: dict[str, Tensor] = {}
        self._left_at_step: set[str] = set()
        self._numbers: dict[tuple[str, str], Tensor] = {}
        """Facts on the device, by their names and where they are."""

    def begin(self) -> None:
        """Keeps some of the weights, as they are before the step."""
        self._before = [_some(local(self._params[name])).clone() for name in self._halves]
        self._note_sizes("weights_before")
        for name, changed in self._idle.changed(self._params).items():
            self._numbers["trained_between", name] = changed

    def at_first_pass(self, stepped: Iterable[Tensor] | None) -> None:
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

    def at_later_pass(self) -> None:
        """Drops the gradients of before that were cleared meanwhile and that no step has used.

        In a GAN, the pass of the critic may add to the gradients of the generator, which are
        cleared before its own pass.
        """
        for name in [name for name in self._left if name not in self._left_at_step]:
            grad = gradient(self._params[name])
            if grad is None:
                del self._left[name]
            else:
                self._left[name] = self._left[name] * (grad != 0).any()

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

    def at_step(self, scale: Tensor | float, params: Iterable[Tensor]) -> None:
        """Keeps the norm of the gradients that the optimizer of `params` uses, times `scale`."""
        self._numbers["norm_used", ""] = self.norm() * scale
        used = {id(param) for param in params}
        self._left_at_step |= {name for name in self._left if id(self._params[name]) in used}

    def end(
        self,
        stepped: Iterable[Tensor] | None,
        exact: Iterable[Tensor],
        with_grad: Collection[str],
    ) -> None:
        """Looks at the weights after the step.

        Args:
            stepped: The parameters that were stepped; None: all.
            exact: Those whose steps lose nothing to rounding.
            with_grad: The names of those that had a gradient.
        """
        for name, param in self._params.items():
            if param.requires_grad and name not in with_grad:
                self._idle.keep(name, param, decays=False)
        kept = {id(param) for param in exact}
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
