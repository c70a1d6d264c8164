from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradscale.torch.grads import reference
from gradscale.torch.grads.collect import Gradients, grouped, with_grad
from gradscale.torch.grads.reference import Measurement, measure, multiply, zero
from gradscale.torch.grads.scale import Scale, move, readable

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES = ["host", *DEVICES]
"""Where gradients are: "host" is the CPU with plain numbers for results, "cpu" with tensors."""
HALVES = [torch.float16, torch.bfloat16]
BAD = [math.inf, -math.inf, math.nan]


def scalar(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def param(grad: Tensor) -> Tensor:
    tensor = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    tensor.grad = grad
    return tensor


def sparse(indices: list[int], values: list[float], dtype: torch.dtype, device: str) -> Tensor:
    with torch.sparse.check_sparse_tensor_invariants(True):
        return torch.sparse_coo_tensor(
            torch.tensor([indices]), torch.tensor(values, dtype=dtype), (4,), device=device
        )


def device_of(place: str) -> str:
    return "cpu" if place == "host" else place


def read(grads: list[Tensor], inverse: float, place: str, **how: Any) -> Measurement:
    """What is found in `grads`, whose scale has this `inverse`."""
    return read_params([param(grad) for grad in grads], inverse, place, **how)


def read_params(params: list[Tensor], inverse: float, place: str, **how: Any) -> Measurement:
    """What is found in the gradients of `params`: numbers on the host, and else tensors."""
    number = 1 / inverse if place == "host" else None
    tensor, reciprocal = (scalar(value, device_of(place)) for value in (1 / inverse, inverse))
    found = measure(Gradients(params), Scale(tensor, number, reciprocal), **how)
    assert isinstance(found.stats.finite, bool) == (place == "host")
    return found


def every_value(dtype: torch.dtype, device: str) -> Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    return bits.view(dtype)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, except that one NaN is as good as another."""
    return (
        a.dtype == b.dtype
        and bool(torch.equal(a.isnan(), b.isnan()))
        and bool(
            torch.equal(a.nan_to_num(0.0).view(torch.int16), b.nan_to_num(0.0).view(torch.int16))
        )
    )


def test_comparison_sees_a_sign_of_zero_and_a_last_bit() -> None:
    one = torch.ones(2, dtype=torch.float16)
    assert same_numbers(one, one.clone())
    assert not same_numbers(one * 0, -one * 0)
    assert not same_numbers(one, torch.nextafter(one, 2 * one))
    assert not same_numbers(one, one * math.nan)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("exponent", [0, -1, -14, -30, -100, 4])
def test_every_half_value_is_unscaled_exactly(
    place: str, dtype: torch.dtype, exponent: int
) -> None:
    values = every_value(dtype, device_of(place))
    # A power of two times a half is exact in float64, so this rounds once, like the real thing.
    expected = (values.double() * 2.0**exponent).to(dtype)
    read([values], 2.0**exponent, place, unscale=True)
    assert same_numbers(values, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", HALVES)
def test_exactly_the_nonfinite_half_values_are_found(place: str, dtype: torch.dtype) -> None:
    values = every_value(dtype, device_of(place))
    finite = values[torch.isfinite(values.double())]
    assert bool(read([finite], 1.0, place).stats.finite)
    bad = values[~torch.isfinite(values.double())]
    assert len(bad) == len(values) - len(finite) > 2
    host = torch.zeros(3, dtype=dtype, device=device_of(place))
    for value in bad[:: max(1, len(bad) // 64)]:
        host[1] = value
        assert not bool(read([host], 1.0, place).stats.finite)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_one_bad_element_among_many_tensors_is_found(
    place: str, bad: float, dtype: torch.dtype
) -> None:
    where = device_of(place)
    tensors = [torch.ones(size, dtype=dtype, device=where) for size in (1, 7, 4096, 5000)]
    assert bool(read(tensors, 0.5, place, unscale=True).stats.finite)
    tensors[3][4321] = bad
    for found in (
        read(tensors, 1.0, place),
        read(tensors, 1.0, place, amax=True),
        read(tensors, 1.0, place, max_norm=math.inf),
        read(tensors, 1.0, place, max_norm=math.inf, amax=True),
        read([t.clone() for t in tensors], 0.5, place, unscale=True),
        read([t.clone() for t in tensors], 2.0, place, unscale=True),
        read([t.clone() for t in tensors], 0.5, place, unscale=True, max_norm=1.0),
    ):
        assert not bool(found.stats.finite)
        assert bool(found.stats.fits)


@given(
    st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.integers(-20, 40),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from(["host", "cpu"]),
)
def test_fits_is_what_unscaling_every_element_would_show(
    numbers: list[float], exponent: int, dtype: torch.dtype, place: str
) -> None:
    values = torch.tensor(numbers).to(dtype)
    inverse = 2.0**exponent
    expected = bool(torch.isfinite((values.float() * inverse).to(dtype)).all())
    for found in (
        read([values], inverse, place),
        read([values], inverse, place, amax=True),
        read([values], inverse, place, max_norm=1.0),
        read([values.clone()], inverse, place, unscale=True),
    ):
        assert bool(found.stats.fits) == expected
        assert bool(found.stats.finite)


@pytest.mark.parametrize("place", PLACES)
def test_all_kinds_of_gradients_go_in_one_call(place: str) -> None:
    device = device_of(place)
    wide = torch.randn(4, 6, device=device)
    grads = [
        torch.full((3,), 8.0, device=device),
        torch.full((3,), 8.0, dtype=torch.float16, device=device),
        torch.full((3,), 8.0, dtype=torch.bfloat16, device=device),
        torch.full((3,), 8.0 + 4.0j, dtype=torch.complex64, device=device),
        sparse([1, 1, 2], [8.0, 8.0, 8.0], torch.float32, device),
        torch.empty(0, device=device),
        torch.tensor(8.0, device=device),
        wide.t()[::2],
    ]
    expected_wide = wide * 0.25
    params = [param(grad) for grad in grads]
    assert bool(read_params(params, 0.25, place, unscale=True).stats.finite)
    for index in (0, 1, 2):
        assert params[index].grad.tolist() == [2.0] * 3
    assert params[3].grad.tolist() == [2.0 + 1.0j] * 3
    assert params[4].grad.to_dense().tolist() == [0.0, 4.0, 2.0, 0.0]
    assert params[6].grad.item() == 2.0
    assert torch.equal(params[7].grad, expected_wide.t()[::2])
    params[3].grad[1] = complex(0.0, math.inf)
    assert not bool(read_params(params, 1.0, place).stats.finite)


@pytest.mark.parametrize("place", ["host", "cpu"])
def test_compressed_sparse_gradients_are_unscaled_too(place: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls CSR support beta, once per process
        tensor = torch.tensor([[0.0, 8.0], [4.0, 0.0]]).to_sparse_csr()
    tensor.grad = tensor.clone()
    read_params([tensor], 0.5, place, unscale=True)
    assert tensor.grad.to_dense().tolist() == [[0.0, 4.0], [2.0, 0.0]]


@pytest.mark.parametrize("place", PLACES)
def test_duplicates_of_a_sparse_gradient_that_overflow_together_are_found(place: str) -> None:
    grad = sparse([1, 1], [60000.0, 60000.0], torch.float16, device_of(place))
    assert not bool(read([grad], 1.0, place).stats.finite)


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_below_the_half_range_is_not_rounded_to_zero(device: str) -> None:
    values = torch.tensor([2.0**15], dtype=torch.float16, device=device)
    multiply(grouped([values]), scalar(2.0**-30, device))
    assert values.item() == 2.0**-15


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 3e4, 1e25, 1e-25, 1e38, 1e-38, 2e-45])
@pytest.mark.parametrize("count", [1, 999])
def test_a_norm_is_right_where_its_square_leaves_float32(
    place: str, magnitude: float, count: int
) -> None:
    torch.manual_seed(count)
    device = device_of(place)
    spread = torch.rand(count, device=device) * 0.9 + 0.1
    values = [spread * magnitude, torch.zeros(3, device=device)]
    expected = math.sqrt(sum(v**2 for v in values[0].double().tolist()))
    max_norm = 2.0**-20 * min(magnitude, 1.0)
    found = read(values, 1.0, place, max_norm=max_norm)
    assert bool(found.stats.finite)
    # Squares, a sum of `count` positive terms and a root, each rounded to float32: relative error
    # at most (count + 3) / 2 units of 2**-24, and the two powers of two are exact.
    bound = (count + 3) / 2 * 2.0**-24
    if expected < 2.0**128:
        assert abs(float(found.stats.norm) / expected - 1) <= bound + 2.0**-149 / expected
    else:
        assert math.isinf(found.stats.norm)
        assert float(found.clip) == pytest.approx(max_norm / expected, rel=1e-6)


@pytest.mark.parametrize("place", ["host", "cpu"])
def test_a_norm_of_many_elements_does_not_lose_the_small_ones(place: str) -> None:
    # Rows of 4096, then 4096 rows and a rest: a sum of n terms in any order is off by at most
    # (n - 1) u, a root by half of that. torch's own norm is off by 9,000 u here.
    x = torch.rand(2**24 + 77, generator=torch.Generator().manual_seed(0))
    bound = (4096 + 4096 + 8) / 2 * 2.0**-24
    exact = float(x.double().norm())
    assert abs(float(x.norm()) / exact - 1) > bound  # else this shows nothing
    for values in ([x], [x[: 2**23], x[2**23 :].clone()], [x.view(-1, 1)[:, 0]]):
        norm = read(values, 1.0, place, max_norm=math.inf).stats.norm
        assert abs(float(norm) / exact - 1) <= bound


@pytest.mark.parametrize("place", PLACES)
def test_a_norm_of_mixed_formats_counts_all_of_them(place: str) -> None:
    device = device_of(place)
    values = [torch.full((4,), 3.0, dtype=d, device=device) for d in (torch.float32, *HALVES)]
    norm = read(values, 1.0, place, max_norm=math.inf).stats.norm
    assert float(norm) == pytest.approx(math.sqrt(108.0), rel=2.0**-22)
    assert float(read([], 1.0, place, max_norm=math.inf).stats.norm) == 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_clearing_selects_and_does_not_multiply(device: str, as_tensor: bool) -> None:
    values = torch.tensor([math.inf, math.nan, 1.0], device=device)
    zero(grouped([values]), torch.tensor(False, device=device) if as_tensor else False)
    assert math.isinf(values[0])
    zero(grouped([values]), torch.tensor(True, device=device) if as_tensor else True)
    assert values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("place", PLACES)
def test_the_same_gradients_give_the_same_bits(place: str) -> None:
    torch.manual_seed(1)
    values = [torch.randn(n, device=device_of(place)) for n in (3, 70_000, 1)]
    norms = {float(read(values, 0.5, place, max_norm=1.0).stats.norm) for _ in range(6)}
    assert len(norms) == 1


@settings(max_examples=20)
@given(st.integers(1, 300))
def test_temporary_copies_are_made_in_bounded_pieces(count: int) -> None:
    original = reference._CHUNK
    reference._CHUNK = 64
    try:
        group = [torch.ones(1 + index % 40) for index in range(count)]
        chunks = list(reference._chunks(group))
    finally:
        reference._CHUNK = original
    assert [id(t) for chunk in chunks for t in chunk] == [id(t) for t in group]
    assert all(len(chunk) == 1 or sum(t.numel() for t in chunk) <= 64 for chunk in chunks)


def test_parameters_without_gradients_are_left_out() -> None:
    params = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    params[1].grad = torch.ones(2)
    assert with_grad(torch.optim.SGD(params, lr=1.0).param_groups) == [params[1]]


def test_a_flag_on_the_cpu_is_readable_and_stays_in_place() -> None:
    flag = torch.tensor(True)
    assert readable(flag)
    assert move(flag, torch.device("cpu")) is flag


@pytest.mark.parametrize("place", ["host", "cpu"])
@pytest.mark.parametrize("count", [1, 4, 1000])
def test_the_norm_is_right_in_every_binade(place: str, count: int) -> None:
    for exponent in range(-140, 120):
        found = read([torch.full((count,), 2.0**exponent)], 1.0, place, max_norm=math.inf)
        # A sum of so many squares, its root, and three products.
        expected = math.sqrt(count) * 2.0**exponent
        assert math.isclose(found.stats.norm, expected, rel_tol=count * 2**-24)
        assert found.clip == 1
