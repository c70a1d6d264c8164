"""Weights in float16 and bfloat16 with masters of 32 bits: on a GPU, or in the interpreter."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscale import SettingError, StateError
from gradscale.torch import GradScaler, optim
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.optim import master_bits as masters

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.float16, torch.bfloat16]
MODES = ["float32", "split"]
KINDS: list[Any] = [
    optim.AdamW,
    optim.Adam,
    optim.Lion,
    lambda w, **s: optim.SGD(w, lr=0.01, momentum=0.9, **s),
    lambda w, **s: optim.SGD(w, lr=0.01, **s),
]


def every(dtype: torch.dtype) -> Tensor:
    """All numbers of a format of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(HERE)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN as NaN."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    equal = a.view(kind) == b.view(kind)
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return a.dtype is b.dtype and bool(equal.all())


def test_the_comparison_notices_faults() -> None:
    one = torch.ones(2)
    assert same(one, one.clone())
    assert not same(one, one.nextafter(one * 2))
    assert not same(one * 0, one * -0.0)
    assert not same(one, one.int())


def wholes() -> Tensor:
    """float32 numbers of all sizes."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator).to(torch.int32)
    return bits.view(torch.float32).to(HERE)


def test_a_split_bfloat16_is_the_float32_to_the_bit() -> None:
    whole = wholes()
    high, low = masters.split(whole, torch.bfloat16)
    assert same(masters.join(high, low), whole)
    sound = whole[whole.abs() < 3e38]
    high, _ = masters.split(sound, torch.bfloat16)
    step = torch.maximum(sound.abs(), torch.full_like(sound, 2.0**-126)).log2().floor() - 7
    assert torch.all((high.double() - sound.double()).abs() <= torch.exp2(step.double()) / 2)


def test_a_split_float16_is_as_exact_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-40, 16, (2**16,), generator=generator).float())
    whole = ((torch.rand(2**16, generator=generator) * 2 - 1) * size).to(HERE)
    whole = whole[whole.abs() < 65504.0]
    high, low = masters.split(whole, torch.float16)
    assert same(high, whole.half())
    back = masters.join(high, low)
    large = whole.abs() >= 2.0**-16
    assert same(back[large], whole[large])
    assert float((back.double() - whole.double()).abs().max()) <= 2.0**-40
    assert not same(back, whole)  # else the bound says nothing
    high, low = masters.split(torch.tensor([1e6, -math.inf, math.nan]), torch.float16)
    assert same(high, torch.tensor([65504.0, -65504.0, math.nan]).half())
    assert low.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", HALVES)
def test_the_kernel_joins_and_parts_every_weight_as_the_reference_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    high = every(dtype).requires_grad_()
    low = torch.randint(-(2**15), 2**15, high.shape, generator=generator).to(torch.int16).to(HERE)
    expected = masters.split(masters.join(high.detach(), low), dtype)
    optimizer = optim.SGD([high], lr=0.0, master="split")
    optimizer.state[high]["master_low"] = low
    high.grad = torch.zeros_like(high)
    with kernels.use("triton"):
        optimizer.step()
    assert same(high.detach(), expected[0])
    sound = ~high.detach().isnan()
    assert same(optimizer.state[high]["master_low"][sound], expected[1][sound])


def expect_sgd(w: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    b = 0.5 * b + g
    return w - 0.25 * b, b


def expect_lion(w: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    mixed = 0.5 * m + 0.5 * g
    new = w * 1.0 - torch.where(mixed.isnan(), mixed, 0.25 * mixed.sign())
    return new, 0.75 * m + 0.25 * g


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", ["sgd", "lion"])
def test_every_gradient_goes_through_the_kernels_to_the_bit(
    mode: str, dtype: torch.dtype, rule: str
) -> None:
    if HERE == "cpu" and dtype is torch.bfloat16 and mode == "float32":
        pytest.skip("Triton's interpreter cuts off where it should round to bfloat16")
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2**16, generator=generator).to(dtype).to(HERE).requires_grad_()
    grads = every(dtype)
    if HERE == "cpu" and dtype is torch.bfloat16:  # subnormal ones are wrong there
        grads = torch.where(grads.abs() < 2.0**-126, torch.zeros_like(grads), grads)
    if rule == "sgd":
        optimizer: Any = optim.SGD([w], lr=0.25, momentum=0.5, master=mode)
        name, expect = "momentum_buffer", expect_sgd
    else:
        optimizer = optim.Lion([w], lr=0.25, betas=(0.5, 0.75), master=mode)
        name, expect = "exp_avg", expect_lion
    whole, average = w.detach().float(), torch.zeros(2**16, device=HERE)
    optimizer.grad_scale = torch.tensor(8.0, device=HERE)
    for _ in range(2):
        w.grad = grads.clone()
        with kernels.use("triton"):
            optimizer.step()
        whole, average = expect(whole, grads.float() / 8.0, average)
        assert same(optimizer.state[w][name], average)
        if mode == "float32":
            assert same(optimizer.state[w]["master"], whole)
            assert same(w.detach(), masters.rounded(whole, dtype))
        else:
            high, low = masters.split(whole, dtype)
            assert same(w.detach(), high)
            whole = masters.join(high, low)


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_float16_weight_ends_at_its_largest_number_and_comes_back(
    path: str, mode: str, sign: float
) -> None:
    weights = [torch.full((3,), sign * 65472.0, device=HERE).half().requires_grad_() for _ in "ab"]
    optimizer = optim.SGD(weights, lr=1.0, master=mode)
    seen, kept = [], []
    with kernels.use(path):
        for change in (1e4, 0.0, -5.25, -2e4):  # in the direction of the sign
            for w in weights:
                w.grad = torch.full_like(w, -sign * change)
            optimizer.step()
            seen.append({value * sign for w in weights for value in w.tolist()})
            whole = masters.master_of(weights[0].detach(), optimizer.state[weights[0]])
            kept.append(float(whole[0]) * sign)
    # A float32 master goes on to 75472; a split one ends at 65504 and goes back from there, with
    # all its bits.
    assert kept == (
        [75472.0, 75472.0, 75466.75, 55466.75]
        if mode == "float32"
        else [65504.0, 65504.0, 65498.75, 45498.75]
    )
    last = float(torch.tensor(kept[-1]).half())
    assert seen == [{65504.0}, {65504.0}, {65504.0}, {last}]


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_a_float16_weight_that_is_nan_stays_nan(path: str, mode: str) -> None:
    w = torch.tensor([math.nan, math.inf, -math.inf], device=HERE).half().requires_grad_()
    optimizer = optim.SGD([w], lr=1.0, master=mode)
    w.grad = torch.zeros_like(w)
    with kernels.use(path):
        optimizer.step()
    assert same(w.detach().cpu(), torch.tensor([math.nan, 65504.0, -65504.0]).half())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", HALVES)
def test_masters_go_the_way_of_float32_weights(kind: Any, mode: str, dtype: torch.dtype) -> None:
    if HERE == "cpu" and dtype is torch.bfloat16 and mode == "float32":
        pytest.skip("Triton's interpreter cuts off where it should round to bfloat16")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5000, generator=generator).to(dtype).to(HERE)
    half = start.clone().requires_grad_()
    plain = start.float().requires_grad_()
    other = start.clone().requires_grad_()
    ours, wide, torchs = kind([half], master=mode), kind([plain]), kind([other], master=mode)
    for _ in range(3):
        grad = torch.randn(5000, generator=generator).to(dtype).to(HERE)
        half.grad, plain.grad, other.grad = grad, grad.float(), grad.clone()
        with kernels.use("triton"):
            ours.step()
            wide.step()
        with kernels.use("reference"):
            torchs.step()
    whole = masters.master_of(half.detach(), ours.state[half])
    # A split float16 is off by 2**-40 in every step where it is small.
    limit = 3 * 2.0**-40 if mode == "split" and dtype is torch.float16 else 0.0
    assert float((whole - plain.detach()).abs().max()) <= limit
    assert same(
        half.detach(),
        masters.split(whole, dtype)[0] if mode == "split" else masters.rounded(whole, dtype),
    )
    same_way = masters.master_of(other.detach(), torchs.state[other])
    torch.testing.assert_close(same_way, whole, rtol=1e-6, atol=1e-7)
    assert {v.dtype for k, v in ours.state[half].items() if k.startswith("exp")} <= {torch.float32}


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_small_steps_add_up(mode: str, path: str) -> None:
    w = torch.ones(8, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=2.0**-14, master=mode)  # an eighth of the distance to the next
    for _ in range(8):
        w.grad = torch.ones_like(w)
        with kernels.use(path):
            optimizer.step()
    assert w.tolist() == [1.0 - 2.0**-11] * 8


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_saved_and_loaded_to_the_bit(kind: Any, mode: str, path: str) -> None:
    def step(optimizer: Any, seed: int) -> None:
        for w in optimizer.param_groups[0]["params"]:
            w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)).to(w)
        with kernels.use(path):
            optimizer.step()

    weights = [torch.ones(300, dtype=torch.float16, device=HERE, requires_grad=True)]
    first = kind(weights, master=mode)
    for seed in range(3):
        step(first, seed)
    twin = [w.detach().clone().requires_grad_() for w in weights]
    second = kind(twin, master=mode)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    thawed = pickle.loads(pickle.dumps(first))
    for optimizer in (first, second, thawed):
        step(optimizer, 7)
    frozen = thawed.param_groups[0]["params"]
    assert same(weights[0].detach(), twin[0].detach())
    assert same(weights[0].detach(), frozen[0].detach())
    for key, value in first.state[weights[0]].items():
        assert same(value, second.state[twin[0]][key])
        assert same(value, thawed.state[frozen[0]][key])


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("dtype", HALVES)
def test_one_kind_of_master_loads_the_other(dtype: torch.dtype, path: str) -> None:
    if HERE == "cpu" and dtype is torch.bfloat16 and path == "triton":
        pytest.skip("Triton's interpreter cuts off where it should round to bfloat16")
    for old, new in (MODES, MODES[::-1]):
        w = torch.full((4,), 1.0, dtype=dtype, device=HERE, requires_grad=True)
        first = optim.SGD([w], lr=2.0**-14, master=old)
        w.grad = torch.ones_like(w)
        with kernels.use(path):
            first.step()
            before = masters.master_of(w.detach(), first.state[w]).clone()
            second = optim.SGD([w], lr=0.0, master=new)
            second.load_state_dict(first.state_dict())
            second.param_groups[0]["lr"] = 0.0
            second.step()
        assert same(masters.master_of(w.detach(), second.state[w]), before)
        assert len(second.state[w]) == 1


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_what_others_write_to_a_weight_is_not_lost(mode: str, path: str) -> None:
    w = torch.ones(3, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=2.0**-14, master=mode)
    with kernels.use(path):
        for _ in range(2):
            w.grad = torch.ones_like(w)
            optimizer.step()
        with torch.no_grad():
            w[1] = 5.0
        w.grad = torch.zeros_like(w)
        optimizer.step()
    whole = masters.master_of(w.detach(), optimizer.state[w])
    assert w.tolist()[1] == 5.0
    assert float(whole[0]) == 1.0 - 2.0**-13


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_step_leaves_masters_alone(mode: str, path: str) -> None:
    scaler = GradScaler(HERE, init_scale=4.0)
    w = torch.linspace(0.1, 0.9, 5, device=HERE).half().requires_grad_()
    optimizer = optim.AdamW([w], lr=0.01, master=mode)
    with kernels.use(path):
        for bad in (True, False, True):
            scaler.backward((w.float() * 2).sum())
            if bad:
                w.grad[0] = math.inf
            before = copy.deepcopy((w.detach(), optimizer.state_dict()["state"]))
            outcome = scaler.apply(optimizer)
            assert bool(outcome.applied) is not bad
            if bad:
                assert same(w.detach(), before[0])
                for key, value in before[1].get(0, {}).items():
                    assert same(value, optimizer.state[w][key])


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_gradients_can_be_had_unscaled(path: str) -> None:
    for dtype in (torch.float32, torch.float16):
        for unscale in (False, True):
            scaler = GradScaler(HERE, init_scale=4.0)
            w = torch.ones(3, device=HERE, dtype=dtype, requires_grad=True)
            for optimizer in (kind([w], unscale_grads=unscale) for kind in KINDS):
                w.grad = None
                with kernels.use(path):
                    scaler.backward((w.float() * 2.0).sum())
                    scaler.apply(optimizer, zero_grad=False)
                if unscale:
                    assert w.grad.tolist() == [2.0] * 3
                elif path == "triton":  # torch's own fused steps unscale float32 ones anyway
                    assert w.grad.tolist() == [8.0] * 3


def test_formats_are_mixed_in_one_group() -> None:
    sizes = [(5, torch.float16), (7, torch.float32), (9, torch.float16), (3, torch.float32)]
    weights = [torch.ones(n, dtype=d, device=HERE, requires_grad=True) for n, d in sizes]
    twins = [w.detach().float().requires_grad_() for w in weights]
    ours, wide = optim.AdamW(weights, lr=0.1), optim.AdamW(twins, lr=0.1)
    scalers = [GradScaler(HERE, init_scale=8.0) for _ in range(2)]
    with kernels.use("triton"):
        for _ in range(3):
            for scaler, optimizer, some in ((scalers[0], ours, weights), (scalers[1], wide, twins)):
                scaler.backward(sum(w.float().square().sum() for w in some))
                for w in some:
                    w.grad = torch.full_like(w, 24.0)
                scaler.apply(optimizer, clip_norm=1.0)
    for w, twin in zip(weights, twins, strict=True):
        assert same(w.detach(), twin.detach().to(w.dtype))


@pytest.mark.parametrize("path", ["triton", "reference"])
def test_states_of_another_format_or_shape_never_reach_a_kernel(path: str) -> None:
    w = torch.ones(64, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = optim.AdamW([w], lr=2.0**-14)
    w.grad = torch.ones_like(w)
    with kernels.use(path):
        optimizer.step()
        for name in ("master", "exp_avg", "exp_avg_sq"):  # as torch's load_state_dict leaves them
            optimizer.state[w][name] = optimizer.state[w][name].half()
        optimizer.step()
        kept = {name: optimizer.state[w][name] for name in ("master", "exp_avg", "exp_avg_sq")}
        assert {value.dtype for value in kept.values()} == {torch.float32}
        optimizer.state[w]["exp_avg"] = torch.zeros(8, device=HERE)
        with pytest.raises(StateError, match=r"'exp_avg' .* \(64,\) has shape \(8,\)"):
            optimizer.step()
    assert float(w.detach().float().min()) > 0.99


@pytest.mark.parametrize("path", ["triton", "reference"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [0.0, -0.0, 4.0])
def test_a_weight_can_be_set_to_anything(
    path: str, mode: str, dtype: torch.dtype, value: float
) -> None:
    if HERE == "cpu" and dtype is torch.bfloat16 and mode == "float32" and path == "triton":
        pytest.skip("Triton's interpreter cuts off where it should round to bfloat16")
    w = torch.ones(8, dtype=dtype, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=1e-4, master=mode)
    with kernels.use(path):
        w.grad = torch.ones_like(w)
        optimizer.step()
        with torch.no_grad():
            w.fill_(value)
        w.grad = torch.zeros_like(w)
        optimizer.step()
    assert w.tolist() == [value] * 8


def test_a_weight_written_between_two_kinds_of_masters_is_not_lost() -> None:
    w = torch.ones(4, dtype=torch.float16, device=HERE, requires_grad=True)
    first = optim.SGD([w], lr=2.0**-14)
    w.grad = torch.ones_like(w)
    first.step()
    second = optim.SGD([w], lr=0.0, master="split")
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        w.fill_(4.0)
    second.step()
    assert w.tolist() == [4.0] * 4


def test_amsgrad_has_masters_too() -> None:
    w = torch.ones(4, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = optim.AdamW([w], lr=0.1, amsgrad=True)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        with kernels.use("reference"):
            optimizer.step()
    assert optimizer.state[w]["max_exp_avg_sq"].dtype is torch.float32


def test_a_post_hook_of_a_load_has_the_last_word() -> None:
    w = torch.zeros(4, dtype=torch.float16, device=HERE, requires_grad=True)
    optimizer = optim.SGD([w], lr=1.0, momentum=0.9)
    w.grad = torch.ones_like(w)
    optimizer.step()

    def reset(loaded: Any) -> None:
        for state in loaded.state.values():
            state["momentum_buffer"].zero_()

    optimizer.register_load_state_dict_post_hook(reset)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[w]["momentum_buffer"].tolist() == [0.0] * 4
    assert optimizer.state[w]["momentum_buffer"].dtype is torch.float32


def test_a_step_that_fails_leaves_no_master_behind() -> None:
    weights = [torch.zeros(4, dtype=torch.float16, requires_grad=True) for _ in range(2)]
    optimizer = optim.AdamW(weights)
    for w in weights:
        w.grad = torch.ones_like(w)
    with kernels.use("reference"):
        optimizer.step()
        optimizer.state[weights[1]]["exp_avg"] = torch.zeros(3)
        with pytest.raises(StateError, match="exp_avg"):
            optimizer.step()
    assert list(map(id, optimizer.state)) == list(map(id, weights))
    assert optimizer.param_groups[0]["params"][0] is weights[0]
    assert optimizer.state[weights[0]]["master"].grad is None


def test_a_parameter_twice_in_a_group_is_stepped_twice_as_torch_does() -> None:
    w = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = optim.SGD([w, w], lr=1.0)
    w.grad = torch.ones_like(w)
    with kernels.use("reference"):
        optimizer.step()
    assert w.tolist() == [-2.0] * 4


def test_a_master_must_be_of_a_kind_there_is() -> None:
    with pytest.raises(SettingError, match="float32, split"):
        optim.AdamW([torch.ones(1, requires_grad=True)], master="float64")
