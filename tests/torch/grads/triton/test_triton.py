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

import kernel_tables
from gradscale.torch import Culprit, GradScaler
from gradscale.torch.grads import backend
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.grads.collect import Gradients, grouped
from gradscale.torch.grads.reference import Measurement
from gradscale.torch.grads.scale import Scale

# numpy warns of overflows that are meant to happen in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytest.importorskip("triton", minversion="3.4")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HERE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHUNK = 2**15
SPECIAL = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 65504.0, 2.0**-24, 1e38, 1e-38]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=HERE)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, NaN as NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return a.dtype is b.dtype and a.shape == b.shape and bool(same.all())


def gradients(values: list[Tensor]) -> Gradients:
    """`values` as the gradients of some parameters."""
    params = [value.detach() for value in values]
    for param, value in zip(params, values, strict=True):
        param.grad = value
    return Gradients(params)


def read(values: list[Tensor], inv: float, **how: Any) -> Measurement:
    """What is found in `values`, whose scale has the inverse `inv`."""
    scale = Scale(scalar(1 / inv), None, scalar(inv))
    return backend.measure(gradients(values), scale, amax=True, **how)


def multiply(values: list[Tensor], factor: float) -> None:
    backend.multiply(gradients(values), scalar(factor))


def assert_same(values: list[Tensor], inv: float, max_norm: float = 1.0) -> None:
    with kernels.use("triton"):
        fast = read(values, inv, max_norm=max_norm)
    with kernels.use("reference"):
        slow = read(values, inv, max_norm=max_norm)
    assert bool(fast.stats.finite) is bool(slow.stats.finite)
    assert bool(fast.stats.fits) is bool(slow.stats.fits)
    assert equal(fast.stats.amax, slow.stats.amax)
    true = [
        [int(value.isinf().sum()), int(value.isnan().sum())]
        for group in grouped(values).values()
        for value in group
    ]
    assert fast.counts is not None
    assert [row for rows in fast.counts.values() for row in rows.tolist()] == true
    finite = [float(v[v.isfinite()].abs().max()) for v in values if v.isfinite().any()]
    assert float(fast.finite_amax) == max(finite, default=0.0)
    if bool(fast.stats.finite):
        exact = math.sqrt(sum(float(v.double().square().sum()) for v in values)) * inv
        count = sum(v.numel() for v in values)
        # Both sum in blocks: at most 32 + log2 terms deep here, then squares, roots and a product.
        bound = (64 + math.log2(count + 1)) * 2.0**-24
        tiny = 2.0**-149
        if exact < 2.0**128:
            assert abs(float(fast.stats.norm) - exact) <= exact * bound + tiny
        if math.isfinite(float(slow.stats.norm)):
            close = pytest.approx(float(slow.clip), rel=2 * bound, abs=tiny)
            assert float(fast.clip) == close


def test_the_comparison_notices_faults() -> None:
    one = torch.ones(3, device=HERE)
    assert equal(one, one.clone())
    assert not equal(one, one.half())
    assert not equal(one, one * torch.nan)
    assert not equal(one * torch.nan, one)


@settings(max_examples=30 if HERE == "cpu" else 60)
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
            multiply([fast], factor)
        with kernels.use("reference"):
            multiply([slow], factor)
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
            multiply([store[shift : shift + count]], 0.5)
        assert store[:shift].eq(1.0).all()
        assert store[shift : shift + count].eq(0.5).all()
        assert store[shift + count :].eq(1.0).all()


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
            found = read([once], 2.0**exponent, unscale=True)
            expected = read([twice], 2.0**exponent)
            multiply([twice], 2.0**exponent)
        assert equal(once, twice)
        assert bool(found.stats.finite) is bool(expected.stats.finite)
        assert bool(found.stats.fits) is bool(expected.stats.fits)
        assert equal(found.stats.amax, expected.stats.amax)
        rows = [[row.tolist() for row in (r.counts or {}).values()] for r in (found, expected)]
        assert rows[0] == rows[1]


def test_the_same_gradients_give_the_same_bits() -> None:
    values = [torch.randn(n, device=HERE) for n in (3, 70_000, 1)]
    with kernels.use("triton"):
        runs = [read(values, 0.5, max_norm=1.0).stats.norm for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs)


@pytest.mark.parametrize(
    ("capability", "every"),
    [(90, 8), *(pytest.param(each, 1, marks=pytest.mark.soak) for each in (90, 80, 75, 70))],
)
def test_every_kernel_compiles_for_a_gpu(capability: int, every: int) -> None:
    program = Path(__file__).parents[3] / "support/compile_kernels.py"
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(program), str(capability), str(every)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = "_advance _count _decide _fold _measure _multiply _report _step _update"
    assert sorted(set(done.stdout.split()[1:])) == names.split()


def test_addresses_are_sent_only_when_they_are_new() -> None:
    values = [torch.ones(5, device=HERE), torch.ones(7, device=HERE)]
    [(_, table)] = kernel_tables.tables(values)
    first, sent = [value.data_ptr() for value in values], table.addresses
    assert sent.tolist() == first
    table.point_to(list(first))
    assert table.addresses is sent
    other = torch.ones(5, device=HERE)
    table.point_to([other.data_ptr(), first[1]])
    assert table.addresses.tolist() == [other.data_ptr(), first[1]]
    assert sent.tolist() == first  # a kernel may still read it
    table.point_to(list(first))
    assert table.addresses.tolist() == first


def test_large_tensors_keep_some_sets_of_addresses_on_the_device() -> None:
    large = [
        torch.ones(CHUNK * kernels.module("tables")._FEW, device=HERE),
        torch.ones(7, device=HERE),
    ]
    [(_, table)] = kernel_tables.tables(large)
    first, sent = [value.data_ptr() for value in large], table.addresses
    table.point_to([large[0].data_ptr(), torch.ones(7, device=HERE).data_ptr()])
    assert table.addresses is not sent
    table.point_to(list(first))
    assert table.addresses is sent


def test_a_table_is_not_used_for_gradients_on_other_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [torch.ones(3, device=HERE) for _ in range(2)]
    grads = [torch.ones(3, device=HERE) for _ in params]
    with kernels.use("triton"):
        table = kernels.locate(params, grads)
        assert kernels.locate(params, grads) is table
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: int(tensor is grads[1]))
        assert kernels.locate(params, grads) is not table


class CompiledForm:
    """What Triton compiles a kernel to, as far as a launch needs it."""

    function, packed_metadata = 7, (8,)

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.launches.append((grid, stream, arguments))

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


def test_a_launch_goes_by_the_hooks_of_profilers_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = CompiledForm()
    launch = kernels.module("launch").launcher(form, 3)
    launch(5, "a", "b")
    assert form.launches == [(3, 1, 1, 5, 7, (8,), None, None, None, "a", "b")]
    from triton import knobs

    for name in ("launch_enter_hook", "launch_exit_hook"):
        hooks = getattr(knobs.runtime, name)
        with monkeypatch.context() as patch:
            if hooks is None:  # Triton 3.4 has one function, later ones a chain of them
                patch.setattr(knobs.runtime, name, print)
            else:
                hooks.add(print)
            launch(5, "a", "b")
        if hooks is not None:
            hooks.remove(print)
        assert form.launches.pop() == ((3, 1, 1), 5, ("a", "b"))


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


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_with_a_closure_is_the_same_on_both_paths(early: bool, bad: bool) -> None:
    def train(path: str) -> list[Any]:
        torch.manual_seed(0)
        model, scaler = torch.nn.Linear(3, 1).to(HERE), GradScaler(HERE)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.ones(2, 3, device=HERE)).square().sum()
            scaler.backward(loss)
            if bad:
                model.weight.grad.fill_(math.inf)
            return loss

        with kernels.use(path):
            if early:  # gradients from before the step
                scaler.backward(model(torch.ones(2, 3, device=HERE)).square().sum())
            outcome = scaler.apply(optimizer, closure=closure)
        assert bool(outcome.applied) is not bad
        return [scaler.get_scale(), [p.tolist() for p in model.parameters()]]

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
    assert float(read([value], 1.0).stats.amax) == 3.0
    value[-2] = math.inf
    found = read([value], 1.0)
    assert [rows.tolist() for rows in (found.counts or {}).values()] == [[[1, 0]]]
    value[-2] = 1.0
    multiply([value], 0.5)
    assert value[-3:].tolist() == [0.5, 0.5, 1.5]
