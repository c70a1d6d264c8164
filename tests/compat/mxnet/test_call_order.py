"""Calls in the wrong order, or with what cannot work, are errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

import gradscale as gs

mx = pytest.importorskip("mxnet")

from mxnet import autograd, nd  # noqa: E402
from mxnet.contrib.amp.loss_scaler import LossScaler as MXNetScaler  # noqa: E402

from gluon_weight import GluonWeight  # noqa: E402
from gradscale.compat import mxnet as amp  # noqa: E402


@pytest.fixture
def net() -> GluonWeight:
    return GluonWeight("dynamic")


def test_trainer_without_init_trainer_is_an_error() -> None:
    net = GluonWeight()
    with pytest.raises(gs.CallOrderError, match=r"scale_loss\(\).*no scaler.*init_trainer"):
        net.backward(1.0)
    with pytest.raises(gs.CallOrderError, match=r"unscale\(\).*no scaler.*init_trainer"):
        amp.unscale(net.trainer)


def test_trainer_with_mxnets_scaler_is_an_error() -> None:
    net = GluonWeight()
    net.trainer._amp_loss_scaler = MXNetScaler()
    with pytest.raises(gs.CallOrderError, match="MXNet's own scaler"):
        net.backward(1.0)


def test_step_without_a_scaled_loss_is_an_error(net: GluonWeight) -> None:
    with autograd.record():
        (loss,) = net.losses([1.0])
    loss.backward()
    with pytest.raises(gs.CallOrderError, match="without scale_loss"):
        net.trainer.step(1)
    assert net.value == [0.0, 0.0]


def test_second_step_of_the_same_gradients_is_an_error(net: GluonWeight) -> None:
    for x in (1.0, 2.0**120):  # applied, skipped
        net.step(x)
        value, scale = net.value, net.scaler.loss_scale
        with pytest.raises(gs.CallOrderError, match="without scale_loss"):
            net.trainer.step(1)
        assert (net.value, net.scaler.loss_scale) == (value, scale)


def test_scale_loss_outside_of_record_is_an_error(net: GluonWeight) -> None:
    with autograd.record():
        (loss,) = net.losses([1.0])
    with (
        pytest.raises(gs.CallOrderError, match=r"outside of autograd\.record"),
        amp.scale_loss(loss, net.trainer),
    ):
        pass


def test_unscale_without_a_scaled_loss_is_an_error(net: GluonWeight) -> None:
    with pytest.raises(gs.CallOrderError, match="no loss was scaled"):
        amp.unscale(net.trainer)
    net.step(1.0)
    with pytest.raises(gs.CallOrderError, match="no loss was scaled"):
        amp.unscale(net.trainer)


def test_second_unscale_is_an_error(net: GluonWeight) -> None:
    net.backward(3.0)
    amp.unscale(net.trainer)
    with pytest.raises(
        gs.CallOrderError, match=r"unscale\(\) was called, but it was already called since"
    ):
        amp.unscale(net.trainer)
    assert net.gradient == [3.0, 3.0]
    net.trainer.step(1)
    assert net.value == [-3.0, -3.0]


def test_pass_that_would_add_to_unscaled_gradients_is_an_error() -> None:
    net = GluonWeight("dynamic", grad_req="add")
    net.backward(1.0)
    amp.unscale(net.trainer)
    with pytest.raises(gs.CallOrderError, match="added to unscaled"):
        net.backward(1.0)


def test_pass_that_replaces_unscaled_gradients_begins_anew(net: GluonWeight) -> None:
    net.backward(1.0)
    amp.unscale(net.trainer)
    assert net.step(5.0)
    assert net.value == [-5.0, -5.0]


@pytest.mark.parametrize("call", [amp.init_trainer, amp.unscale])
def test_what_is_no_trainer_is_a_type_error(call: Any) -> None:
    with pytest.raises(TypeError, match=r"needs a mxnet\.gluon\.Trainer, got SGD"):
        call(mx.optimizer.SGD())


def test_what_is_no_policy_is_an_error() -> None:
    with pytest.raises(gs.SettingError, match="policy must be a policy"):
        GluonWeight(2.0**16)


def test_update_on_the_kvstore_is_an_error_before_anything_is_updated() -> None:
    # The default of MXNet for several devices. Its own AMP applies infinite gradients there.
    net = GluonWeight("dynamic", devices=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(gs.SettingError, match="update_on_kvstore=False"):
        net.backward(1.0, 1.0)
    assert net.value == [0.0] * 4


def test_second_init_trainer_begins_anew() -> None:
    net = GluonWeight(gs.Dynamic(init_scale=4.0))
    net.step(1.0)
    scaler = amp.init_trainer(net.trainer, gs.Dynamic(init_scale=64.0))
    assert net.step(1.0)
    # MXNet's own would divide by the first scale for ever.
    assert (net.value, scaler.outcome.scale if scaler.outcome else None) == ([-2.0, -2.0], 64.0)


def test_no_gradients_leave_the_scale_and_the_message_to_mxnet() -> None:
    net = GluonWeight(gs.Dynamic(growth_interval=1))
    with autograd.record(), amp.scale_loss(nd.array([1.0]), net.trainer):
        pass
    with pytest.raises(UserWarning, match="has not been updated"):
        net.trainer.step(1)
    assert net.scaler.loss_scale == 2.0**16
