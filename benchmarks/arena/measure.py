"""What is written down of a step, and what the steps of a run say together.

Every arm is measured by the same code: it looks at the scaled gradients after the backward pass and
at the optimizer's own count of its steps. The numbers of a step stay on the device until the run is
over: processes that share a GPU wait for one another whenever one of them waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

SMALLEST_NORMAL = 2.0**-14
"""Of float16."""
NEAR = 2.0
"""So many binades away, a scale is still a good one."""


class Look(NamedTuple):
    """What the scaled gradients of one step show."""

    finite: bool
    underflow: float
    """Of the elements that are not zero: the share below float16's smallest normal number.

    1 if nothing is left, as otherwise the lowest scale of all would look best."""
    alive: frozenset[int]
    """The places of the tensors that are not zero everywhere."""


class Step(NamedTuple):
    """What became of one step."""

    loss_finite: bool
    applied: bool
    scale: float
    """The one that was used."""
    look: Look


class Summary(NamedTuple):
    """What the steps of a run say together."""

    skipped: int
    """Although the loss was finite."""
    excused: int
    """Skipped because the loss was not."""
    wasted: int
    """Skipped although the loss was finite, or before the first step that was applied."""
    underflow: float
    """The mean share over the applied steps; NaN if there are none."""
    dead: int
    """Tensors that never had a gradient in an applied step."""
    moves: int
    """How often the scale was moved."""


class Reading(NamedTuple):
    """One step as it was measured, still on the device."""

    numbers: Tensor
    """float64: the optimizer's count before and after the step, the loss, the scale, and what
    `look` returns."""
    first: int
    """The place of the optimizer's first tensor among all of the training."""


def look(grads: Sequence[Tensor]) -> Tensor:
    """What `grads`, which are still scaled, show, in float64.

    The number of small elements, that of elements that are not zero, and the largest magnitude of
    every tensor.
    """
    sizes = [grad.numel() for grad in grads]
    flat = torch.cat([grad.detach().flatten().float() for grad in grads]).abs()
    nonzero = flat > 0
    small = (nonzero & (flat < SMALLEST_NORMAL)).sum()
    peaks = torch.stack(torch._foreach_norm(flat.split(sizes), math.inf))
    return torch.cat([torch.stack([small, nonzero.sum()]).double(), peaks.double()])


def finite(grads: Sequence[Tensor]) -> Tensor:
    """Whether all elements are finite, on the device."""
    norms = torch._foreach_norm(grads, math.inf)
    return torch.stack([norm.float() for norm in norms]).isfinite().all()


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """A copy of a number in float64, on the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True, copy=True).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=device)


def read(readings: Sequence[Reading]) -> list[Step]:
    """What became of the steps; waits for the device once."""
    if not readings:
        return []
    every = torch.cat([reading.numbers for reading in readings]).tolist()
    steps, begin = [], 0
    for numbers, first in readings:
        end = begin + len(numbers)
        before, after, loss, scale, few, many, *tops = every[begin:end]
        begin = end
        alive = frozenset(place for place, top in enumerate(tops, first) if not top == 0)
        seen = Look(all(map(math.isfinite, tops)), few / many if many else 1.0, alive)
        steps.append(Step(math.isfinite(loss), after > before, scale, seen))
    return steps


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of the optimizer's parameters; zeros where there is none."""
    params = parameters(optimizer)
    return [torch.zeros_like(param) if param.grad is None else param.grad for param in params]


def steps_taken(optimizer: Optimizer) -> Tensor | float:
    """How many steps the optimizer counts for its first tensor; skipped ones are not counted."""
    counts = (state["step"] for state in optimizer.state.values() if "step" in state)
    return next(counts, 0.0)


def summarise(steps: Sequence[Step], num_tensors: int) -> Summary:
    """What the `steps` of a run with so many gradient tensors say."""
    applied = [step for step in steps if step.applied]
    skipped = sum(step.loss_finite and not step.applied for step in steps)
    first = next((place for place, step in enumerate(steps) if step.applied), len(steps))
    excused_first = sum(not step.loss_finite for step in steps[:first])
    alive = frozenset[int]().union(*(step.look.alive for step in applied))
    shares = [step.look.underflow for step in applied]
    return Summary(
        skipped=skipped,
        excused=sum(not step.loss_finite and not step.applied for step in steps),
        wasted=skipped + excused_first,
        underflow=sum(shares) / len(shares) if shares else math.nan,
        dead=num_tensors - len(alive),
        moves=sum(one.scale != other.scale for one, other in pairwise(steps)),
    )


def steps_to_good(history: Sequence[float], best: float, start: int = 0) -> int:
    """Steps from `start` until the scale stays near `best`; both are logarithms to the base 2.

    The answer is the number of all steps from `start` on if it is not near at the end.
    """
    far = [place for place, scale in enumerate(history) if abs(scale - best) > NEAR]
    return max(0, far[-1] + 1 - start) if far else 0


def log2(scale: float) -> float:
    """The logarithm to the base 2; minus infinity of 0, to which torch's scale can fall."""
    return math.log2(scale) if scale > 0 else -math.inf


def pack(history: Iterable[float]) -> str:
    """Scales as text, each with how often it comes in a row.

    >>> pack([16.0, 16.0, 15.0])
    '16x2 15x1'
    """
    return " ".join(f"{value:g}x{len(list(same))}" for value, same in groupby(history))


def unpack(text: str) -> list[float]:
    """What `pack` has packed."""
    pairs = (word.split("x") for word in text.split())
    return [float(value) for value, count in pairs for _ in range(int(count))]
