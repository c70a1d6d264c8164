"""What ranks say together: by plain numbers, and by operations where the host must not wait."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscale.torch import telling
from gradscale.torch.telling import Report, largest, together

FLAG = st.sampled_from([0.0, 1.0])
SIZE = st.one_of(
    st.sampled_from([0.0, 1.0, 65504.0, 3e38, math.inf, math.nan]),
    st.floats(0, 2.0**60, width=32, allow_subnormal=False),
)
COUNT = st.floats(0, 2.0**40, width=32, allow_subnormal=False)
ROW = st.tuples(
    *[FLAG] * 6, SIZE, SIZE, COUNT, COUNT, st.integers(0, 3), st.sampled_from([0.0, 7.0, math.inf])
)


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[ROW] * n), min_size=1, max_size=9)))
def test_operations_say_what_plain_numbers_do(rows: list[tuple[tuple[float, ...], ...]]) -> None:
    words = torch.tensor(rows)
    plain = Report(*together(words).unbind(1))
    with mock.patch.object(telling, "readable", return_value=False):
        told = Report(*together(words).unbind(1))
    for name in Report._fields:
        one, other = getattr(told, name), getattr(plain, name)
        # Sums of up to 9 positive numbers, one of them in float64; the others are the same.
        rtol = 16 * 2**-24 if name in ("norm", "near", "elements") else 0.0
        assert torch.allclose(one, other, rtol=rtol, atol=0.0), (name, one, other)


@pytest.mark.parametrize("plain", [True, False])
def test_ranks_that_differ_are_marked(plain: bool) -> None:
    rows = torch.zeros(3, 1, len(Report._fields))
    mark, rank = Report._fields.index("mark"), Report._fields.index("rank")
    rows[:, 0, rank] = torch.tensor([math.inf, 2.0, 1.0])
    rows[:, 0, mark] = 5.0
    with mock.patch.object(telling, "readable", return_value=plain):
        assert together(rows)[0, [mark, rank]].tolist() == [5.0, 1.0]
        rows[1, 0, mark] = 6.0
        assert together(rows)[0, mark] == -1.0


def test_without_groups_everything_stays() -> None:
    values = torch.tensor([1.0, 2.0])
    assert largest(values, []) is values
