"""The floating-point formats of gradients, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradscale.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format: its bits, and its limits.

    Examples:
        >>> FLOAT16.max, FLOAT16.smallest_normal, FLOAT16.smallest_subnormal
        (65504.0, 6.103515625e-05, 5.960464477539063e-08)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    """The largest finite number."""
    infinite: bool = True
    """Whether the format has infinities; if not, an overflow gives NaN or the maximum."""

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal number; numbers below it have fewer mantissa bits."""
        return math.ldexp(1.0, 2 - (1 << (self.exponent_bits - 1)))

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return math.ldexp(self.smallest_normal, -self.mantissa_bits)

    @property
    def ceiling(self) -> int:
        """The frexp exponent of the largest finite number, which is below 2 to this power."""
        return math.frexp(self.max)[1]

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)


FLOAT32 = Format(name="float32", exponent_bits=8, mantissa_bits=23, max=(2.0 - 2.0**-23) * 2.0**127)
FLOAT16 = Format(name="float16", exponent_bits=5, mantissa_bits=10, max=(2.0 - 2.0**-10) * 2.0**15)
BFLOAT16 = Format(name="bfloat16", exponent_bits=8, mantissa_bits=7, max=(2.0 - 2.0**-7) * 2.0**127)
FLOAT8_E5M2 = Format(
    name="float8_e5m2", exponent_bits=5, mantissa_bits=2, max=(2.0 - 2.0**-2) * 2.0**15
)
# The all-ones exponent encodes ordinary numbers here, but for one pattern: hence 448, not 240.
FLOAT8_E4M3 = Format(
    name="float8_e4m3", exponent_bits=4, mantissa_bits=3, max=1.75 * 2.0**8, infinite=False
)

FORMATS = {f.name: f for f in (FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E5M2, FLOAT8_E4M3)}


def format_named(name: str) -> Format:
    """The format called `name`.

    Examples:
        >>> format_named("bfloat16").eps
        0.0078125
    """
    if name not in FORMATS:
        raise SettingError(f"format must be one of {', '.join(FORMATS)}, got {name!r}.")
    return FORMATS[name]
