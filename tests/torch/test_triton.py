"""The kernels beside the reference path: on a GPU, or in Triton's interpreter on the CPU.

The interpreter is wrong about bfloat16's subnormal numbers, and cuts off where it should round to
bfloat16: those are for the GPU alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD, AdamW

from gradscale import Dynamic, DynamicState, GradStats, Headroom, HeadroomState
from gradscale.torch import Culprit, GradScaler, kernels
from gradscale.torch.unscale import Reading, grouped, multiply, read, read_all, unscale

# numpy warns of overflows that are meant to happen in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HERE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHUNK = 2**15
SPECIAL = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 65504.0, 2.0**-24, 1e38, 1e-38]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=HERE)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, NaN as NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return a.dtype is b.dtype and a.shape == b.shape and bool(same.all())


def both(values: list[Tensor], inv: float, max_norm: float = 1.0) -> tuple[Any, Any]:
    """What the kernels say, and what the reference path says."""
    with kernels.use("triton"):
        fast = read_all(grouped(values), scalar(inv), max_norm)
    with kernels.use("reference"):
        slow = read_all(grouped(values), scalar(inv), max_norm)
    return fast, slow


def assert_same(values: list[Tensor], inv: float, max_norm: float = 1.0) -> None:
    (fast, norm), (slow, expected) = both(values, inv, max_norm)
    assert [float(flag) for flag in fast.found_inf.values()] == [
        float(max(slow.found_inf.values()))
    ]
    assert bool(fast.fits) is bool(slow.fits)
    assert equal(fast.amax, slow.amax)
    true = [
        [int(value.isinf().sum()), int(value.isnan().sum())]
        for group in grouped(values).values()
        for value in group
    ]
    assert [row for rows in fast.counts.values() for row in rows.tolist()] == true
    if not float(fast.found_inf[next(iter(fast.found_inf))]):
        exact = math.sqrt(sum(float(v.double().square().sum()) for v in values)) * inv
        count = sum(v.numel() for v in values)
        # Both sum in blocks: at most 32 + log2 terms deep here, then squares, roots and a product.
        bound = (64 + math.log2(count + 1)) * 2.0**-24
        tiny = 2.0**-149
        if exact < 2.0**128:
            assert abs(float(norm.total) - exact) <= exact * bound + tiny
        if math.isfinite(float(expected.total)):
            close = pytest.approx(float(expected.factor), rel=2 * bound, abs=tiny)
            assert float(norm.factor) == close


def test_the_comparison_notices_faults() -> None:
    one = torch.ones(3, device=HERE)
    assert equal(one, one.clone())
    assert not equal(one, one.half())
    assert not equal(one, one * torch.nan)
    assert not equal(one * torch.nan, one)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.sampled_from([0, 1, 3, 17, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 5]),
            st.lists(st.sampled_from(SPECIAL), max_size=2),
            st.integers(-60, 60),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(-30, 14),
)
def test_read_says_what_the_reference_path_says(tensors: list[Any], exponent: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = []
    for dtype, count, specials, binades in tensors:
        value = torch.randn(count, generator=generator) * 2.0**binades
        value = value.to(dtype)
        if HERE == "cpu" and dtype is torch.bfloat16:
            value = torch.where(value.abs() < 2.0**-126, torch.zeros_like(value), value)
        for place, special in enumerate(specials[:count]):
            if not (HERE == "cpu" and dtype is torch.bfloat16 and 0 < abs(special) < 2.0**-126):
                value[-1 - place] = special
        values.append(value.to(HERE))
    assert_same(values, 2.0**exponent)


@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e-44, 1e30, 3e38])
@pytest.mark.parametrize("beside", [0.0, 1.0])
def test_a_norm_is_right_where_its_square_leaves_float32(magnitude: float, beside: float) -> None:
    values = [
        torch.full((1000,), magnitude, device=HERE),
        torch.full((CHUNK + 3,), beside, device=HERE),
    ]
    for inv in (1.0, 2.0**-20, 2.0**10):
        assert_same(values, inv, max_norm=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_value_of_a_narrow_format(dtype: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).to(HERE)
    if HERE == "cpu" and dtype is torch.bfloat16:
        bits = torch.where(bits.abs() < 2.0**-126, torch.zeros_like(bits), bits)
    assert_same([bits], 2.0**-3)
    sound = bits[bits.isfinite()]
    assert_same([sound], 2.0**-3)
    exact = HERE == "cuda" or dtype is torch.float16
    for factor in (1.0, 2.0**-3, 0.3, 2.0**8) if exact else (1.0, 2.0**8):
        fast, slow = bits.clone(), bits.clone()
        with kernels.use("triton"):
            multiply(grouped([fast]), scalar(factor))
        with kernels.use("reference"):
            multiply(grouped([slow]), scalar(factor))
        assert equal(fast, slow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 4095, CHUNK, 2 * CHUNK + 7])
def test_multiply_writes_its_tensors_and_nothing_beside_them(
    dtype: torch.dtype, count: int
) -> None:
    store = torch.ones(count + 9, device=HERE, dtype=dtype)
    for shift in (1, 8):  # not aligned, and aligned
        store.fill_(1.0)
        with kernels.use("triton"):
            multiply(grouped([store[shift : shift + count]]), scalar(0.5))
        assert store[:shift].eq(1.0).all()
        assert store[shift : shift + count].eq(0.5).all()
        assert store[shift + count :].eq(1.0).all()


def test_every_tensor_can_have_a_scale_of_its_own() -> None:
    sizes, scales = (5, CHUNK + 1, 3), (0.5, 0.25, 2.0)
    values = [torch.full((n,), 8.0, device=HERE) for n in sizes]
    inverse = torch.tensor(scales, device=HERE)
    place = kernels.Place(None, kernels_tables(values), [])
    summary, _ = kernels.reading().read(place.groups, inverse)
    squares = [n * (8.0 * scale) ** 2 for n, scale in zip(sizes, scales, strict=True)]
    assert float(summary.norm) == pytest.approx(math.sqrt(sum(squares)), rel=2.0**-20)
    for dtype, table in place.groups:
        kernels.writing().multiply(dtype, table, inverse)
    assert [set(value.tolist()) for value in values] == [{8.0 * scale} for scale in scales]


def kernels_tables(values: list[Tensor]) -> Any:
    with kernels.use("triton"):
        return kernels.tables(grouped(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-8, 0, 4])
def test_one_pass_that_looks_and_unscales_says_what_two_say(
    dtype: torch.dtype, exponent: int
) -> None:
    if HERE == "cpu" and dtype is torch.bfloat16 and exponent < 0:
        pytest.skip("Triton's interpreter cuts off where it should round to bfloat16")
    generator = torch.Generator().manual_seed(0)
    for special in (None, math.inf, math.nan, 60000.0):
        start = torch.randn(CHUNK + 7, generator=generator).to(dtype).to(HERE)
        if special is not None:
            start[3] = start[CHUNK + 2] = special
        once, twice = start.clone(), start.clone()
        with kernels.use("triton"):
            told = unscale(grouped([once]), scalar(2.0**exponent))
            expected = read(grouped([twice]), scalar(2.0**exponent))
            multiply(grouped([twice]), scalar(2.0**exponent))
        assert equal(once, twice)
        assert [float(f) for f in told.found_inf.values()] == [
            float(f) for f in expected.found_inf.values()
        ]
        assert bool(told.fits) is bool(expected.fits)
        assert equal(told.amax, expected.amax)
        rows = [[row.tolist() for row in (r.counts or {}).values()] for r in (told, expected)]
        assert rows[0] == rows[1]


def test_the_same_gradients_give_the_same_bits() -> None:
    values = [torch.randn(n, device=HERE) for n in (3, 70_000, 1)]
    with kernels.use("triton"):
        runs = [read_all(grouped(values), scalar(0.5))[1].total for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    "policy",
    [
        Dynamic(growth_interval=3, hysteresis=2, min_scale=2.0**-4, max_scale=2.0**20),
        Dynamic(init_scale=2.0**126, growth_interval=1, max_scale=2.0**127),
        Dynamic(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, exact=False),
    ],
)
def test_the_update_is_the_policys_bit_for_bit(policy: Dynamic) -> None:
    histories, steps = (100_000, 64) if HERE == "cuda" else (40, 24)
    generator = torch.Generator(HERE).manual_seed(0)

    def state() -> DynamicState:
        first = policy.init()
        counts = torch.randint(0, 4, (histories,), generator=generator, device=HERE)
        counts[0] = 2**31 - 2
        return DynamicState(
            torch.full((histories,), first.scale, device=HERE),
            counts.to(torch.int32),
            torch.zeros(histories, dtype=torch.int32, device=HERE),
        )

    fast = state()
    slow = DynamicState(*(value.clone() for value in fast))
    for step in range(steps):
        flags = torch.rand((2, histories), generator=generator, device=HERE)
        finite, loss_finite = flags[0] < 0.7, flags[1] < 0.9
        losses = loss_finite if step % 3 else None
        kernels.writing().update(policy, fast, finite, losses)
        told = GradStats(finite=finite, loss_finite=True if losses is None else losses)
        slow = policy.update(slow, told, torch)
        assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))
    assert len(set(fast.scale.tolist())) > 2  # else this shows little


@pytest.mark.parametrize(
    "policy",
    [
        Headroom(),
        Headroom(margin=1, memory=3, forget=2, pause=1, min_scale=2.0**-4, max_scale=2.0**40),
        Headroom(init_scale=2.0**-100, memory=2**20, min_scale=2.0**-126, max_scale=2.0**127),
    ],
)
def test_headroom_in_one_launch_is_the_policy_bit_for_bit(policy: Headroom) -> None:
    histories, steps = (100_000, 64) if HERE == "cuda" else (40, 40)
    generator = torch.Generator(HERE).manual_seed(0)
    like = torch.zeros(histories, device=HERE)
    fast = policy.init(torch, like=like)
    slow = HeadroomState(*(value.clone() for value in fast))
    level = torch.randint(-30, 12, (histories,), generator=generator, device=HERE).float()
    for step in range(steps):
        flags = torch.rand((4, histories), generator=generator, device=HERE)
        loss_finite, fits = flags[0] < 0.9, flags[1] < 0.9
        amax = torch.exp2(level + 6 * flags[2]) * slow.scale * (flags[3] < 0.95)
        finite = amax < 65504
        losses = loss_finite if step % 3 else None
        kernels.headroom().update(policy, fast, finite, fits, amax, losses)
        told = GradStats(
            finite=finite,
            amax=amax,
            loss_finite=True if losses is None else losses,
            fits=fits,
            exponent=torch.frexp(amax).exponent.to(torch.int32),
        )
        slow = policy.update(slow, told, torch)
        assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True)), step
    assert len(set(fast.scale.tolist())) > 2  # else this shows little


def test_every_kernel_compiles_for_a_gpu() -> None:
    program = Path(__file__).parents[1] / "support/compile_kernels.py"
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {"_adam", "_advance", "_lion", "_multiply", "_read", "_sgd"}
    names |= {"_update_dynamic", "_update_headroom"}
    assert set(done.stdout.split()[1:]) == names


def test_addresses_are_sent_only_when_they_change() -> None:
    values = [torch.ones(5, device=HERE), torch.ones(7, device=HERE)]
    (table,) = [table for _, table in kernels.tables(grouped(values))]
    sent = table.addresses
    assert sent.tolist() == [value.data_ptr() for value in values]
    assert kernels.tables(grouped(values))[0][1].addresses is sent
    values[0] = values[0].clone()
    (again,) = [table for _, table in kernels.tables(grouped(values))]
    assert again is table
    assert table.addresses.tolist() == [value.data_ptr() for value in values]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("two_calls", [False, True])
def test_a_training_is_the_same_on_both_paths(fused: bool, two_calls: bool) -> None:
    def train(path: str) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1)).to(HERE)
        optimizer = AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = GradScaler(HERE, init_scale=2.0**10, growth_interval=3)
        x = torch.randn(8, 5, device=HERE)
        trace = []
        with kernels.use(path):
            for step in range(10):
                scaler.backward(model(x).square().mean())
                if step in (2, 7):
                    model[0].weight.grad[0, 1] = math.inf
                if two_calls:
                    scaler.apply(optimizer)
                else:
                    scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                outcome = scaler.outcome()
                trace.append((outcome.verdict(), float(outcome.scale), scaler.get_scale()))
        return [trace, scaler.state_dict(), [p.tolist() for p in model.parameters()]]

    assert train("triton") == train("reference")


@pytest.mark.gpu
@pytest.mark.parametrize("two_calls", [False, True])
def test_culprits_are_counted_on_the_device(two_calls: bool) -> None:
    model, scaler = torch.nn.Linear(300, 300, device="cuda"), GradScaler("cuda")
    scaler.name(model)
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    scaler.backward(model(torch.ones(300, device="cuda")).sum())
    model.weight.grad[1:3, 2] = -math.inf
    model.weight.grad[299, 299] = math.nan
    _ = scaler.apply(optimizer) if two_calls else scaler.step(optimizer)
    assert scaler.outcome().culprits() == [Culprit("weight", 0, 2, 1)]


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    value = torch.ones(2**31 + 5, device="cuda", dtype=torch.float16)
    value[-1] = 3.0
    reading: Reading = read(grouped([value]), scalar(1.0))
    assert float(reading.amax) == 3.0
    value[-2] = math.inf
    reading = read(grouped([value]), scalar(1.0))
    assert [rows.tolist() for rows in (reading.counts or {}).values()] == [[[1, 0]]]
    value[-2] = 1.0
    multiply(grouped([value]), scalar(0.5))
    assert value[-3:].tolist() == [0.5, 0.5, 1.5]
