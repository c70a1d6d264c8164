"""A scale that does not change any more."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Scale(NamedTuple):
    """What some gradients were multiplied by: a float32 tensor that nobody writes to.

    On the CPU its value is also a number, and what is decided there is decided with numbers.
    """

    tensor: Tensor
    number: float | None
    """The value, where the state of the scaler is plain numbers; else None."""
    reciprocal: Tensor | None = None
    """float32: 1 / scale, where it is known."""

    @property
    def value(self) -> Tensor | float:
        """The number, where it is known; else the tensor."""
        return self.tensor if self.number is None else self.number

    @property
    def inverse(self) -> Tensor:
        """float32: what the gradients must be multiplied by."""
        if self.reciprocal is not None:
            return self.reciprocal
        with torch.inference_mode(False):
            return self.tensor.reciprocal()

    def over(self, other: Scale) -> Tensor:
        """float32: this scale divided by the `other` one."""
        if self.number is not None and other.number is not None:
            return constant(self.number / other.number)
        return self.tensor / move(other.tensor, self.tensor.device)

    def unit(self) -> Scale:
        """The scale of unscaled gradients, on the same device."""
        if self.number is not None:
            return UNIT
        one = torch.ones_like(self.tensor)
        return Scale(one, None, one)


@functools.lru_cache(maxsize=256)
def constant(value: float) -> Tensor:
    """A float32 number on the CPU that nobody writes to; kept, because making one takes 2 us."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device="cpu")


UNIT = Scale(constant(1.0), 1.0, constant(1.0))
"""The scale of unscaled gradients on the CPU."""


def move(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`; waits for a copy to the CPU, which would be read too early."""
    if value.device == device:
        return value
    return value.to(device, non_blocking=device.type != "cpu")


def readable(value: Tensor) -> bool:
    """Whether reading `value` waits for nothing."""
    return value.is_cpu


def times(value: Tensor, factor: Tensor) -> Tensor:
    """`value` times the float32 `factor`, in float32 where `value` is float16."""
    wide = value.float() if value.dtype is torch.float16 else value
    return wide * move(factor, value.device)
