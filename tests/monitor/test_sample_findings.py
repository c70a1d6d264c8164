"""Findings from samples: each rule at its threshold, and what must not be taken for an illness."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gradscale.monitor.findings import KINDS
from gradscale.monitor.sample_findings import from_samples
from gradscale.monitor.sample_table import table
from gradscale.monitor.samples import Sample, TensorSample

Facts = dict[str, dict[str, float]]


def grad(
    name: str, low: int = -10, counts: tuple[int, ...] = (100,), **fields: Any
) -> TensorSample:
    """The gradient of a weight."""
    fields = {"numel": sum(counts) + fields.get("zeros", 0), **fields}
    return TensorSample(name, "weight_grad", low=low, counts=counts, **fields)


def sample(
    step: int, *tensors: TensorSample, first: Any = None, **facts: dict[str, float]
) -> Sample:
    """A sample in float16."""
    listed = [(f, where, number) for f, each in facts.items() for where, number in each.items()]
    return Sample(step, "float16", tensors or (grad("a.w"),), first, tuple(listed))


def found(*samples: Sample) -> list[tuple[str, str]]:
    """Kind and place of every finding."""
    findings = from_samples(samples)
    assert all(finding.kind in KINDS and finding.evidence[-1] in ".!" for finding in findings)
    return [(finding.kind, finding.where) for finding in findings]


def test_nothing_is_found_in_healthy_samples() -> None:
    assert found() == []
    assert found(*(sample(n, scale={"": 1024.0}, applied={"": 1.0}) for n in range(10))) == []


@pytest.mark.parametrize(("below", "expected"), [(50, []), (51, [("underflow", "a")])])
def test_underflow_is_more_than_half_of_the_gradients(below: int, expected: Any) -> None:
    tensors = grad("a.w", -15, (below, 100 - below)), grad("b.w"), grad("c.w")
    assert found(*(sample(n, *tensors) for n in range(4))) == expected
    assert found(sample(0, *tensors)) == []  # once may be chance
    skipped = [sample(n, *tensors, applied={"": 0.0}) for n in range(4)]
    assert found(*skipped) == []  # the scale is falling


@pytest.mark.parametrize(("large", "expected"), [(0, [("underflow", "a")]), (20, [])])
def test_small_gradients_beside_large_ones_do_no_harm(large: int, expected: Any) -> None:
    tail = (90,) + (0,) * 9 + (large,) * (large > 0)  # as behind a softmax that is sure
    output = grad("a", -20, tail)._replace(kind="activation_grad")
    tensors = output, grad("a.w"), grad("b.w"), grad("c.w")
    assert found(*(sample(n, *tensors) for n in range(4))) == expected
    lost = output._replace(low=-10, counts=(100,), zeros=900, flushed=900)
    assert found(sample(1, lost, *tensors[1:])) == []


@pytest.mark.parametrize(
    ("format", "kind"), [("float16", "underflow"), ("float32", "dead-gradient")]
)
def test_a_model_whose_gradients_are_all_zero_is_found(format: str, kind: str) -> None:
    zero = grad("a.w", counts=(), zeros=10), grad("b.w", counts=(), zeros=10)
    samples = [sample(n, *zero)._replace(format=format) for n in range(3)]
    assert found(*samples[:2]) == []
    assert found(*samples) == [(kind, "")]
    assert found(sample(0, grad("a.w"), zero[1]), *samples) == []


def test_gradients_in_float32_do_not_underflow() -> None:
    wide = grad("a.w", -18, (100,), format="float32")
    below = grad("b.w", -30, (100,))  # smaller than float16 has: a sum of such numbers
    few = grad("c.w", -18, (10,))
    assert found(*(sample(n, wide, below, few) for n in range(4))) == []


@pytest.mark.parametrize(("flushed", "expected"), [(25, []), (26, [("underflow", "a")])])
def test_zeros_that_a_replay_shows_to_be_made_are_an_underflow(flushed: int, expected: Any) -> None:
    lost = grad("a.w", counts=(100 - flushed,), zeros=50, flushed=flushed)
    assert found(sample(1, lost, grad("b.w", flushed=0), grad("c.w", flushed=0))) == expected


def test_a_gradient_that_is_always_zero_is_dead_from_the_third_sample_on() -> None:
    zero = grad("a.b.w", counts=(), zeros=10), grad("a.c.w", counts=(), zeros=10), grad("d.w")
    assert found(*(sample(n, *zero) for n in (1, 21))) == []
    assert found(*(sample(n, *zero) for n in (1, 11, 21))) == [("dead-gradient", "a")]
    alive = sample(31, grad("a.b.w"), *zero[1:])
    assert found(*(sample(n, *zero) for n in (1, 11, 21)), alive) == [("dead-gradient", "a.c")]
    none = [sample(n, grad("d.w"), no_grad={"d.x": 1.0}) for n in (1, 11, 21)]
    assert found(*none) == [("dead-gradient", "d.x")]
    cancels = [sample(n, grad("d.w"), grad("d.b", counts=(), zeros=4)) for n in (1, 11, 21)]
    assert found(*cancels) == []


def test_a_gradient_that_is_zero_for_a_few_steps_or_while_steps_are_skipped_is_not_dead() -> None:
    zero = grad("a.b.w", counts=(), zeros=10), grad("d.w")
    assert found(*(sample(n, *zero) for n in range(1, 21))) == []
    assert found(*(sample(n, *zero) for n in range(1, 22))) == [("dead-gradient", "a")]
    skipped = sample(1, *zero, applied={"": 0.0})
    assert found(skipped, *(sample(n, *zero) for n in (2, 11, 21))) == []


def test_updates_are_lost_if_steps_were_applied() -> None:
    for share, expected in ((0.5, []), (0.6, [("update-lost", "a.w")])):
        lost = {"update_lost": {"a.w": share, "b.w": 0.1, "c.w": 0.1}}
        assert found(*(sample(n, **lost) for n in range(2))) == expected
        assert found(sample(0, **lost)) == []
        assert found(*(sample(n, applied={"": 0.0}, **lost) for n in range(2))) == []


def test_what_comes_first_explains_the_rest() -> None:
    overflow = ("a", "forward", -1.0, 300.0)
    assert found(sample(1, first=overflow)) == [("forward-overflow", "a")]
    assert found(sample(1, first=overflow, weights_spoilt={"a.w": 1.0})) == []
    data = sample(1, first=("", "forward", math.nan, math.nan), data_nonfinite={"": 1.0})
    assert found(data) == [("data-not-finite", "")]
    harmless = sample(1, data_nonfinite={"": 1.0})  # the model has taken it out
    assert found(harmless) == []
    bad = sample(1, weights_nonfinite={"b.w": 1.0, "c.w": 1.0})
    assert found(bad, bad) == [("weights-not-finite", "b.w")]


def test_the_remedy_of_an_overflow_depends_on_its_inputs() -> None:
    (small,) = from_samples([sample(1, first=("a", "forward", -1.0, 1.0))])
    (large,) = from_samples([sample(1, first=("a", "forward", -1.0, 900.0))])
    (weights,) = from_samples(
        [sample(1, first=("a", "forward", -1.0, 1.0), weights_large={"a.w": 1e9})]
    )
    assert "logarithm of zero" in small.remedy
    assert "logarithm" not in large.remedy
    assert "learning rate" in weights.remedy
    assert "between -1 and 900" in large.evidence


@pytest.mark.parametrize(
    ("first", "infs", "facts", "expected"),
    [
        (("a", "backward", -1.0, 1.0), 0, {}, ("nan-at-any-scale", "a")),
        (("a", "backward", -1.0, 1.0), 9, {}, ("nan-at-any-scale", "a")),
        (("a", "backward", -1.0, 9e4), 9, {}, ("scale-too-high", "a")),
        (("", "backward", math.nan, math.nan), 9, {}, ("scale-too-high", "")),
        (("a", "backward", -1.0, 9e4), 9, {"loss_finite": {"": 0.0}}, ("loss-not-finite", "")),
    ],
)
def test_gradients_that_stay_bad_are_put_down_to_their_cause(
    first: Any, infs: int, facts: Facts, expected: tuple[str, str]
) -> None:
    bad = [sample(n, grad("a.w", infs=infs, nans=5), first=first, **facts) for n in range(5)]
    assert found(*bad) == [expected]
    assert found(*bad[1:]) == []
    assert found(*bad, sample(6)) == []  # the scale has come down


def test_gradients_that_are_left_are_seen_twice() -> None:
    left = [sample(n, leftover={"a.w": 2.0}) for n in range(3)]
    assert found(*left) == [("gradients-not-cleared", "")]
    assert found(left[0]) == []
    assert found(*left[:2], *(sample(n) for n in range(5))) == []


def clipped(norm: float, scale: float, made: float = 1e6) -> list[tuple[str, str]]:
    """What is found if scaled gradients had this norm in the step."""
    facts: Facts = {"scale": {"": scale}, "norm_made": {"": made}, "norm_used": {"": norm}}
    return found(*(sample(n, **facts) for n in range(3)))


@pytest.mark.parametrize("norm", [0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 100.0])
def test_scaled_gradients_of_a_round_norm_were_clipped_too_early(norm: float) -> None:
    assert clipped(norm * (1 + 1e-6), 65536.0) == [("clip-before-unscale", "")]
    assert clipped(norm, 65536.0, made=norm) == []  # they had it before
    assert clipped(norm * 1.01 * math.pi / 3, 65536.0) == []
    assert clipped(norm, 1.0) == []


@pytest.mark.parametrize("binades", [8, 11, 16])
def test_gradients_that_are_clipped_in_the_right_order_are_not_suspected(binades: int) -> None:
    # The norm of the scaled gradients is then that of the unscaled ones times the scale: with 0.25
    # and 256 it is 64, a round number.
    limits = [digits * 10.0**exponent for digits in range(1, 100) for exponent in range(-4, 2)]
    assert [x for x in limits if clipped(x * 2.0**binades, 2.0**binades, made=1e30)] == []


def test_many_places_are_one_finding_of_the_whole_model() -> None:
    small = [grad(f"m{n}.w", -16, (100,)) for n in range(9)]
    assert found(*(sample(n, *small) for n in range(2))) == [("underflow", "")]


def test_the_table_shows_binades_and_shares() -> None:
    tensors = (
        TensorSample("a", "activation", 10, -2, (4, 6)),
        grad("a.w", -15, (10, 0, 30), zeros=60, infs=2),
    )
    lines = table([sample(7, *tensors, scale={"": 1024.0})]).splitlines()
    assert lines[0] == "step 7, float16, scale 1024"
    cells = lines[3].split("  ")
    shown = [cell.strip() for cell in cells if cell.strip()]
    assert shown == [
        "a", "2**-2 .. 2**-1", "16", "2**-15 .. 2**-13", "28", "25.0 %", "60.0 %", "-", "2",
    ]  # fmt: skip
    assert "No iteration" in table([])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((), "underflow"),
        ((grad("a", -24, (100,)),), "underflow"),  # nothing but subnormal
        ((grad("b", -4, (100,)),), "underflow"),  # of a module without weights of its own
        ((grad("a", -4, (100,)),), "dead-gradient"),
    ],
)
def test_zeros_alone_are_underflow_unless_what_they_follow_from_fits(
    output: tuple[TensorSample, ...], expected: str
) -> None:
    zeros = grad("a.w", 0, (), zeros=100, numel=100)
    outputs = [tensor._replace(kind="activation_grad") for tensor in output]
    runs = [sample(n, zeros, *outputs) for n in range(3)]
    assert (expected, "") in found(*runs)
    # Float32 has the last word.
    for flushed, replayed in ((0, "dead-gradient"), (100, "underflow")):
        replay = sample(3, zeros._replace(flushed=flushed), *outputs)
        assert found(*runs, replay).count((replayed, "")) == 1


def test_a_parameter_that_changes_between_samples_is_not_dead() -> None:
    unused = [sample(n, grad("a.w"), no_grad={"b.w": 1.0}) for n in (1, 11, 21)]
    assert found(*unused) == [("dead-gradient", "b")]
    turn = sample(31, grad("a.w"), no_grad={"b.w": 1.0}, trained_between={"b.w": 1.0})
    assert found(*unused, turn) == []


def test_zeros_beside_underflow_are_dead_only_by_a_replay() -> None:
    zero, lost = grad("a.w", 0, (), zeros=100), grad("b.w", -15, (100,))
    runs = [sample(n, zero, lost, grad("c.w"), grad("d.w")) for n in (1, 11, 21)]
    assert found(*runs) == [("underflow", "b")]
    replay = sample(21, zero._replace(flushed=0), lost, grad("c.w"), grad("d.w"))
    assert found(*runs, replay) == [("underflow", "b"), ("dead-gradient", "a")]
    replay = sample(21, zero._replace(flushed=100), lost, grad("c.w"), grad("d.w"))
    assert sorted(found(*runs, replay)) == [("underflow", "a"), ("underflow", "b")]
    none = [sample(n, lost, grad("c.w"), grad("d.w"), no_grad={"a.w": 1.0}) for n in (1, 11, 21)]
    assert found(*none) == [("underflow", "b"), ("dead-gradient", "a")]


def test_zeros_of_a_loss_that_is_not_finite_are_no_underflow() -> None:
    zero = grad("a.w", 0, (), zeros=100)
    for finite, expected in ((0.0, []), (1.0, [("underflow", "")])):
        assert found(*(sample(n, zero, loss_finite={"": finite}) for n in range(3))) == expected


def test_a_model_that_loses_all_is_one_finding() -> None:
    zeros = [grad(f"{name}.w", 0, (), zeros=100, numel=100) for name in "abc"]
    runs = [sample(n, *zeros) for n in range(3)]
    lost = sample(3, *(tensor._replace(flushed=100) for tensor in zeros))
    assert found(*runs) == found(*runs, lost) == [("underflow", "")]
