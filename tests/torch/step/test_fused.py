"""The kernels that decide beside the ordinary stages: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, AdamW

from gradscale import Dynamic, Off, Policy, Static
from gradscale.torch import GradScaler
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.step import fused
from gradscale.torch.telemetry.outcome import StepOutcome

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
POLICIES: list[Policy] = [
    Dynamic(init_scale=2.0**10, growth_interval=2, hysteresis=2),
    Dynamic(init_scale=8.0, min_scale=4.0, max_scale=16.0, growth_interval=1),
    Static(init_scale=4.0),
    Off(),
]
# A gradient, or a loss that is not finite.
EVENTS = st.sampled_from([1.0, -2.0, 0.0, 2.0**-30, math.inf, math.nan, "bad loss"])


def number(value: Any) -> Any:
    """A plain value that compares equal to itself."""
    plain = value.item() if isinstance(value, torch.Tensor) else value
    return "NaN" if plain != plain else plain


@contextmanager
def way(which: str) -> Iterator[None]:
    """The fast way, or the long one: on the CPU without any kernel, on a GPU with those that read.

    Without kernels nobody counts culprits on a GPU.
    """
    if which == "fast":
        with kernels.use("triton"):
            yield
        return
    ordinary = mock.patch.multiple(fused, measure_fused=no, advance_fused=nothing)
    together = mock.patch("gradscale.torch.step.apply.step_fused", nothing)
    with kernels.use("reference" if HERE == "cpu" else "triton"), ordinary, together:
        yield


def no(*_: object) -> bool:
    """What `measure_fused` says where it does nothing."""
    return False


def nothing(*_: object) -> None:
    """What the other two say."""


def run(
    path: str,
    policy: Policy,
    history: list[list[Any]],
    several: bool,
    clip: float | None,
    loop: str = "apply",
) -> list[Any]:
    """Everything that can be seen of a run, in two calls or in torch's loop."""
    params = [torch.ones(3, device=HERE, requires_grad=True) for _ in range(2)]
    optimizers = [SGD([params[0]], lr=0.5, fused=True), AdamW([params[1]], lr=0.5, fused=True)]
    scaler = GradScaler(HERE, policy=policy, stuck_after=3, on_stuck="ignore", underflow_every=2)
    seen: list[Any] = []
    with way(path):
        for first, second in history:
            loss = params[0].sum() + params[1].sum()
            scaler.backward(loss * math.nan if "bad loss" in (first, second) else loss)
            for param, value in zip(params, (first, second), strict=True):
                if value != "bad loss":
                    param.grad[1] = value * float(scaler.get_scale())
            used = optimizers if several else optimizers[:1]
            if loop == "apply":
                outcomes = [scaler.apply(used, clip_norm=clip)]
            else:
                outcomes = [torchs_step(scaler, one, clip, loop) for one in used]
                scaler.update()
                used[0].zero_grad()
            params[1].grad = None
            for outcome in outcomes:
                names = ["applied", "finite", "fits", "loss_finite", "scale", "underflow"]
                if loop == "apply":  # else on the CPU nobody measures it
                    names.append("amax")
                seen.append([number(getattr(outcome, name)) for name in names])
                seen.append([number(outcome.skipped_in_a_row), outcome.verdict()])
                seen.append([(bad.name, bad.infs, bad.nans) for bad in outcome.culprits()])
                if loop == "apply":
                    seen.append(pytest.approx(float(outcome.grad_norm), rel=1e-6, nan_ok=True))
    scaler.flush()
    # Every clipped step rounds numbers up to 4, which may end near 0.
    most = len(history) * 2.0**-22
    values = [pytest.approx(param.tolist(), rel=1e-5, abs=most) for param in params]
    exact = [param.tolist() for param in params]
    return [seen, scaler.history, scaler.state_dict(), values if clip else exact]


def torchs_step(scaler: GradScaler, optimizer: Any, clip: float | None, loop: str) -> StepOutcome:
    """Steps in torch's loop, after unscaling or not, and after clipping or not."""
    if loop == "unscale":
        scaler.unscale_(optimizer)
    if clip is not None:
        scaler.clip_grad_norm_(optimizer, clip)
    scaler.step(optimizer)
    return scaler.outcome(optimizer)


@settings(max_examples=8 if HERE == "cpu" else 200, deadline=None)
@given(
    history=st.lists(st.lists(EVENTS, min_size=2, max_size=2), min_size=1, max_size=8),
    policy=st.sampled_from(POLICIES),
    several=st.booleans(),
    clip=st.sampled_from([None, 0.5]),
    loop=st.sampled_from(["apply", "step", "unscale"]),
)
def test_the_fast_way_ends_where_the_long_way_does(
    history: list[list[Any]], policy: Policy, several: bool, clip: float | None, loop: str
) -> None:
    fast = run("fast", policy, history, several, clip, loop)
    slow = run("long", policy, history, several, clip, loop)
    for a, b in zip(fast[0], slow[0], strict=True):
        if isinstance(a, list):
            assert a == b
        else:
            assert a.expected == b
    assert fast[1:3] == slow[1:3]
    for a, b in zip(fast[3], slow[3], strict=True):
        assert (a.expected if clip else a) == b


def test_bad_losses_are_forgiven_for_a_while_as_on_the_long_way() -> None:
    history = [["bad loss", 1.0]] * 50
    policy = Dynamic(init_scale=2.0**10)
    fast, slow = (run(path, policy, history, False, None) for path in ("fast", "long"))
    assert fast[2] == slow[2]
    assert fast[2]["scale"] == 2.0**8  # the 40th and the 48th count


def taken(do: Any) -> bool:
    """Whether a kernel reads the gradients, decides and moves the scale in `do`."""
    return "measure and advance" in launched(do)


def launched(do: Any) -> list[str]:
    """Which kernels that decide are launched in `do`, in order."""
    measure, decide = kernels.module("measure"), kernels.module("decide")
    both, advance, found = measure.measure_and_decide, decide.advance, []

    def deciding(*args: Any, **settings: Any) -> Any:
        moves = settings.get("advance", True)
        found.append("measure and advance" if moves else "measure")
        return both(*args, **settings)

    def advancing(*args: Any, **settings: Any) -> Any:
        found.append("advance")
        return advance(*args, **settings)

    first = mock.patch.object(measure, "measure_and_decide", deciding)
    with kernels.use("triton"), first, mock.patch.object(decide, "advance", advancing):
        do()
    return found


def test_what_goes_the_fast_way() -> None:
    scaler = GradScaler(HERE)
    w = torch.ones(3, device=HERE, requires_grad=True)
    fused, plain = SGD([w], lr=0.5, fused=True), SGD([w], lr=0.5)

    def step(optimizer: Any = fused, before: Any = None, **settings: Any) -> None:
        scaler.backward(w.sum())
        if before is not None:
            before()
        scaler.apply(optimizer, **settings)

    assert taken(step)
    assert taken(lambda: step(clip_norm=1.0))
    assert not taken(lambda: step(plain))
    assert not taken(lambda: step(clip_value=1.0))
    assert not taken(lambda: step(before=lambda: scaler.unscale_(fused)))
    assert not taken(lambda: step(before=lambda: scaler.backward(w.sum(), loss_id=1)))
    assert not taken(lambda: step([fused, SGD([w], lr=1.0, fused=True)]))
    assert taken(step)
    with kernels.use("reference"):
        step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("call", ["", "unscale_", "clip_grad_norm_"])
def test_torchs_loop_launches_one_kernel_that_reads_and_one_that_moves(
    call: str, fused: bool
) -> None:
    scaler, w = GradScaler(HERE), torch.ones(3, device=HERE, requires_grad=True)
    optimizer = SGD([w], lr=0.5, fused=fused)

    def iterate() -> None:
        scaler.scale(w.sum()).backward()
        if call == "unscale_":
            scaler.unscale_(optimizer)
        elif call:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert [launched(iterate) for _ in range(2)] == [["measure", "advance"]] * 2


def test_gradients_that_stay_are_unscaled_or_cleared_on_the_fast_way() -> None:
    scaler = GradScaler(HERE, init_scale=4.0)
    w = torch.ones(2, device=HERE, requires_grad=True)
    optimizer = SGD([w], lr=0.5, fused=True)
    with kernels.use("triton"):
        scaler.backward(w.sum())
        scaler.apply(optimizer, zero_grad=False)
        assert w.grad.tolist() == [1.0, 1.0]
        optimizer.zero_grad()
        scaler.backward(w.sum())
        w.grad[0] = math.inf
        scaler.apply(optimizer, zero_grad=False)
        scaler.scale(w.sum())
        assert w.grad.tolist() == [0.0, 0.0]
    assert w.tolist() == [0.5, 0.5]


def test_optimizers_of_the_same_shapes_do_not_see_each_others_gradients() -> None:
    params = [torch.ones(3, device=HERE, requires_grad=True) for _ in range(2)]
    kept = [torch.empty(3, device=HERE) for _ in range(2)]  # so that addresses stay
    optimizers = [SGD([w], lr=0.25, fused=True) for w in params]
    scaler = GradScaler(HERE, policy=Static(init_scale=4.0), on_stuck="ignore")
    applied: list[list[bool]] = [[], []]
    with kernels.use("triton"):
        for _ in range(3):
            for number, (w, grad) in enumerate(zip(params, kept, strict=True)):
                scaler.backward(w.sum())
                w.grad = grad.fill_(math.inf if number else 4.0)
                applied[number].append(bool(scaler.apply(optimizers[number]).applied))
    assert applied == [[True] * 3, [False] * 3]
    assert params[0].tolist() == [0.25] * 3


def test_gradients_at_the_same_address_but_of_another_size_or_format_are_read_anew() -> None:
    store = torch.zeros(64, device=HERE)
    with kernels.use("triton"):
        for make in (lambda: store[:8], lambda: store[:4], lambda: store[:2].view(torch.float16)):
            grad = make()
            w = torch.ones(grad.shape, device=HERE, dtype=grad.dtype, requires_grad=True)
            w.grad = grad
            place = kernels.locate([w], [grad])
            assert place is not None
            ((dtype, table),) = place.groups
            assert dtype is grad.dtype
            assert table.chunks.sizes.tolist() == [grad.numel()]


def test_an_optimizer_that_raises_is_counted_once() -> None:
    scaler = GradScaler(HERE, init_scale=4.0, growth_interval=3)
    w = torch.ones(2, device=HERE, requires_grad=True)
    optimizer = SGD([w], lr=0.5, fused=True)
    failures = [MemoryError]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    optimizer.register_step_pre_hook(fail)
    with kernels.use("triton"):
        scaler.backward(w.sum())
        with pytest.raises(MemoryError):
            scaler.apply(optimizer)
        assert scaler.apply(optimizer)
    assert w.tolist() == [0.5, 0.5]
    assert scaler._get_growth_tracker() == 1
