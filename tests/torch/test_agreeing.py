"""What the kernel puts together of all ranks' words is what the reference path does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscale.torch import kernels
from gradscale.torch.telling import Report, together

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
FLAG = st.sampled_from([0.0, 1.0])
SIZE = st.one_of(
    st.sampled_from([0.0, 1.0, 65504.0, 3e38, 1e-38, math.inf, math.nan]),
    st.floats(0, 2.0**60, width=32, allow_subnormal=False),
)
ROW = st.tuples(
    *[FLAG] * 6, SIZE, SIZE, SIZE, SIZE, st.integers(0, 3), st.sampled_from([0.0, 7.0, math.inf])
)


def by_both(rows: list[list[tuple[float, ...]]]) -> list[Report]:
    """What the kernel and the reference path make of (ranks, reports, words)."""
    words = torch.tensor(rows, device=HERE)
    with kernels.use("triton"):
        fast = kernels.agreeing().fold(words)
    return [Report(*found.cpu().unbind(1)) for found in (fast, together(words))]


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[ROW] * n), min_size=1, max_size=9)))
def test_the_kernel_puts_words_together_as_torch_does(rows: list[list[tuple[float, ...]]]) -> None:
    fast, slow = by_both(rows)
    for name in Report._fields:
        one, other = getattr(fast, name), getattr(slow, name)
        if name in ("norm", "near", "elements"):
            # Sums of up to 9 positive numbers, in another order.
            close = torch.isclose(one, other, rtol=16 * 2**-24, atol=0, equal_nan=True)
            assert close.all(), (name, one, other)
        else:
            assert torch.equal(one, other), (name, one, other)


def test_the_norm_of_all_is_that_of_their_norms() -> None:
    def norms(*values: float) -> float:
        rows = [[(*[0.0] * 7, value, *[0.0] * 4)] for value in values]
        fast, slow = by_both(rows)
        assert math.isclose(fast.norm, slow.norm, rel_tol=2**-22)
        return float(fast.norm)

    assert norms(3.0, 4.0) == 5.0
    assert norms(0.0, 0.0) == 0.0
    assert math.isclose(norms(1.5e38, 2e38), 2.5e38, rel_tol=2**-22)  # whose squares overflow
    assert math.isclose(norms(3e-38, 4e-38), 5e-38, rel_tol=2**-22)
    assert norms(1.0, math.nan) == math.inf


@pytest.mark.gpu
def test_the_kernels_of_words_compile() -> None:
    """A report, by a kernel, is decided about as one that was read is."""
    summary = torch.tensor([0.0, 1.0, 2.0, 5.0, 1.0, 0.0, 2.0], device=HERE)
    words = kernels.agreeing().report(summary, summary[3], None, 0.0, 1)
    expected = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 2.0, 5.0, 0.0, 0.0, 0.0, math.inf]
    assert words.tolist() == [expected]
