"""Every row of docs/reference/differences.md: torch's scaler and ours, same calls, both columns.

A test is named after its row, `test_stale_scale_...` for `stale-scale`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from cpu_graph import keep_in_tensors
from gradscale import CallOrderError, SettingError, StateError
from gradscale.torch import GradScaler

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "differences.md"
TORCH, OURS = torch.amp.GradScaler, GradScaler
Kind = type[torch.amp.GradScaler]
HUGE = 2.0**127
INF, NAN = math.inf, math.nan


def parameter(value: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1,), value, dtype=dtype, requires_grad=True)


def backward(scaler: torch.amp.GradScaler, w: Tensor, gradient: float = 1.0) -> None:
    """A backward pass whose unscaled gradient is `gradient`."""
    scaler.scale((w * gradient).sum()).backward()


def iterate(scaler: torch.amp.GradScaler, w: Tensor, gradient: float = 1.0) -> None:
    """A whole iteration of gradient descent with rate 1, from no gradient to none."""
    optimizer = SGD([w], lr=1.0)
    backward(scaler, w, gradient)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def fails(call: Callable[[], Any]) -> type[Exception] | None:
    """What `call` raises."""
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.parametrize(("kind", "lowest", "highest"), [(TORCH, 0.0, HUGE), (OURS, 2**-14, 2**64)])
def test_bounds(kind: Kind, lowest: float, highest: float) -> None:
    falling, rising = kind("cpu", init_scale=8.0), kind("cpu", init_scale=8.0, growth_interval=1)
    for _ in range(160):
        w = parameter(0.0)
        backward(falling, w)
        w.grad = torch.full((1,), INF)
        falling.step(SGD([w], lr=1.0))
        falling.update()
        iterate(rising, parameter(0.0), 0.0)
    assert (falling.get_scale(), rising.get_scale()) == (lowest, highest)


@pytest.mark.parametrize("kind", [TORCH, OURS])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**100])
def test_bounds_give_way_to_init_scale(kind: Kind, scale: float) -> None:
    scaler = kind("cpu", init_scale=scale)
    iterate(scaler, parameter(0.0), 0.0)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize(
    ("kind", "scales"),
    [
        (TORCH, [2.0**59, 2.0**28, 2.0**21, 2.0**20, 2.0**12]),
        (OURS, [2.0**60] * 3 + [2.0**59, 2.0**58]),
    ],
)
@pytest.mark.parametrize("loss", [NAN, INF])
def test_nonfinite_loss(kind: Kind, scales: list[float], loss: float) -> None:
    scaler = kind("cpu", init_scale=2.0**60)
    seen = []
    for _ in range(48):
        iterate(scaler, parameter(), loss)
        seen.append(scaler.get_scale())
    assert [seen[n - 1] for n in (1, 32, 39, 40, 48)] == scales


@pytest.mark.parametrize(("kind", "value"), [(TORCH, -INF), (OURS, 0.0)])
def test_fits(kind: Kind, value: float) -> None:
    scaler, w = kind("cpu", init_scale=2.0**-10), parameter(0.0)
    optimizer = SGD([w], lr=1.0)
    for _ in range(2):
        backward(scaler, w, HUGE)  # twice 2**117, but unscaled 2**128
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == value
    assert scaler.get_scale() == 2.0**-10


@pytest.mark.parametrize(
    ("kind", "scales"), [(TORCH, [8.0] * 5), (OURS, [16.0, 16.0, 32.0, 32.0, 64.0])]
)
def test_counter(kind: Kind, scales: list[float]) -> None:
    scaler, w, seen = kind("cpu", init_scale=8.0, growth_interval=10), parameter(), []
    for _ in range(5):
        iterate(scaler, w)
    scaler.set_growth_interval(2)
    for _ in range(5):
        iterate(scaler, w)
        seen.append(scaler.get_scale())
    assert seen == scales


@pytest.mark.parametrize(
    ("kind", "left", "value", "scale"), [(TORCH, INF, 0.0, 2.0), (OURS, 0.0, -1.0, 4.0)]
)
def test_skipped_gradients(kind: Kind, left: float, value: float, scale: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter(0.0)
    optimizer, lefts = SGD([w], lr=1.0), []
    for gradient in (HUGE, 1.0):
        backward(scaler, w, gradient)
        scaler.step(optimizer)
        scaler.update()
        lefts.append(w.grad.item())
    assert (lefts[0], w.item(), scaler.get_scale()) == (left, value, scale)


@pytest.mark.parametrize(
    ("kind", "value"), [(TORCH, NAN), (OURS, NAN), (partial(OURS, recheck=True), 1.0)]
)
def test_recheck(kind: Any, value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    optimizer = SGD([w], lr=1.0)
    backward(scaler, w)
    scaler.unscale_(optimizer)
    w.grad.fill_(NAN)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(w.item(), value, rtol=0, atol=0, equal_nan=True)
    assert scaler.get_scale() == 8.0


def closure_of(scaler: torch.amp.GradScaler, w: Tensor, gradient: float) -> Callable[[], Tensor]:
    """A closure as the documentation wants it."""

    def closure() -> Tensor:
        w.grad = None
        loss = (w * gradient).sum()
        scaler.scale(loss).backward()
        return loss

    return closure


@pytest.mark.parametrize(("kind", "value"), [(TORCH, -7.0), (OURS, 0.0)])
def test_closure_by_position(kind: Kind, value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    backward(scaler, w)
    loss = scaler.step(SGD([w], lr=1.0), closure_of(scaler, w, 1.0))
    assert (loss.item(), w.item()) == (1.0, value)


@pytest.mark.parametrize(
    ("kind", "error", "value"), [(TORCH, RuntimeError, 1.0), (OURS, None, 0.0)]
)
def test_closure_by_keyword(kind: Kind, error: type[Exception] | None, value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    optimizer, closure = SGD([w], lr=1.0), closure_of(scaler, w, 1.0)
    assert fails(lambda: scaler.step(optimizer, closure=closure)) is error
    assert w.item() == value


@pytest.mark.parametrize(("kind", "value"), [(TORCH, -INF), (OURS, 0.0)])
def test_closure_that_overflows(kind: Kind, value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter(0.0)
    backward(scaler, w)
    scaler.step(SGD([w], lr=1.0), closure_of(scaler, w, HUGE))
    assert w.item() == value


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float16, ValueError), (torch.bfloat16, None), (torch.complex64, RuntimeError)],
)
def test_half_gradients(dtype: torch.dtype, error: type[Exception] | None) -> None:
    """bfloat16 is an error in torch on CUDA only."""
    for kind, failure in ((TORCH, error), (OURS, None)):
        # In float16 arithmetic the reciprocal of this scale would be 0.
        scaler, w = kind("cpu", init_scale=2.0**25), parameter(1.0, dtype)
        wide = w.to(torch.promote_types(dtype, torch.float32))
        scaler.scale((wide * 2.0**-11).sum().abs()).backward()
        found = fails(lambda: scaler.unscale_(SGD([w], lr=1.0)))  # noqa: B023
        if found is NotImplementedError:  # a subclass: it was a RuntimeError in torch 2.4
            found = RuntimeError
        assert found is failure
        assert abs(w.grad.item()) == (2.0**14 if failure else 2.0**-11)


@pytest.mark.parametrize(
    ("kind", "scaled", "value", "scale"),
    [(TORCH, INF, 1.0, 2.0**15), (OURS, 2.0**15, 0.0, 2.0**15)],
)
@pytest.mark.filterwarnings("ignore:The loss is float16")
def test_half_loss(kind: Kind, scaled: float, value: float, scale: float) -> None:
    scaler, w = kind("cpu", init_scale=2.0**16), parameter()
    optimizer = SGD([w], lr=1.0)
    scaler.scale(w.sum().half()).backward()
    assert w.grad.item() == scaled
    scaler.step(optimizer)
    scaler.update()
    assert (w.item(), scaler.get_scale()) == (value, scale)


def test_half_loss_warns_once() -> None:
    scaler = OURS("cpu")
    losses = [parameter().sum().half() for _ in range(3)]
    with pytest.warns(UserWarning, match=r"loss\.float\(\)") as caught:
        scaler.scale(losses)
    assert len(caught) == 1


@pytest.mark.parametrize(("kind", "value"), [(TORCH, -0.125), (OURS, -1.0)])
def test_shared_parameter(kind: Kind, value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    backward(scaler, w)
    for optimizer in [SGD([w], lr=1.0), SGD([w], lr=1.0)]:
        scaler.step(optimizer)
    assert w.item() == value


def test_no_gradients() -> None:
    scalers = [kind("cpu", init_scale=8.0, growth_interval=1) for kind in (TORCH, OURS)]
    optimizer = SGD([parameter(), parameter()], lr=1.0)
    for scaler in scalers:
        backward(scaler, parameter())
    assert fails(lambda: scalers[0].step(optimizer)) is AssertionError
    assert fails(scalers[0].update) is AssertionError
    with pytest.warns(UserWarning, match="0 of the 2 parameters"):
        assert scalers[1].step(optimizer) is None
    scalers[1].update()
    assert scalers[1].get_scale() == 8.0


@pytest.mark.parametrize(("kind", "scale"), [(TORCH, 32.0), (OURS, 16.0)])
def test_dummy_step(kind: Kind, scale: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0, growth_interval=1), parameter()
    optimizer = SGD([w], lr=1.0)
    backward(scaler, w)
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    assert scaler.get_scale() == scale


@pytest.mark.parametrize(("kind", "value"), [(TORCH, -3.0), (OURS, 0.0)])
def test_stale_scale_after_an_early_update(kind: Kind, value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    backward(scaler, w)
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0
    scaler.step(SGD([w], lr=1.0))
    assert w.item() == value


@pytest.mark.parametrize(("kind", "value", "scale"), [(TORCH, 0.5, 32.0), (OURS, 0.0, 16.0)])
def test_stale_scale_of_an_optimizer_that_steps_late(
    kind: Kind, value: float, scale: float
) -> None:
    scaler, first, second = kind("cpu", init_scale=8.0, growth_interval=1), parameter(), parameter()
    scaler.scale((first + second).sum()).backward()
    for w in (first, second):
        scaler.step(SGD([w], lr=1.0))
        scaler.update()
    assert (first.item(), second.item(), scaler.get_scale()) == (0.0, value, scale)


@pytest.mark.parametrize(
    ("kind", "error", "value"), [(TORCH, None, -0.125), (OURS, CallOrderError, 0.0)]
)
def test_stale_scale_of_a_second_step(kind: Kind, error: type[Exception], value: float) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    optimizer = SGD([w], lr=1.0)
    backward(scaler, w)
    scaler.step(optimizer)
    scaler.update()
    assert fails(lambda: scaler.step(optimizer)) is error
    assert w.item() == value


@pytest.mark.parametrize(("kind", "value"), [(TORCH, -0.5), (OURS, -1.0)])
def test_stale_scale_of_gradients_left_over(kind: Kind, value: float) -> None:
    scaler, often, seldom = kind("cpu", init_scale=8.0, growth_interval=1), parameter(), parameter()
    optimizers = [SGD([often], lr=1.0), SGD([seldom], lr=1.0)]
    backward(scaler, seldom)
    scaler.unscale_(optimizers[1])  # so that the scaler has met it
    scaler.update(8.0)
    optimizers[1].zero_grad()
    scaler.scale((often + seldom).sum()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    backward(scaler, seldom)  # 16 is added to 8
    scaler.step(optimizers[1])
    assert seldom.item() == value


@pytest.mark.parametrize(
    ("kind", "error", "value"), [(TORCH, RuntimeError, 1.0), (OURS, None, 0.0)]
)
def test_stale_scale_of_a_loss_that_is_run_late(
    kind: Kind, error: type[Exception] | None, value: float
) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    loss = scaler.scale(w.sum())
    scaler.update(2.0)
    assert fails(loss.backward) is error  # torch has written to the scale that the graph needs
    if error is None:
        scaler.step(SGD([w], lr=1.0))
    assert w.item() == value


@pytest.mark.parametrize(("kind", "error"), [(TORCH, None), (OURS, CallOrderError)])
def test_unscaled_sum(kind: Kind, error: type[Exception] | None) -> None:
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    optimizer = SGD([w], lr=1.0)
    backward(scaler, w)
    scaler.unscale_(optimizer)
    backward(scaler, w)  # 8 is added to 1
    assert fails(lambda: scaler.step(optimizer)) is error
    assert w.item() == (1.0 if error else -8.0)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
@pytest.mark.parametrize("name", ["init_scale", "growth_factor", "backoff_factor"])
def test_validation_of_settings(name: str, value: float) -> None:
    # torch's two rules: growth above 1, backoff below 1; a NaN breaks neither (up to 2.10: both).
    growth, backoff = value <= 1, value >= 1
    if torch.__version__ < (2, 11):
        growth, backoff = not value > 1, not value < 1
    rule = {"growth_factor": growth, "backoff_factor": backoff}.get(name, False)
    assert fails(lambda: TORCH("cpu", **{name: value})) is (AssertionError if rule else None)
    with pytest.raises(SettingError, match=rf"{name} must be .* got {value}"):
        OURS("cpu", **{name: value})


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0])
def test_validation_of_setters_and_update(value: float) -> None:
    for kind, error in ((TORCH, None), (OURS, SettingError)):
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for call in (scaler.set_growth_factor, scaler.set_backoff_factor, scaler.update):
            assert fails(lambda: call(value)) is error  # noqa: B023
        kept = [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_scale()]
        wanted = [value] * 3 if error is None else [2.0, 0.5, 8.0]
        torch.testing.assert_close(kept, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("kind", "scale"), [(TORCH, 2.0**70), (OURS, 2.0**64)])
@pytest.mark.filterwarnings("ignore:The loaded scale")
def test_validation_of_a_loaded_scale_outside_the_bounds(kind: Kind, scale: float) -> None:
    scaler = kind("cpu")
    scaler.load_state_dict(TORCH("cpu", init_scale=2.0**70).state_dict())
    assert scaler.get_scale() == scale


def test_validation_of_a_loaded_scale_warns_and_refuses() -> None:
    states = [TORCH("cpu", init_scale=scale).state_dict() for scale in (2.0**70, 0.0)]
    scaler = OURS("cpu", init_scale=8.0)
    with pytest.warns(UserWarning, match="loaded scale"):
        scaler.load_state_dict(states[0])
    with pytest.raises(StateError, match="scale"):
        scaler.load_state_dict(states[1])
    assert scaler.get_scale() == 2.0**64
    lost = TORCH("cpu", init_scale=8.0)
    lost.load_state_dict(states[1])
    assert lost.get_scale() == 0.0


def test_update_number() -> None:
    for kind, errors in ((TORCH, (AttributeError, AssertionError)), (OURS, (None, None))):
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        assert fails(lambda: scaler.update(1024)) is errors[0]  # noqa: B023
        assert scaler.get_scale() == (8.0 if errors[0] else 1024.0)
        scaler._device = "cuda"  # from here on the tensor is on another device than it
        assert fails(lambda: scaler.update(torch.tensor(4.0))) is errors[1]  # noqa: B023
        assert scaler.get_scale() == (8.0 if errors[1] else 4.0)


def test_never_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        theirs = TORCH()
    ours = OURS()
    assert (theirs.is_enabled(), ours.is_enabled()) == (False, True)
    loss = torch.ones(())
    assert (theirs.scale(loss).item(), ours.scale(loss).item()) == (1.0, 2.0**16)


@pytest.mark.parametrize(("kind", "value"), [(TORCH, math.nan), (OURS, 0.0)])
def test_fused_momentum(kind: Kind, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uninitialised memory holds anything; here it is told to hold NaN.
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))
    scaler, w = kind("cpu", init_scale=8.0), parameter()
    if kind is OURS:
        keep_in_tensors(scaler)  # with numbers the optimizer is not called in a skipped step
    optimizer = SGD([w], lr=1.0, momentum=0.9, fused=True)
    backward(scaler, w)
    w.grad.fill_(INF)
    scaler.step(optimizer)
    assert repr(optimizer.state[w]["momentum_buffer"].item()) == repr(value)


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {row: f"test_{row.replace('-', '_')}" for row in rows}
    tests = {name for name in globals() if name.startswith("test_")}
    tests -= {test_every_row_has_a_test_and_every_test_a_row.__name__}
    assert rows
    for row, name in names.items():
        mine = {test for test in tests if test == name or test.startswith(f"{name}_")}
        assert mine, f"row {row} has no test"
        tests -= mine
    assert not tests, f"tests without a row: {sorted(tests)}"
