"""Array operations that the policies share, by the names they have in all frameworks.

`scalars` provides the same operations for plain Python numbers. Constants are created with the
dtype of the state, because a bare Python float would promote it.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeVar

from gradscale.formats import FLOAT32


class _Scalars:
    """The array operations that the policies use, for plain numbers of float32 precision."""

    float32 = float
    int32 = int

    def full(self, shape: tuple[()], value: float, dtype: type) -> Any:
        return float32(value) if dtype is float else int(value)

    def full_like(self, like: Any, value: float, dtype: type | None = None) -> Any:
        return self.full((), value, dtype or type(like))

    def where(self, condition: bool, a: Any, b: Any) -> Any:
        chosen = a if condition else b
        return float32(chosen) if isinstance(chosen, float) else chosen

    minimum = staticmethod(min)
    maximum = staticmethod(max)

    def log2(self, value: float) -> float:
        return float32(math.log2(value))

    def sqrt(self, value: float) -> float:
        return float32(math.sqrt(value))


def float32(value: float) -> float:
    """`value` rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


scalars = _Scalars()


def new(xp: Any, like: Any, value: float) -> Any:
    """A 0-dim constant, float32 or int32 by the type of `value`, or one shaped as `like`."""
    name = "float32" if isinstance(value, float) else "int32"
    dtype = getattr(xp, name, name)  # keras.ops has no dtypes, and takes their names
    if like is None:
        return xp.full((), value, dtype=dtype)
    return xp.full_like(like, value, dtype=dtype)


def room_below(factor: float) -> float:
    """The largest float32 number whose product with `factor` does not overflow float32."""
    factor = float32(factor)
    room = float32(FLOAT32.max / factor)
    return room if room * factor <= FLOAT32.max else float32(room * (1 - 2.0**-24))


S = TypeVar("S", bound=tuple[Any, ...])


def where_all(condition: Any, moved: S, held: S, xp: Any) -> S:
    """The state `moved` where `condition` is true, else the state `held`."""
    pairs = zip(moved, held, strict=True)
    return type(held)(*(xp.where(condition, new, old) for new, old in pairs))


_BITS = (64, 32, 16, 8, 4, 2, 1)


def log2_of(scale: Any, xp: Any, zero: Any) -> Any:
    """The floor of log2 of a normal float32 number, with the dtype of `zero`.

    By comparisons alone: frameworks differ in the last bit of log2, and not all have frexp.
    """
    exponent, one = zero, xp.full_like(scale, 1.0)
    # Multiply by 1 where nothing changes: a product that is not selected could overflow.
    for _ in range(2):
        small = scale < one
        scale = scale * xp.where(small, xp.full_like(scale, 2.0**64), one)
        exponent = xp.where(small, exponent - xp.full_like(zero, 64), exponent)
    for bits in _BITS:
        large = scale >= xp.full_like(scale, 2.0**bits)
        scale = scale * xp.where(large, xp.full_like(scale, 2.0**-bits), one)
        exponent = xp.where(large, exponent + xp.full_like(zero, bits), exponent)
    return exponent


def power_of_two(exponent: Any, xp: Any, one: Any) -> Any:
    """2 to the power of the floor of `exponent` (-126 to 127), exact, as float32 like `one`."""
    zero = xp.full_like(exponent, 0)
    negative = exponent < zero
    left, power = xp.where(negative, zero - exponent, exponent), one
    half = xp.full_like(one, 0.5)
    for bits in _BITS:
        there = left >= xp.full_like(exponent, bits)
        up, down = xp.full_like(one, 2.0**bits), xp.full_like(one, 2.0**-bits)
        power = power * xp.where(there, xp.where(negative, down, up), one)
        left = xp.where(there, left - xp.full_like(exponent, bits), left)
    return power * xp.where(negative & (left > zero), half, one)
