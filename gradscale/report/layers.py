"""The magnitudes of a model's tensors against the range of their format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradscale.errors import SettingError
from gradscale.formats import FLOAT16, Format, format_named
from gradscale.monitor.samples import Sample, TensorSample

KINDS = {
    "weight_grad": "gradients of weights",
    "activation_grad": "gradients of activations",
    "activation": "activations",
    "weight": "weights",
}
"""Every kind of tensor, for people."""


class Range(NamedTuple):
    """The limits of a format, as exponents of two: what floor(log2|x|) gives."""

    name: str
    smallest: int
    """Of the smallest number: below it a value is lost."""
    normal: int
    """Of the smallest number with all digits: below it a value loses some."""
    largest: int
    """Of the largest number: above it a value overflows."""
    max: float
    """The largest number itself."""


class Shares(NamedTuple):
    """How much of a tensor fits, among the elements that are not truly zero."""

    lost: float
    """Below the smallest number, or flushed to zero."""
    imprecise: float
    """Below the smallest number with all digits, and not lost."""
    overflowed: float
    """Infinite, or above the largest number."""
    nan: float


def range_of(name: str) -> Range:
    """The range of the format called `name`; of one that is not known, float16's."""
    try:
        found: Format = format_named(name)
    except SettingError:
        found = FLOAT16
    limits = (found.smallest_subnormal, found.smallest_normal)
    smallest, normal = (math.frexp(limit)[1] - 1 for limit in limits)
    return Range(found.name, smallest, normal, found.ceiling - 1, found.max)


def range_in(sample: Sample, tensor: TensorSample) -> Range:
    """The range of the format in which a tensor of a sample was computed."""
    return range_of(tensor.format or sample.format)


def shares_of(tensor: TensorSample, limits: Range) -> Shares:
    """The shares of `tensor` in the range of its format.

    >>> tensor = TensorSample("w", "weight_grad", 8, -26, (1, 0, 2), 3, 1, 1, 0)
    >>> shares_of(tensor, range_of("float16"))
    Shares(lost=0.4, imprecise=0.4, overflowed=0.2, nan=0.0)
    """
    lost, imprecise, above = tensor.flushed or 0, 0, tensor.infs
    for exponent, count in enumerate(tensor.counts, tensor.low):
        if exponent < limits.smallest:
            lost += count
        elif exponent < limits.normal:
            imprecise += count
        elif exponent > limits.largest:
            above += count
    whole = sum(tensor.counts) + (tensor.flushed or 0) + tensor.infs + tensor.nans
    return Shares(
        *(part / whole if whole else 0.0 for part in (lost, imprecise, above, tensor.nans))
    )


def worst(sample: Sample, kind: str, limit: int) -> list[TensorSample]:
    """At most `limit` tensors of that kind, those that lose or overflow most, in model order."""
    found = sample.of(kind)
    if len(found) <= limit:
        return found

    def badness(index: int) -> tuple[float, float]:
        shares = shares_of(found[index], range_in(sample, found[index]))
        return shares.lost + shares.overflowed + shares.nan, shares.imprecise

    kept = sorted(range(len(found)), key=badness, reverse=True)[:limit]
    return [found[index] for index in sorted(kept)]


def chosen(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` samples, evenly over the run, the first and the last among them."""
    if len(samples) <= limit:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (limit - 1)] for i in range(limit)]


def underflow_by_layer(sample: Sample, limit: int = 10) -> list[dict[str, Any]]:
    """The gradients of `sample` that lose most to underflow, the worst first."""
    rows = [
        {"name": tensor.name, "lost": shares.lost, "imprecise": shares.imprecise}
        for tensor in sample.tensors
        if tensor.kind.endswith("_grad")
        for shares in [shares_of(tensor, range_in(sample, tensor))]
        if shares.lost or shares.imprecise
    ]
    rows.sort(key=lambda row: (row["lost"], row["imprecise"]), reverse=True)
    return rows[:limit]
