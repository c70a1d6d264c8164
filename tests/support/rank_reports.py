"""Reports of ranks, and what they amount to by the rules of the list of fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from gradscale.torch.grads.fields import REPORT, offset

_FLAG = st.sampled_from([0.0, 1.0])
_SIZE = st.one_of(
    st.sampled_from([0.0, 1.0, 65504.0, 3e38, 1e-38, math.inf, math.nan]),
    st.floats(0, 2.0**60, width=32, allow_subnormal=False),
)
_VALUES = {
    "amax": _SIZE,
    "norm": _SIZE,
    "checksum": st.integers(0, 3).map(float),
    "bad_rank": st.sampled_from([0.0, 7.0, math.inf]),
}
_ROW = st.tuples(*[_VALUES.get(field.name, _FLAG) for field in REPORT])

Rows = list[list[tuple[float, ...]]]
"""Words by rank and report."""
ROWS = st.integers(1, 3).flatmap(
    lambda n: st.lists(st.tuples(*[_ROW] * n).map(list), min_size=1, max_size=9)
)
"""What up to 9 ranks report of up to 3 losses."""


def _no_nan(values: Sequence[float]) -> list[float]:
    return [math.inf if math.isnan(value) else value for value in values]


_RULES: dict[str, Callable[[Sequence[float]], float]] = {
    "max": lambda values: max(_no_nan(values)),
    "min": min,
    "norm": lambda values: math.hypot(*_no_nan(values)),
    "checksum": lambda values: values[0] if len(set(values)) == 1 else -1.0,
}


def check_fold(fold: Callable[[Tensor], Tensor], rows: Rows, device: str) -> None:
    """Raises if `fold` does not combine every word of `rows` by its rule."""
    words = torch.tensor(rows, dtype=torch.float32, device=device)
    as_float32 = words.tolist()
    for report, found in enumerate(fold(words).tolist()):
        for place, field in enumerate(REPORT):
            expected = _RULES[field.fold]([rank[report][place] for rank in as_float32])
            if field.fold == "norm" and expected < 2.0**127:
                # A quotient, a square and a sum for each of up to 9 ranks, then a root and a
                # product; squares below float32 are far below the largest one, which is 1.
                assert math.isclose(found[place], expected, rel_tol=32 * 2.0**-24), field
            elif field.fold != "norm" or expected == math.inf:
                assert found[place] == expected, field


def check_norms(fold: Callable[[Tensor], Tensor], device: str) -> None:
    """Raises if the norm of all ranks is not that of their norms."""

    def norm_of(*values: float) -> float:
        rows = torch.zeros(len(values), 1, len(REPORT), dtype=torch.float32, device=device)
        place = offset(REPORT, "norm")
        rows[:, 0, place] = torch.tensor(values, dtype=torch.float32, device=device)
        return float(fold(rows)[0, place])

    assert norm_of(3.0, 4.0) == 5.0
    assert norm_of(0.0, 0.0) == 0.0
    assert math.isclose(norm_of(1.5e38, 2e38), 2.5e38, rel_tol=2**-22)  # whose squares overflow
    assert math.isclose(norm_of(3e-38, 4e-38), 5e-38, rel_tol=2**-22)
    assert norm_of(1.0, math.nan) == math.inf
