"""`amp.init`: torch's functions cast their arguments, and a handle scales losses."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from gradscale.compat.apex import amp, uninstall
from gradscale.errors import CallOrderError, SettingError

pytestmark = pytest.mark.usefixtures("fresh_amp")
HALF, FLOAT = torch.float16, torch.float32
INPUTS = [HALF, FLOAT]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Autocast is off and no mode is there, before and after."""
    yield
    uninstall()
    assert not torch.is_autocast_enabled("cpu")
    assert _get_current_function_mode() is None


def x_of(dtype: torch.dtype, *shape: int) -> Tensor:
    """A leaf of values between 0 and 1."""
    return torch.rand(shape or (4, 4), dtype=dtype).requires_grad_()


# Casts.


def linear(x: Tensor) -> Tensor:
    return nn.Linear(4, 4)(x)


def conv(x: Tensor) -> Tensor:
    return nn.Conv2d(4, 4, 2)(x.view(1, 4, 2, 2))


def group_norm(x: Tensor) -> Tensor:
    return nn.GroupNorm(2, 4)(x)


def self_attention(x: Tensor) -> Tensor:
    return nn.MultiheadAttention(4, 2)(x, x, x)[0]  # type: ignore[no-any-return]


def packed(x: Tensor) -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(x.view(4, 2, 2), [4, 3])
    output: Tensor = nn.RNN(2, 3)(sequence)[0].data
    return output


CASTS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype | None]] = {
    "linear": (linear, HALF),
    "functional linear": (lambda x: F.linear(x, torch.ones(4, 4)), HALF),
    "conv2d": (conv, HALF),
    "matmul": (lambda x: x.matmul(torch.ones(4, 4)), HALF),
    "operator matmul": (lambda x: torch.ones(4, 4) @ x, HALF),
    "attention": (self_attention, HALF),
    "rnn": (lambda x: nn.RNN(4, 3)(x.view(2, 2, 4))[0], HALF),
    "gru": (lambda x: nn.GRU(4, 3, 2, bidirectional=True)(x.view(2, 2, 4))[0], HALF),
    "lstm": (lambda x: nn.LSTM(4, 3, 2)(x.view(2, 2, 4))[0], HALF),
    "packed": (packed, HALF),
    "rnn cell": (lambda x: nn.RNNCell(4, 4)(x, x), HALF),
    "gru cell": (lambda x: nn.GRUCell(4, 4)(x, x), HALF),
    "lstm cell": (lambda x: nn.LSTMCell(4, 4)(x, (x, x))[0], HALF),
    "softmax": (nn.Softmax(1), FLOAT),
    "functional softmax": (lambda x: F.softmax(x, dim=1), FLOAT),
    "group norm": (group_norm, FLOAT),
    "layer norm": (nn.LayerNorm(4), FLOAT),
    "mse": (lambda x: F.mse_loss(x, torch.ones(4, 4)), FLOAT),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(4)), FLOAT),
    "pow": (lambda x: x.pow(2.0), FLOAT),
    "operator pow": (lambda x: x**2.0, FLOAT),
    "exp": (torch.exp, FLOAT),
    "sum": (lambda x: x.sum(), FLOAT),
    "cpu": (lambda x: x.cpu(), FLOAT),
    "relu": (F.relu, None),
    "batch norm": (nn.BatchNorm1d(4), None),
    "batch norm in inference": (nn.BatchNorm1d(4).eval(), None),
}


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("name", CASTS)
def test_function_computes_in_its_format(name: str, dtype: torch.dtype) -> None:
    function, want = CASTS[name]
    amp.init()
    x = x_of(dtype)
    y = function(x)
    assert y.dtype is (want or dtype)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("name", CASTS)
def test_function_computes_in_its_format_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    function, want = CASTS[name]
    amp.init()
    with torch.device("cuda"):
        here: Any = copy.deepcopy(function).cuda() if isinstance(function, nn.Module) else function
        x = x_of(dtype)
        y = here(x)
        y.float().sum().backward()
    assert y.dtype is (want or dtype)
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.device.type) == (dtype, "cuda")


@pytest.mark.parametrize("other", INPUTS)
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("function", [torch.atan2, torch.mul, Tensor.atan2, Tensor.mul])
def test_binary_function_takes_the_widest_format(
    function: Any, dtype: torch.dtype, other: torch.dtype
) -> None:
    amp.init()
    x = x_of(dtype)
    y = function(x, torch.ones(4, 4, dtype=other))
    assert y.dtype is torch.promote_types(dtype, other)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is dtype
    assert torch.cat([x, torch.ones(4, 4, dtype=other)]).dtype is y.dtype
    assert x.clone().add_(torch.ones(4, 4, dtype=other)).dtype is dtype


def test_half_result_that_would_overflow_is_refused() -> None:
    amp.init()
    assert torch.ones(1).exp_().dtype is FLOAT
    with pytest.raises(
        NotImplementedError, match=r"exp_\(\) does not accept float16 .* Call exp\(\)"
    ):
        torch.ones(1, dtype=HALF).exp_()


@pytest.mark.parametrize("function", [F.binary_cross_entropy, nn.BCELoss()])
def test_banned_function_is_refused_unless_it_is_allowed(function: Any) -> None:
    x, target = torch.rand(4, dtype=HALF), torch.rand(4)
    amp.init()
    assert function(x.float(), target).dtype is FLOAT
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        function(x, target)
    amp.init(allow_banned=True)
    assert function(x, target).dtype is FLOAT


def test_casts_end_with_the_handle() -> None:
    module: Any = types.SimpleNamespace(function=lambda x: x.dtype)
    original = module.function
    amp.register_half_function(module, "function")
    decorated = amp.half_function(lambda x: x.dtype)
    x = torch.ones(4, 4)
    handle = amp.init()
    assert amp._amp_state.handle is handle
    assert (linear(x).dtype, module.function(x), decorated(x)) == (HALF, HALF, HALF)
    for context in (amp.disable_casts, handle._disable_casts):
        with context():
            assert not handle.is_active()
            assert (linear(x).dtype, module.function(x), decorated(x)) == (FLOAT, FLOAT, FLOAT)
            assert x.half().sum().dtype is HALF
    assert handle.is_active()
    handle._deactivate()
    assert not handle.is_active()
    assert module.function is original
    assert (linear(x).dtype, module.function(x), decorated(x)) == (FLOAT, FLOAT, FLOAT)
    assert x.half().sum().dtype is HALF


def test_second_handle_takes_over() -> None:
    first = amp.init()
    second = amp.init()
    assert (first.is_active(), second.is_active()) == (False, True)
    assert linear(torch.ones(4, 4)).dtype is HALF
    amp.initialize(nn.Linear(1, 1), opt_level="O1")
    assert amp._amp_state.handle is not second
    assert linear(torch.ones(4, 4)).dtype is FLOAT  # O1 casts inside of its models alone


def test_mode_below_another_does_nothing_after_its_end() -> None:
    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    handle = amp.init()
    other = Other()
    other.__enter__()
    handle._deactivate()
    assert _get_current_function_mode() is other
    assert torch.ones(2, dtype=HALF).sum().dtype is HALF
    other.__exit__(None, None, None)
    below = _get_current_function_mode()
    assert below is not None
    below.__exit__(None, None, None)


def test_weights_that_moved_are_cast_anew() -> None:
    amp.init()
    layer = nn.Linear(1, 1, bias=False)
    x = torch.ones(1, 1)
    for value in (1.0, 2.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        assert layer(x).item() == value
        with torch.no_grad():
            assert layer(x).item() == value


def test_backward_pass_is_not_cast() -> None:
    amp.init()
    weight = torch.full((2, 2), 1 + 2.0**-12).requires_grad_()
    with amp.disable_casts():
        loss = (torch.full((2, 2), 1 + 2.0**-12) @ weight).sum()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2 + 2.0**-11] * 2] * 2
    with amp.disable_casts():
        again = (torch.full((2, 2), 1 + 2.0**-12) @ weight).sum()
    assert torch.autograd.grad(again, [weight])[0].tolist() == weight.grad.tolist()


def test_disabled_handle_does_nothing() -> None:
    handle = amp.init(enabled=False)
    param = nn.Parameter(torch.ones(1))
    optimizer = handle.wrap_optimizer(torch.optim.SGD([param], lr=1.0))
    assert not hasattr(amp._amp_state, "handle")
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)
    assert linear(torch.ones(4, 4)).dtype is FLOAT
    loss = param.sum()
    for scaling in (handle.scale_loss(loss, optimizer), optimizer.scale_loss(loss)):
        with scaling as scaled:
            assert scaled is loss
    handle._clear_cache()
    handle._deactivate()


# Losses.


def one_weight(**settings: Any) -> tuple[Any, nn.Parameter, torch.optim.SGD]:
    """A handle, and an optimizer of one weight, which is 1."""
    handle: Any = amp.init(**settings)
    param = nn.Parameter(torch.ones(1))
    return handle, param, torch.optim.SGD([param], lr=0.5)


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**16])
def test_handle_scales_a_loss_and_skips_an_overflow(loss_scale: Any) -> None:
    handle, param, optimizer = one_weight(loss_scale=loss_scale)
    for factor, want in ((1.0, 0.5), (1e38, 0.5), (1.0, 0.0)):
        optimizer.zero_grad()
        loss = (param * factor).sum()
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        handle._clear_cache()
        optimizer.step()
        assert param.tolist() == [want]
    moved = 2.0**15 if loss_scale == "dynamic" else 2.0**16
    assert handle._default_scaler.loss_scale() == moved


def test_handle_scales_nothing_while_it_is_not_active() -> None:
    handle, param, optimizer = one_weight()
    handle._deactivate()
    loss = param.sum()
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_wrapped_optimizer_has_a_scale_for_every_loss() -> None:
    handle, param, inner = one_weight()
    optimizer = handle.wrap_optimizer(inner, num_loss=2)
    with pytest.raises(
        CallOrderError,
        match=r"after its wrap_optimizer\(\)\. Call scale_loss\(loss\) of the optimizer",
    ):
        handle.scale_loss(param.sum(), optimizer).__enter__()
    for factors, want in (((1.0, 1.0), 0.0), ((1.0, 1e38), 0.0), ((-1.0, -1.0), 1.0)):
        optimizer.zero_grad()
        for factor in factors:
            with optimizer.scale_loss((param * factor).sum()) as scaled:
                scaled.backward()
        optimizer.step()
        assert param.tolist() == [want]
    assert [scaler.loss_scale() for scaler in optimizer._loss_scaler] == [2.0**16, 2.0**15]
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state_dict() == inner.state_dict()
    assert copy.copy(optimizer).param_groups is inner.param_groups
    for _ in range(2):
        with optimizer.scale_loss(param.sum()) as scaled:
            scaled.backward()
    with pytest.raises(CallOrderError, match=r"was called 3 times .* num_loss is 2"):
        optimizer.scale_loss(param.sum()).__enter__()
    with pytest.raises(CallOrderError, match="was called with a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(SettingError, match="num_loss must be > 0, got 0"):
        handle.wrap_optimizer(inner, num_loss=0)


def test_network_learns_with_a_handle() -> None:
    torch.manual_seed(0)
    handle: Any = amp.init()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x, y = torch.randn(32, 4), torch.arange(32) % 2
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        output = model(x)
        assert output.dtype is HALF
        loss = F.cross_entropy(output, y)
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert {param.dtype for param in model.parameters()} == {FLOAT}
