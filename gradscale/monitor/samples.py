"""Samples: what one iteration's activations, gradients and weights were like, in plain numbers.

An engine counts elements by binade on the device; everything else (shares, headroom) follows from
these counts and from the format, here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradscale.formats import Format, format_named

ACTIVATION, ACTIVATION_GRAD, WEIGHT_GRAD = "activation", "activation_grad", "weight_grad"


class TensorSample(NamedTuple):
    """Counts of the elements of one tensor, or of all tensors of one kind of a module, by size."""

    name: str
    """The module or the parameter."""
    kind: str
    """One of "activation" (outputs), "activation_grad" (gradients of outputs) or "weight_grad"."""
    numel: int
    """Number of elements counted."""
    low: int = 0
    """The exponent, floor(log2(abs(x))), of the first bin."""
    counts: tuple[int, ...] = ()
    """Finite nonzero elements per binade, from `low` on; the first and the last are not zero."""
    zeros: int = 0
    """Number of exact zeros."""
    flushed: int | None = None
    """Number of zeros that are nonzero in a float32 replay; None: not replayed."""
    infs: int = 0
    """Number of infinite elements."""
    nans: int = 0
    """Number of NaN elements."""
    scale: float = 1.0
    """The factor that the values are multiplied by: that of gradients before unscaling."""
    format: str = ""
    """The format that they were computed in; "": that of the sample."""

    def high(self) -> int | None:
        """The exponent of the largest finite element; None if all are zero or not finite."""
        return self.low + len(self.counts) - 1 if self.counts else None

    def nonzero(self) -> int:
        """Number of elements that are finite and not zero."""
        return sum(self.counts)

    def below(self, number: float) -> int:
        """Returns the number of nonzero elements below `number`, a power of two."""
        return sum(self.counts[: max(math.frexp(number)[1] - 1 - self.low, 0)])

    def small_part(self, format: Format) -> float:
        """The share of the sum of magnitudes that subnormal and flushed elements have, at most.

        >>> from gradscale.formats import FLOAT16
        >>> TensorSample("x", "activation", 5, low=-15, counts=(4, 0, 0, 1)).small_part(FLOAT16)
        0.3333333333333333
        """
        if not self.counts:
            return 1.0
        sizes = [math.ldexp(count, place) for place, count in enumerate(self.counts)]
        normal = math.frexp(format.smallest_normal)[1] - 1
        tiniest = math.frexp(format.smallest_subnormal)[1] - 1
        flushed = math.ldexp(self.flushed or 0, tiniest - self.low)
        return (sum(sizes[: max(normal - self.low, 0)]) + flushed) / (sum(sizes) + flushed)

    def subnormal(self, format: Format) -> float:
        """Returns the share of the nonzero elements below the format's smallest normal number.

        Examples:
            >>> from gradscale.formats import FLOAT16
            >>> TensorSample("x", "activation", 4, low=-15, counts=(1, 3)).subnormal(FLOAT16)
            0.25
        """
        return _share(self.below(format.smallest_normal), self.nonzero())

    def saturated(self, format: Format) -> float:
        """Returns the share of the elements in the format's last binade, or not finite."""
        last = sum(self.counts[max(format.ceiling - 1 - self.low, 0) :])
        return _share(last + self.infs + self.nans, self.numel)

    def underflow(self) -> float | None:
        """The share of elements nonzero in float32 that are zero here; None: not replayed."""
        if self.flushed is None:
            return None
        return _share(self.flushed, self.flushed + self.nonzero() + self.infs + self.nans)

    def headroom(self, format: Format) -> int | None:
        """Returns the binades from the largest element to the ceiling; None without elements."""
        high = self.high()
        return None if high is None else format.ceiling - 1 - high


class Sample(NamedTuple):
    """One sampled iteration."""

    step: int
    """Number of the `update()` that ended it, counted from 1."""
    format: str
    """The narrowest format of activations."""
    tensors: tuple[TensorSample, ...] = ()
    first_nonfinite: tuple[str, str, float, float] | None = None
    """The module at which a value that is not finite first appeared; "forward" or "backward"; and
    the smallest and the largest of its inputs (backward: of the gradients of its outputs), NaN if
    unknown. Only if it reached an output of the model or the gradient of a weight."""
    facts: tuple[tuple[str, str, float], ...] = ()
    """(fact, where, number), see `FACTS`."""

    def of(self, kind: str) -> list[TensorSample]:
        """Returns the tensors of this kind."""
        return [tensor for tensor in self.tensors if tensor.kind == kind]

    def fact(self, name: str) -> dict[str, float]:
        """Returns the numbers of this fact, by where they are."""
        return {where: number for fact, where, number in self.facts if fact == name}

    def format_of(self, tensor: TensorSample) -> Format:
        """Returns the format that `tensor` was computed in."""
        return format_named(tensor.format or self.format)


FACTS = {
    "applied": "1: the step of this iteration was applied, 0: it was skipped",
    "scale": "the scale of the gradients",
    "loss_finite": "1: the loss was finite, 0: it was not",
    "no_grad": "1: the parameter had no gradient in this iteration, though others had one",
    "trained_between": "1: the parameter, whose gradient was zero or missing in the last sample, "
    "has changed since, and not by weight decay alone",
    "update_lost": "share of the weights with a gradient that the step left as they were",
    "weights_spoilt": "1: weights of the parameter were not finite before the iteration",
    "weights_nonfinite": "1: weights of the parameter are not finite after the step",
    "weights_large": "the largest weight, if it is more than a 64th of what float16 can hold",
    "data_nonfinite": "1: the model was given values that are not finite",
    "leftover": "largest gradient that an earlier step had used, to which this iteration added",
    "norm_made": "2-norm of the scaled gradients after the last backward pass",
    "norm_used": "2-norm of the gradients, at the scale of that pass, when the optimizer stepped",
    "used_twice": "calls of a module for each call of the model",
}


def _share(part: int, whole: int) -> float:
    """`part` of `whole`; 0 of nothing."""
    return part / whole if whole else 0.0
