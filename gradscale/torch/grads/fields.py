"""The numbers of a step: one list for every vector that kernels, ranks and the host exchange.

A vector has one 32-bit word for each field of its list, in order. Offsets in kernels, the words of
ranks and the words of records are all generated from these lists, so a field is added, moved or
dropped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Field(NamedTuple):
    """One word of a vector."""

    name: str
    dtype: torch.dtype
    """The type of the value. Where it differs from that of the vector, the word has its bits; a
    bool is an int32 that is 0 or 1."""
    fold: str = ""
    """How the words of several ranks are combined, in `REPORT`: "max" (a NaN counts as infinity),
    "min", "norm" (the 2-norm) or "checksum" (the common value, -1 if the ranks differ)."""


SUMMARY = (
    Field("non_finite", torch.float32),  # 1 if a scaled element is not finite, else 0
    Field("fits", torch.float32),  # 1 if every unscaled element is finite where it is stored
    Field("amax", torch.float32),  # the largest scaled magnitude; inf or NaN if there is one
    Field("norm", torch.float32),  # 2-norm of the unscaled elements; undefined if non_finite
    Field("clip", torch.float32),  # the factor that clips that norm to max_norm, at most 1
    Field("underflow", torch.float32),  # share of nonzero elements below the smallest normal
    Field("finite_amax", torch.float32),  # the largest scaled magnitude of the finite elements
)
"""What one read of the gradients measures (float32)."""

DECISION = (
    Field("grad_norm", torch.float32),  # as `norm` above; NaN if the step is skipped
    Field("amax", torch.float32),
    Field("underflow", torch.float32),
    Field("divisor", torch.float32),  # what the optimizer divides gradients by, clipping included
    Field("skip", torch.float32),  # 1 if the step is skipped, else 0: torch's found_inf
    Field("finite_amax", torch.float32),
    Field("skipped_in_a_row", torch.int32),
    Field("applied", torch.bool),
    Field("finite", torch.bool),
    Field("fits", torch.bool),
    Field("loss_finite", torch.bool),
)
"""What a kernel decides about a step (float32)."""

REPORT = (
    Field("non_finite", torch.float32, "max"),
    Field("unfit", torch.float32, "max"),  # 1 if an unscaled element overflows where it is stored
    Field("loss_non_finite", torch.float32, "max"),
    Field("penalty_non_finite", torch.float32, "max"),  # of gradients that grad() returned
    Field("has_gradients", torch.float32, "max"),
    Field("has_common_loss", torch.float32, "max"),  # a pass of a loss with the common scale
    Field("amax", torch.float32, "max"),
    Field("norm", torch.float32, "norm"),  # of the elements that count as this rank's
    Field("checksum", torch.float32, "checksum"),  # of the scale and what goes with it
    Field("bad_rank", torch.float32, "min"),  # the lowest rank with non_finite, infinity if none
)
"""What each rank contributes, and then what all of them found (float32). The flags come first."""

RECORD = (
    Field("step", torch.int32),  # how many updates there have been
    Field("scale", torch.float32),  # after the update
    Field("before", torch.float32),  # of loss 0
    Field("after", torch.float32),  # of loss 0
    Field("applied", torch.int32),
    Field("loss_finite", torch.int32),
    Field("skipped_in_a_row", torch.int32),
)
"""What a kernel writes for the host to read (int32)."""


def offset(fields: Sequence[Field], name: str) -> int:
    """The index of the word called `name`."""
    return [field.name for field in fields].index(name)


def value_at(vector: Tensor, name: str, fields: Sequence[Field] = DECISION) -> Tensor:
    """The value called `name` of a contiguous vector, as a 0-dim tensor that shares its memory."""
    place = offset(fields, name)
    dtype = fields[place].dtype
    if dtype is vector.dtype:
        return vector[place]
    return vector[place : place + 1].view(dtype)[0]
