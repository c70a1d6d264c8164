"""Gradients of Gluon trainers: unscaled, accumulated, on several devices, sparse, or left over."""

from __future__ import annotations

import math

import pytest

import gradscale as gs

mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon, nd  # noqa: E402
from mxnet.contrib.amp.amp import bfloat16 as BFLOAT16  # noqa: E402

from gluon_weight import GluonWeight  # noqa: E402
from gradscale.compat import mxnet as amp  # noqa: E402

TOO_LARGE = 2.0**120


def test_unscaled_gradients_can_be_clipped() -> None:
    net = GluonWeight("dynamic")
    net.backward(3.0)
    assert net.gradient == [3.0 * 2**16] * 2
    amp.unscale(net.trainer)
    assert net.gradient == [3.0, 3.0]
    gluon.utils.clip_global_norm(net.weight.list_grad(), math.sqrt(2))
    net.trainer.step(1)
    assert net.value == pytest.approx([-1.0, -1.0], rel=1e-6)


def test_overflow_before_unscale_is_skipped_once() -> None:
    net = GluonWeight("dynamic")
    net.backward(TOO_LARGE)
    amp.unscale(net.trainer)
    net.weight.grad()[:] = 0.0  # what a user's own repair may do: too late
    net.trainer.step(1)
    assert (net.value, net.scaler.loss_scale) == ([0.0, 0.0], 2.0**15)
    assert net.step(1.0)


def test_infinity_that_appears_after_unscale_is_skipped() -> None:
    net = GluonWeight("dynamic")
    net.backward(1.0)
    amp.unscale(net.trainer)
    net.weight.grad()[:] = math.nan
    net.trainer.step(1)
    assert (net.value, net.scaler.outcome.applied) == ([0.0, 0.0], False)


def test_measured_gradients_are_those_before_unscale() -> None:
    net = GluonWeight(gs.Headroom(init_scale=8.0, format="float32"))
    net.backward(3.0)
    amp.unscale(net.trainer)
    net.trainer.step(1)
    assert net.scaler.outcome.amax == 24.0


def test_accumulated_passes_have_one_scale() -> None:
    net = GluonWeight(gs.Dynamic(growth_interval=1), grad_req="add")
    for step in range(1, 4):
        for x in (1.0, 2.0, 5.0):
            net.backward(x)
        net.trainer.step(8)
        net.weight.zero_grad()
        assert net.value == [-float(step)] * 2
    assert net.scaler.loss_scale == 2.0**19


def test_rescale_grad_of_the_optimizer_is_kept() -> None:
    net = GluonWeight("dynamic", optimizer={"rescale_grad": 0.5})
    net.step(1.0)
    net.step(1.0)
    assert net.value == [-1.0, -1.0]


@pytest.mark.parametrize("kvstore", ["device", None])
@pytest.mark.parametrize("xs", [(1.0, TOO_LARGE), (TOO_LARGE, 1.0)])
def test_infinity_on_one_device_is_skipped_on_all(kvstore: str | None, xs: list[float]) -> None:
    devices = [mx.cpu(0), mx.cpu(1)]
    net = GluonWeight("dynamic", devices=devices, kvstore=kvstore, update_on_kvstore=False)
    net.step(*xs)
    assert (net.value, net.scaler.loss_scale) == ([0.0] * 4, 2.0**15)
    net.step(1.0, 2.0)
    assert net.value == ([-3.0] * 4 if kvstore else [-1.0, -1.0, -2.0, -2.0])


def test_gradients_summed_by_hand_are_unscaled_and_updated() -> None:
    net = GluonWeight("dynamic", devices=[mx.cpu(0), mx.cpu(1)], update_on_kvstore=False)
    net.backward(1.0, 2.0)
    net.trainer.allreduce_grads()
    amp.unscale(net.trainer)
    assert net.gradient == [3.0] * 4
    net.trainer.update(1)
    assert net.value == [-3.0] * 4


def test_skipped_gradient_of_an_unused_parameter_is_not_found_again() -> None:
    used, rare = gluon.Parameter("used", shape=(1,)), gluon.Parameter("rare", shape=(1,))
    for param in (used, rare):
        param.initialize(mx.init.Zero())
    trainer = gluon.Trainer([used, rare], "sgd", {"learning_rate": 1.0})
    scaler = amp.init_trainer(trainer, "dynamic")
    for factor in (TOO_LARGE, 0.0, 0.0, 0.0):
        with autograd.record():
            loss = used.data() + rare.data() * factor if factor else used.data() * 1.0
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(1, ignore_stale_grad=True)
    # Once: MXNet's own scaler would find the infinity of `rare` in all four.
    assert scaler.loss_scale == 2.0**15
    assert (used.data().asscalar(), rare.data().asscalar()) == (-3.0, 0.0)


def test_sparse_gradients_are_checked_and_unscaled() -> None:
    embedding = gluon.nn.Embedding(5, 2, sparse_grad=True)
    embedding.initialize(mx.init.Zero())
    trainer = gluon.Trainer(embedding.collect_params(), "sgd", {"learning_rate": 1.0})
    scaler = amp.init_trainer(trainer, gs.Headroom(format="float32", init_scale=2.0**16))
    for factor, unscales in ((1.0, False), (TOO_LARGE, False), (1.0, True)):
        with autograd.record():
            loss = (embedding(nd.array([1, 3])) * factor).sum()
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        if unscales:
            amp.unscale(trainer)
        trainer.step(1)
        assert scaler.outcome is not None
        assert scaler.outcome.applied == (factor == 1.0)
    assert embedding.weight.data().asnumpy()[:, 0].tolist() == [0.0, -2.0, 0.0, -2.0, 0.0]


def test_bfloat16_gradients_are_checked() -> None:
    # MXNet's own check has no kernel for them; its optimizers have none on the CPU either, so that
    # only a skipped step can be run.
    weight = gluon.Parameter("weight", shape=(2,), dtype=BFLOAT16)
    weight.initialize(mx.init.Zero())
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0})
    scaler = amp.init_trainer(trainer, "dynamic")
    with autograd.record():
        loss = (weight.data() * TOO_LARGE).astype("float32").sum()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    assert (scaler.outcome is not None, scaler.loss_scale) == (True, 2.0**15)
    assert weight.data().astype("float32").asnumpy().tolist() == [0.0, 0.0]


def test_parameters_without_gradients_are_passed_over() -> None:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4), gluon.nn.BatchNorm(), gluon.nn.Dense(1))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "adam")
    amp.init_trainer(trainer)  # before shapes are known
    net.hybridize()
    with autograd.record():
        loss = net(nd.ones((3, 2))).sum()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(3)
    outcome = trainer._amp_loss_scaler.outcome
    assert outcome.applied
