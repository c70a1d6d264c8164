"""What was seen inside a model at one step: the magnitudes of its tensors, as plain numbers."""

from __future__ import annotations

from typing import NamedTuple


class TensorSample(NamedTuple):
    """The magnitudes of one tensor."""

    name: str
    """The module or parameter."""
    kind: str
    """ "activation", "activation_grad", "weight_grad" or "weight"."""
    numel: int
    low: int
    """The exponent, floor(log2|x|), of the first of `counts`."""
    counts: tuple[int, ...]
    """Finite nonzero elements per binade from `low` on, without zeros at either end."""
    zeros: int
    """Elements that are exactly zero."""
    flushed: int | None
    """Zeros that a float32 replay shows to be nonzero; None: not replayed."""
    infs: int
    nans: int
    scale: float = 1.0
    """What the values are multiplied by: gradients before unscaling."""


class Sample(NamedTuple):
    """The tensors of one step."""

    step: int
    """The `update()` that ends it, counted from 1 since the beginning of the training."""
    format: str
    """The narrowest format of the step, such as "float16"."""
    tensors: tuple[TensorSample, ...]
    first_nonfinite: tuple[str, str, float, float] | None
    """Module, "forward" or "backward", and the smallest and largest magnitude of its inputs."""
    facts: tuple[tuple[str, str, float], ...]
    """What else was found: the fact, where, and a number."""
