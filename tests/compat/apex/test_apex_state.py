"""`amp._amp_state`: what scripts read there, and what they set there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradscale.compat.apex import amp
from gradscale.compat.apex.loss_scaler import LossScaler
from gradscale.errors import SettingError

pytestmark = pytest.mark.usefixtures("fresh_amp")
STATE = amp._amp_state


def start(level: str = "O1", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A layer whose weights are 1 and 2, and its optimizer."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return amp.initialize(model, optimizer, opt_level=level, **overrides)


def one_step(model: nn.Module, optimizer: Any, *x: float) -> float:
    """A backward pass whose unscaled gradients are `x`, and a step; the scale of the loss."""
    loss = model(torch.tensor([x])).sum() + 100.0
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        used = scaled.item() / loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return used


# What is there, and from when on.


def test_there_is_nothing_before_initialize() -> None:
    for name in ("opt_properties", "loss_scalers", "handle"):
        assert not hasattr(STATE, name)
    assert (STATE.verbosity, STATE.hard_override, STATE.allow_incoming_model_not_fp32) == (
        1,
        False,
        False,
    )
    start("O2", verbosity=0)
    assert STATE.verbosity == 0
    assert hasattr(STATE, "opt_properties")
    assert not hasattr(STATE, "handle")
    start("O1")
    assert STATE.handle.is_active()


def test_options_are_there_by_name() -> None:
    start("O2", cast_model_outputs=torch.float16, loss_scale="128.0")
    assert STATE.opt_properties.enabled
    assert STATE.opt_properties.loss_scale == 128.0
    assert STATE.opt_properties.options == {
        "opt_level": "O2",
        "enabled": True,
        "cast_model_type": torch.float16,
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": 128.0,
        "cast_model_outputs": torch.float16,
    }
    with pytest.raises(AttributeError, match="loss_scale"):
        STATE.opt_properties.loss_scale = 1.0
    start("O2", enabled=False)
    assert not STATE.opt_properties.enabled
    assert STATE.opt_properties.options["loss_scale"] == 1.0


class Probe(nn.Module):
    """A layer that notes the format of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.seen = y.dtype
        return y


def test_deactivated_handle_ends_the_casts_of_models() -> None:
    model = Probe()
    amp.initialize(model, opt_level="O1")
    doubled = amp.half_function(lambda x: x * 2)
    x = torch.ones(1, 2)
    model(x)
    assert (model.seen, doubled(x).dtype) == (torch.float16, torch.float16)
    STATE.handle._clear_cache()
    STATE.handle._deactivate()
    model(x)
    assert (model.seen, doubled(x).dtype) == (torch.float32, torch.float32)
    amp.initialize(Probe(), opt_level="O1")
    model(x)
    assert (model.seen, doubled(x).dtype) == (torch.float16, torch.float16)
    amp.initialize(Probe(), opt_level="O0")
    model(x)
    assert (model.seen, doubled(x).dtype) == (torch.float16, torch.float32)
    with amp.disable_casts():
        model(x)
    assert model.seen is torch.float32


# The scale.


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("scale", [2**10, 4.0, 0.125, 3])
def test_scale_that_is_set_is_used_and_taken_out(level: str, scale: float) -> None:
    model, optimizer = start(level)
    STATE.loss_scalers[0]._loss_scale = scale
    assert STATE.loss_scalers[0].loss_scale() == STATE.loss_scalers[0]._loss_scale == scale
    assert one_step(model, optimizer, 1.0, 4.0) == scale
    assert model.weight.tolist() == [[0.5, 0.0]]
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_overflow_at_a_scale_that_was_set_is_skipped(level: str) -> None:
    model, optimizer = start(level)
    STATE.loss_scalers[0]._loss_scale = 2**20
    loss = model(torch.tensor([[1.0, 4.0]])).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        model.weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert STATE.loss_scalers[0]._has_overflow
    assert model.weight.tolist() == [[1.0, 2.0]]
    moved = 2.0**19 if level in ("O1", "O2") else 2.0**20
    assert STATE.loss_scalers[0].loss_scale() == moved


def test_scale_that_is_set_may_be_beyond_its_bounds() -> None:
    model, optimizer = start(min_loss_scale=1.0, max_loss_scale=16.0)
    scaler = STATE.loss_scalers[0]
    for scale in (64.0, 0.25):
        scaler._loss_scale = scale
        assert one_step(model, optimizer, 1.0, 1.0) == scale
        assert scaler.loss_scale() == scale
    scaler.update(finite=False)
    assert scaler.loss_scale() == 1.0
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (1.0, 16.0)


def test_scale_that_is_set_between_delayed_passes_is_of_the_next() -> None:
    model, optimizer = start("O2")
    STATE.loss_scalers[0]._loss_scale = 8.0
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    assert optimizer._amp_stash.params_have_scaled_gradients
    STATE.loss_scalers[0]._loss_scale = 4.0
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    assert not optimizer._amp_stash.params_have_scaled_gradients
    assert [master.grad.tolist() for master in amp.master_params(optimizer)] == [[[2.0, 2.0]]]


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), float("nan"), "dynamic", None])
def test_wrong_scale_is_refused_and_changes_nothing(scale: Any) -> None:
    scaler = LossScaler("dynamic")
    with pytest.raises(SettingError, match="_loss_scale must be"):
        scaler._loss_scale = scale
    assert scaler.loss_scale() == 2.0**16


def test_window_that_is_set_is_the_window() -> None:
    model, optimizer = start()
    for scaler in STATE.loss_scalers:
        scaler._loss_scale = 4.0
        scaler._scale_seq_len = 2
    assert [one_step(model, optimizer, 1.0, 1.0) for _ in range(5)] == [4.0, 4.0, 8.0, 8.0, 16.0]
    assert STATE.loss_scalers[0]._unskipped == 1
    STATE.loss_scalers[0]._unskipped = 0
    assert [one_step(model, optimizer, 1.0, 1.0) for _ in range(3)] == [16.0, 16.0, 32.0]


def test_bounds_that_are_set_are_the_bounds() -> None:
    scaler = LossScaler("dynamic", init_scale=4.0, scale_window=1)
    scaler._max_loss_scale = 8.0
    for _ in range(2):
        scaler.update(finite=True)
    assert scaler.loss_scale() == 8.0
    scaler._min_loss_scale = 4.0
    for _ in range(2):
        scaler.update(finite=False)
    assert scaler.loss_scale() == 4.0
    scaler._min_loss_scale = None
    assert scaler._min_loss_scale == 2.0**-14
    scaler.update(finite=False)
    assert scaler.loss_scale() == 2.0
    with pytest.raises(SettingError, match="_scale_seq_len must be a whole number"):
        scaler._scale_seq_len = 0
    above = LossScaler("dynamic")
    above._max_loss_scale = 8.0
    assert (above.loss_scale(), above._max_loss_scale) == (2.0**16, 8.0)


def test_static_scale_has_no_window() -> None:
    scaler = LossScaler(8.0)
    scaler._scale_seq_len = 1
    scaler._unskipped = 5
    scaler.update(finite=True)
    assert (scaler.loss_scale(), scaler._scale_seq_len, scaler._unskipped) == (8.0, None, 0)
    scaler._loss_scale = 4
    assert scaler.loss_scale() == 4.0


def test_loop_that_checks_gradients_itself_moves_the_scale() -> None:
    scaler = LossScaler("dynamic", scale_window=1)
    scaler._has_overflow = True
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 2.0**15
    scaler.clear_overflow_state()
    assert scaler.update_scale() is False
    assert scaler.loss_scale() == 2.0**16
    static = LossScaler(8.0)
    static._has_overflow = True
    assert static.update_scale() is False


def test_attribute_that_does_nothing_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match="_overflow_buf"):
        LossScaler("dynamic")._overflow_buf = torch.zeros(1)  # type: ignore[attr-defined]


# Models that are half already.


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_half_model_is_taken_if_the_state_allows_it(level: str) -> None:
    with pytest.raises(SettingError, match="models must have float32 weights"):
        start(level, torch.float16, cast_model_type=False)
    STATE.allow_incoming_model_not_fp32 = True
    model, optimizer = start(level, torch.float16, cast_model_type=False)
    STATE.loss_scalers[0]._loss_scale = 4.0
    assert model.weight.dtype is torch.float16
    x = torch.tensor([[1.0, 4.0]])
    loss = model(x if level == "O1" else x.half()).float().sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.0]]
    masters = {"O2": torch.float32}.get(level, torch.float16)
    assert [param.dtype for param in amp.master_params(optimizer)] == [masters]


@pytest.mark.parametrize(
    ("level", "overrides", "message"),
    [
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 must be left out with"),
        ("O1", {"master_weights": True}, "master_weights must be left out with opt_level O1"),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions must be left out"),
        ("O1", {"dtype": torch.float16}, "models must have float32 weights"),
    ],
)
def test_hard_override_warns_where_it_would_refuse(
    level: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        start(level, **overrides)
    assert not hasattr(STATE, "opt_properties")
    STATE.hard_override = True
    with pytest.warns(UserWarning, match=message) as caught:
        model, optimizer = start(level, **overrides)
    assert caught[0].filename == __file__
    STATE.loss_scalers[0]._loss_scale = 4.0
    one_step(model, optimizer, 1.0, 4.0)
    assert model.weight.tolist() == [[0.5, 0.0]]


# Masters by the names of Apex.


def test_masters_are_reached_through_the_stash() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level="O2")
    optimizer._amp_lazy_init()  # type: ignore[attr-defined]
    stash: Any = optimizer._amp_stash  # type: ignore[attr-defined]
    assert stash.lazy_init_called
    assert stash.all_fp16_params == [model[0].weight, model[0].bias]
    assert stash.all_fp32_from_fp32_params == [model[1].weight, model[1].bias]
    masters = stash.all_fp32_from_fp16_params
    assert [master.dtype for master in masters] == [torch.float32] * 2
    assert all(map(lambda a, b: a is b, masters, amp.master_params(optimizer)))
    amp.initialize(nn.Linear(1, 1), optimizer, opt_level="O0")
    assert optimizer._amp_stash.all_fp32_from_fp16_params == []  # type: ignore[attr-defined]


def test_gradients_of_masters_can_be_dropped() -> None:
    model, optimizer = start("O2")
    STATE.loss_scalers[0]._loss_scale = 4.0
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    for param in optimizer._amp_stash.all_fp32_from_fp16_params:
        param.grad = None
    for param in model.parameters():
        param.grad = None
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 2.0]]
