"""The scale of a Gluon trainer: one skip and one halving per overflow, and our rules to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest

import gradscale as gs

mx = pytest.importorskip("mxnet")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from mxnet import autograd, nd  # noqa: E402
from mxnet.contrib.amp import amp as mxnet_amp  # noqa: E402
from mxnet.contrib.amp.loss_scaler import LossScaler as MXNetScaler  # noqa: E402

from gluon_weight import GluonWeight  # noqa: E402
from gradscale.compat import mxnet as amp  # noqa: E402

TOO_LARGE = 2.0**113
"""Its product with 2**16 is infinite in float32, and that with 2**14 is not."""

POLICIES = [
    amp.MXNET_POLICY,
    gs.Dynamic(init_scale=2.0**16, growth_interval=2),
    gs.Dynamic(init_scale=2.0**16, growth_interval=3, hysteresis=2, max_scale=2.0**18),
    gs.Headroom(format="float32"),
    gs.LogMax(format="float32"),
    gs.Histogram(format="float32"),
    gs.Static(2.0**12),
    gs.Off(),
]


def skips_and_scale(net: GluonWeight, api: Any) -> tuple[int, float]:
    """Skipped steps, and the scale in the end, where the gradient is once too large for 2**16."""
    applied = []
    for x in (1.0, TOO_LARGE / 2, TOO_LARGE / 2, TOO_LARGE / 2, 1.0):
        net.weight.set_data(nd.zeros((2,)))
        applied.append(net.step(x, api=api))
    return applied.count(False), net.trainer._amp_loss_scaler.loss_scale


def test_overflow_is_skipped_once_and_halves_the_scale_once() -> None:
    assert skips_and_scale(GluonWeight(amp.MXNET_POLICY), amp) == (1, 2.0**15)


def test_mxnets_own_scaler_skips_twice_and_quarters_the_scale() -> None:
    # What the test above would find without us.
    net = GluonWeight()
    net.trainer._amp_loss_scaler = MXNetScaler()
    net.trainer._amp_original_scale = net.trainer._scale
    assert skips_and_scale(net, mxnet_amp) == (2, 2.0**14)


def test_default_policy_has_the_settings_of_mxnets_scaler() -> None:
    theirs, ours = MXNetScaler(), amp.init_trainer(GluonWeight().trainer).policy
    assert ours.init_scale == theirs.loss_scale
    assert ours.max_scale == theirs._max_loss_scale
    assert ours.growth_interval == theirs._scale_seq_len
    assert (ours.growth_factor, ours.backoff_factor) == (2.0, 0.5)


inputs = st.lists(
    st.sampled_from([0.0, 2.0**-10, 1.0, 3.0, 2.0**100, TOO_LARGE, 1.5 * 2.0**120, math.nan]),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(xs=inputs)
@settings(max_examples=40)
def test_trajectory_is_that_of_the_plain_python_policy(policy: Any, xs: list[float]) -> None:
    net, state, skipped = GluonWeight(policy), policy.init(), 0
    for x in xs:
        net.weight.set_data(nd.zeros((2,)))
        scale, product = state.scale, state.scale * x
        finite, loss_finite = product < 2.0**128, not math.isnan(x)
        exponent = math.frexp(product)[1] if finite else 0
        amax = product if finite else math.inf
        stats = gs.GradStats(
            finite=finite,
            amax=amax if policy.goes_by else None,
            loss_finite=loss_finite,
            exponent=exponent,
        )
        state = policy.update(state, stats)
        net.step(x)
        applied = finite and loss_finite
        skipped = 0 if applied else skipped + 1
        assert net.scaler.state == state
        found = net.scaler.outcome
        assert found == (applied, finite, True, loss_finite, scale, stats.amax, skipped)
        assert net.value == ([-x, -x] if applied else [0.0, 0.0])


def test_float16_gradients_overflow_at_their_own_limit() -> None:
    net = GluonWeight(
        gs.Dynamic(init_scale=2.0**14), dtype="float16", optimizer={"multi_precision": True}
    )
    assert not net.step(4.0)  # 2**16 is infinite in float16
    assert net.step(4.0)
    assert net.step(4.0)
    assert net.scaler.loss_scale == 2.0**13
    assert net.value == [-8.0, -8.0]


def test_float16_loss_is_scaled_in_float32() -> None:
    net = GluonWeight(amp.MXNET_POLICY, dtype="float16")
    with autograd.record(), amp.scale_loss(nd.array([2.0], dtype="float16"), net.trainer) as scaled:
        assert scaled.asscalar() == 2.0**17  # above the largest float16 number


def test_weights_are_those_of_training_without_a_scale_on_the_applied_steps() -> None:
    # The batch size is a power of two: MXNet hands 1 / (scale * batch size) to its kernels in
    # decimal digits, which it reads with an error of up to one unit in the last place.
    options: dict[str, Any] = {"momentum": 0.9, "wd": 0.01, "learning_rate": 0.1}
    scaled = GluonWeight(gs.Dynamic(init_scale=2.0**16, growth_interval=3), optimizer=options)
    plain = GluonWeight(gs.Off(), optimizer=options)
    for x in [1.0, 0.3, 2.0**120, 2.0**120, 2.0**120, -0.7, 5.5, 1 / 3]:
        if abs(x) < 2.0**120:
            assert plain.step(x, batch_size=4)
        assert scaled.step(x, batch_size=4) == (abs(x) < 2.0**120)
        assert scaled.value == plain.value
    assert scaled.scaler.loss_scale == 2.0**14


def test_skipped_step_does_not_advance_the_learning_rate_schedule() -> None:
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
    net = GluonWeight(amp.MXNET_POLICY, optimizer={"lr_scheduler": schedule})
    for x in (1.0, TOO_LARGE, TOO_LARGE):
        net.step(x)
    assert net.trainer.optimizer.num_update == 1


def test_loss_that_is_not_finite_is_skipped_and_leaves_the_scale() -> None:
    net = GluonWeight(amp.MXNET_POLICY)
    net.step(1.0)
    before = net.scaler.state
    net.step(math.inf)  # 0 * inf
    assert not net.scaler.outcome.applied
    assert net.scaler.state == before


def test_gradients_that_do_not_fit_are_skipped_and_do_not_lower_the_scale() -> None:
    net = GluonWeight(gs.Dynamic(init_scale=2.0**-14))
    with autograd.record():
        # Two factors: their product is above float32, and a 2**14th part of it is not.
        (loss,) = net.losses([2.0**120])
        with amp.scale_loss(loss, net.trainer) as scaled:
            autograd.backward(scaled * 2.0**20)
    net.trainer.step(1)
    assert net.scaler.outcome[:4] == (False, True, False, True)
    assert (net.value, net.scaler.loss_scale) == ([0.0, 0.0], 2.0**-14)


def test_each_trainer_has_its_own_scale() -> None:
    one, other = GluonWeight("dynamic"), GluonWeight(gs.Dynamic(init_scale=8.0, growth_interval=1))
    for x in (TOO_LARGE, 1.0):
        # Both passes come before both steps, as where two networks play against each other.
        one.backward(x)
        other.backward(1.0)
        one.trainer.step(1)
        other.trainer.step(1)
    assert (one.scaler.loss_scale, other.scaler.loss_scale) == (2.0**15, 32.0)
    assert (one.value, other.value) == ([-1.0, -1.0], [-2.0, -2.0])


def test_checkpoint_continues_the_run() -> None:
    policy = gs.Dynamic(growth_interval=3)
    whole, first, second = (GluonWeight(policy) for _ in range(3))
    steps = [TOO_LARGE, 1.0, 1.0, TOO_LARGE, 1.0, 1.0, 1.0, 1.0]
    for x in steps:
        whole.step(x)
    for x in steps[:3]:
        first.step(x)
    second.scaler.load_state_dict(first.scaler.state_dict())
    for x in steps[3:]:
        second.step(x)
    assert second.scaler.state == whole.scaler.state
    assert second.scaler.state_dict() == whole.scaler.state_dict()  # with all counts


def test_checkpoint_of_torch_is_read() -> None:
    scaler = amp.LossScaler(gs.Dynamic())
    torch_state = {"scale": 256.0, "growth_factor": 2.0, "backoff_factor": 0.5}
    torch_state |= {"growth_interval": 2000, "_growth_tracker": 7}
    scaler.load_state_dict(torch_state)
    assert scaler.state == gs.DynamicState(256.0, 7, 0)
    patient = amp.LossScaler(gs.Dynamic(hysteresis=3))
    patient.load_state_dict({"scale": 8.0, "growth_tracker": 0, "hysteresis_tracker": 1})
    assert patient.state == gs.DynamicState(8.0, 0, 2)
    with pytest.raises(gs.StateError, match="lacks"):
        scaler.load_state_dict({"scale": 1.0})
    assert scaler.loss_scale == 256.0
