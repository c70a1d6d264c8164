"""Counts by exponent equal those in float64, for every format, scale and layout."""

from __future__ import annotations

import math
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from gradscale.formats import BFLOAT16, FLOAT16, Format  # noqa: E402
from gradscale.monitor.samples import TensorSample  # noqa: E402
from gradscale.torch.grads import dispatch  # noqa: E402
from gradscale.torch.inspect.counts import (  # noqa: E402
    COLUMNS,
    Counts,
    flat,
    histograms,
    step_for,
)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FORMATS = {"float16": FLOAT16, "bfloat16": BFLOAT16}


def counted(values: Tensor, step: int = 1) -> TensorSample:
    """A sample of `values`, in the second of three rows."""
    counts = Counts(3, values.device)
    counts.add(1, values, step)
    table = counts.send().read()
    assert not table[0].any()
    assert not table[2].any()
    low, bins, zeros, infs, nans = histograms(table, counts.numels)[1]
    return TensorSample("x", "activation", counts.numels[1], low, bins, zeros, None, infs, nans)


def expected(values: Tensor) -> TensorSample:
    """The same from Python's floats, one by one; below 2**-126 there is one bin."""
    numbers = values.double().tolist()
    finite = [abs(x) for x in numbers if math.isfinite(x) and x]
    found = Counter(max(math.frexp(x)[1] - 1, -127) for x in finite)
    low, high = min(found, default=0), max(found, default=-1)
    return TensorSample(
        "x",
        "activation",
        len(numbers),
        low,
        tuple(found[place] for place in range(low, high + 1)),
        numbers.count(0.0),
        None,
        sum(map(math.isinf, numbers)),
        sum(map(math.isnan, numbers)),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_counted_exactly(dtype: torch.dtype) -> None:
    values = torch.arange(2**16).to(torch.int16).view(dtype)
    assert counted(values) == expected(values)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("step", [1, 3])
def test_kernel_counts_as_operations_do(name: str, step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(9001, generator=generator) * 2.0 ** torch.randint(-40, 17, (9001,))
    values[::100], values[7], values[8], values[9] = 0.0, math.inf, math.nan, -math.inf
    values = values.to(DTYPES[name])
    with dispatch.use("triton"):
        by_kernel = counted(values, step)
    assert by_kernel == counted(values, step) == expected(values[::step])


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_numbers_are_counted_exactly(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    assert counted(values) == expected(values)


# The underflow meter: planted distributions, at several scales, against counts in float64.

DISTRIBUTIONS = {
    "normal": lambda g: torch.randn(20_000, generator=g, dtype=torch.float64),
    "log-normal": lambda g: torch.exp(4 * torch.randn(20_000, generator=g, dtype=torch.float64)),
    "sparse": lambda g: (
        torch.randn(20_000, generator=g, dtype=torch.float64)
        * (torch.rand(20_000, generator=g) < 0.1)
    ),
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("binades", [0, -10, -16, -20, -26])
def test_meter_of_underflow_is_exact(format: Format, distribution: str, binades: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shift = binades if format is FLOAT16 else binades - 112  # as far above the smallest number
    true = DISTRIBUTIONS[distribution](generator) * 2.0**shift
    stored = true.to(DTYPES[format.name])
    sample = counted(stored)
    exact = stored.double().abs()
    nonzero = int(((exact > 0) & exact.isfinite()).sum())
    below = int(((exact > 0) & (exact < format.smallest_normal)).sum())
    assert sample.below(format.smallest_normal) == below
    assert sample.subnormal(format) == (below / nonzero if nonzero else 0.0)
    # Before rounding: what is subnormal or flushed then, to 1 % of the elements.
    planted = int(((true != 0) & (true.abs() < format.smallest_normal)).sum())
    flushed = int(((true != 0) & (stored == 0)).sum())
    assert abs(below + flushed - planted) <= 0.01 * len(true)
    assert sample.zeros == flushed + int((true == 0).sum())


def test_meter_that_is_off_by_one_binade_is_noticed() -> None:
    stored = (torch.randn(20_000) * 2.0**-14).half()
    sample = counted(stored)
    shifted = sample._replace(low=sample.low + 1)
    assert abs(shifted.subnormal(FLOAT16) - sample.subnormal(FLOAT16)) > 0.1


def test_saturated_elements_are_those_of_the_last_binade() -> None:
    sample = counted(torch.tensor([1.0, 40_000.0, -65_504.0, math.inf, 32_767.0]))
    assert sample.saturated(FLOAT16) == 3 / 5
    assert sample.headroom(FLOAT16) == 0
    assert counted(torch.tensor([1.0])).headroom(FLOAT16) == 15


def test_layouts_are_counted_without_a_copy_where_they_are_dense() -> None:
    whole = torch.randn(6, 4)
    for view in (whole, whole.t(), whole.view(2, 3, 4).permute(2, 0, 1)):
        value = flat(view)
        assert value is not None
        assert value.data_ptr() == whole.data_ptr()
        assert counted(value) == expected(view.reshape(-1))
    part = whole[:, ::2]
    assert counted(flat(part)) == expected(part.reshape(-1))
    assert counted(flat(torch.view_as_complex(whole.view(6, 2, 2)))) == expected(whole.view(-1))


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(3), torch.empty(0), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")],
    ids=["integers", "empty", "sparse", "meta"],
)
def test_what_has_no_numbers_is_left_out(tensor: Tensor) -> None:
    assert flat(tensor) is None


def test_large_tensors_are_counted_in_part_and_every_channel_is() -> None:
    tensor = torch.zeros(500, 64)
    step = step_for(tensor, 4000)
    assert 8 <= step <= 11
    assert math.gcd(step, 64) == 1
    assert {place % 64 for place in range(0, tensor.numel(), step)} == set(range(64))
    assert step_for(tensor, 32_000) == 1


def test_operations_that_do_not_wait_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    # What runs on devices without kernels: tensors of this machine, taken for others.
    class Elsewhere(torch.Tensor):
        is_cpu = False

    values = (torch.randn(5000) * 2.0 ** torch.randint(-30, 15, (5000,))).half()
    counts = Counts(1, values.device)
    counts.add(0, values.as_subclass(Elsewhere))
    assert histograms(counts.table, [5000])[0].counts == expected(values).counts
    assert counts.table.shape == (1, COLUMNS)
