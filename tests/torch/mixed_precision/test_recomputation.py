"""MixedPrecision(retries=n): a lone spike is computed again, and moves no scale."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradscale as gs
from gradscale.errors import SettingError
from gradscale.torch import MixedPrecision
from gradscale.torch.grads import dispatch as kernels
from gradscale.torch.optim import AdamW
from gradscale.torch.state import plain
from gradscale.torch.step.spike import DROP
from precision_runs import built, data, loss_of, net, picture
from ranks import everyone, on_ranks, run_check
from tensors import same

torch.set_num_threads(1)
POLICIES = [gs.Headroom(), gs.Headroom(spikes="skip"), gs.Dynamic(), gs.LogMax(), gs.Histogram()]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)
SPIKE = 2.0**12


def taken(model: Any, mp: MixedPrecision, factor: float = 1.0, **how: Any) -> Any:
    """The outcome of a batch whose loss is multiplied by `factor`."""
    return mp.run(lambda: loss_of(model, data()) * factor, **how)


def steady(mode: str = "fp16", steps: int = 20, **settings: Any) -> tuple[Any, MixedPrecision]:
    """A run without spikes so far, at a scale that leaves no room for one."""
    model, mp = built(mode, **{"retries": 2, **settings})
    for _ in range(steps):
        assert taken(model, mp).applied
    if isinstance(settings.get("policy"), gs.Dynamic):
        mp.scaler.update(2.0**14)
        mp._recomputation.drop = DROP  # the first scale may have been too high
    return model, mp


def states(mp: MixedPrecision) -> Any:
    """The state of the policy in plain numbers, for every loss."""
    state = mp.scaler._state
    return {key: plain(one) for key, one in {0: state.live, **state.losses}.items()}


# The training that this is for.


class Ended(NamedTuple):
    """How a training ended."""

    main: float
    small: float
    skipped: int
    scale: float
    """log2 of the scale, the mean over all steps."""
    recomputed: float


def train(mode: str, height: float = SPIKE, seed: int = 0, **settings: Any) -> Ended:
    """A training with a small head: one batch in 50 has gradients that are `height` as large."""
    torch.manual_seed(seed)
    heads = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)) for _ in range(2)]
    params = [param for head in heads for param in head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=5e-3, eps=1e-25)
    mp = MixedPrecision(heads, optimizer, mode, **settings)
    generator, scales, skipped = torch.Generator().manual_seed(seed + 1), [], 0
    weights = torch.randn(8, 2, generator=generator)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, 8, generator=generator)
        return x, torch.tanh(x @ weights / 2)

    def losses(x: Tensor, y: Tensor) -> list[Tensor]:
        return [(head(x).float()[:, 0] - y[:, i]).square().mean() for i, head in enumerate(heads)]

    for step in range(300):
        x, y = batch(64)
        factor = height if step % 50 == 40 else 1.0
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 300)
        scales.append(math.log2(mp.scaler.get_scale()))

        def loss(x: Tensor = x, y: Tensor = y, factor: float = factor) -> Tensor:
            main, small = losses(x, y)
            return (main + 2.0**-28 * small) * factor

        outcome = mp.run(loss, clip_norm=1.0, retries=None if "retries" in settings else 0)
        skipped += not outcome.applied
    with torch.no_grad():
        main, small = map(float, losses(*batch(2000)))
    return Ended(main, small, skipped, sum(scales) / 300, mp.recomputed)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_training_with_spikes_is_that_of_float32(seed: int) -> None:
    exact = train("fp32", seed=seed)
    again = train("fp16", seed=seed, retries=2)
    # What float16 costs without spikes.
    calm = train("fp16", 1.0, seed)
    noise = abs(calm.small / train("fp32", 1.0, seed).small - 1)
    assert again.main == pytest.approx(exact.main, rel=0.01)
    assert again.small == pytest.approx(exact.small, rel=2 * noise + 0.02)
    assert again.skipped == 0
    assert again.recomputed == 6 / 300
    assert abs(again.scale - calm.scale) <= 1


def test_training_with_spikes_is_not_that_of_float32_without_retries() -> None:
    exact, fit, skip = (
        train("fp32"), train("fp16"), train("fp16", policy=gs.Headroom(spikes="skip"))
    )  # fmt: skip
    assert fit.small > 1.5 * exact.small
    assert 0 < fit.skipped < skip.skipped == 6
    assert skip.scale >= fit.scale + 6


# What the policy sees.


@every_policy
@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])
def test_lone_spike_costs_a_second_try_and_moves_nothing(mode: str, policy: Any) -> None:
    model, mp = steady(mode, policy=policy)
    before, tries, share = states(mp), mp.retries, mp.recomputed
    outcome = taken(model, mp, 2.0**14)
    assert outcome.applied
    assert 1 <= len(outcome.earlier) == mp.retries - tries <= 2
    assert float(outcome.scale) < before[0].scale == float(outcome.earlier[0].scale)
    assert states(mp) == before
    # The next one needs no search.
    taken(model, mp)
    assert len(taken(model, mp, 2.0**14).earlier) == 1
    assert mp.recomputed == (20 * share + 2) / 23


def test_step_of_a_spike_is_the_one_that_a_lower_scale_takes() -> None:
    runs, scale = [], 2.0**14
    for spiked in (True, False):
        model, mp = steady(policy=gs.Dynamic())
        mp.scaler.update(scale)
        outcome = taken(model, mp, SPIKE, clip_norm=1.0)
        assert outcome.applied
        assert bool(outcome.earlier) == spiked
        scale = float(outcome.scale)
        runs.append(picture(mp))
    assert same(*runs)


def test_large_spike_after_a_small_one_is_recomputed() -> None:
    model, mp = steady(policy=gs.Dynamic())
    mp._recomputation.drop = 3  # what the small one took
    outcome = taken(model, mp, SPIKE)
    assert outcome.applied
    assert [float(each.scale) for each in outcome.earlier] == [2.0**14, 2.0**11]
    assert float(outcome.scale) == 2.0 ** (14 - 16)
    assert mp.scaler.get_scale() == 2.0**14


def test_second_spike_in_a_row_is_no_lone_one() -> None:
    model, mp = steady(policy=gs.Dynamic())
    taken(model, mp, SPIKE)
    assert mp.scaler.get_scale() == 2.0**14
    outcome = taken(model, mp, SPIKE)
    assert len(outcome.earlier) == 2
    assert mp.scaler.get_scale() == 2.0 ** (14 - (2 if outcome.applied else 3))


@every_policy
def test_overflow_that_persists_is_seen_as_often_as_it_was_tried(policy: Any) -> None:
    found = []
    for retries in (2, None):
        model, mp = steady(policy=policy, retries=retries, on_stuck="ignore")
        model.wide.weight.register_hook(lambda grad: grad * math.inf)
        before = states(mp)[0].scale
        outcome = taken(model, mp)
        assert (outcome.applied, len(outcome.earlier)) == (False, 2)
        found.append(states(mp)[0])
        assert found[-1].scale < before
    assert found[0] == found[1]


def test_first_batch_is_no_lone_spike() -> None:
    model, mp = built("fp16", policy=gs.Headroom(init_scale=2.0**40), retries=2)
    outcome = taken(model, mp)
    assert (bool(outcome.applied), len(outcome.earlier)) == (True, 1)
    assert mp.scaler.get_scale() < 2.0**40


def test_share_of_recomputed_batches_is_bounded() -> None:
    # This policy grows into every overflow.
    model, mp = steady(steps=1, policy=gs.Dynamic(growth_interval=1), on_stuck="ignore")
    steps, skipped = 200, 0
    for step in range(steps):
        skipped += not taken(model, mp, 2.0**20 if step % 3 == 0 else 1.0).applied
    assert skipped > 10
    assert 4 < mp.recomputed * (steps + 1) <= (steps + 1) / 17 + 4
    # Those that are asked for in the call are not.
    for _ in range(10):
        taken(model, mp, retries=3)
        assert taken(model, mp, 2.0**20, retries=3).earlier


def test_retries_of_zero_are_none() -> None:
    model, mp = steady(retries=0)
    assert not taken(model, mp, SPIKE).applied
    assert mp.recomputed == 0


@pytest.mark.parametrize("retries", [-1, 1.5, True, "2"])
def test_wrong_number_of_retries_is_refused(retries: Any) -> None:
    with pytest.raises(SettingError, match=f"retries must be a whole number >= 0, got {retries!r}"):
        built("fp16", retries=retries)


FACTORS = (1.0, SPIKE * 8, 1.0, SPIKE * 8, SPIKE * 8, 1.0, 2.0**100)


def walked(policy: Any) -> list[Any]:
    """The tries and the states of a run with a lone spike, two in a row, and one for ever."""
    model, mp = built("fp16", policy=policy, retries=2, on_stuck="ignore")
    found: list[Any] = []

    def both(factor: float) -> Tensor:
        mp.scaler.backward(loss_of(model, data(16, 3)), loss_id="other")
        return loss_of(model, data()) * factor

    for factor in FACTORS:
        outcome = mp.run(lambda factor=factor: both(factor))
        found.append([float(one.scale) for one in (*outcome.earlier, outcome)])
        found.append((bool(outcome.applied), states(mp)))
    return found


def test_states_on_a_device_are_kept_and_put_back_as_numbers_are() -> None:
    policy = gs.Headroom()
    numbers = walked(policy)
    assert [len(tries) > 1 for tries in numbers[::2]] == [factor > 1 for factor in FACTORS]
    with kernels.use("triton"):
        assert walked(policy) == numbers


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "fp16-pure"])
def test_lone_spike_on_a_gpu_moves_nothing(mode: str) -> None:
    model = net().cuda()
    mp = MixedPrecision(model, AdamW(model.parameters(), lr=1e-2), mode, retries=2)
    batch = tuple(part.cuda() for part in data())
    for _ in range(20):
        assert mp.run(lambda: loss_of(model, batch)).applied
    before = states(mp)
    outcome = mp.run(lambda: loss_of(model, batch) * 2.0**14)
    assert outcome.applied
    assert outcome.earlier
    assert states(mp) == before
    outcome = mp.run(lambda: loss_of(model, batch))
    assert (float(outcome.scale), outcome.earlier) == (before[0].scale, ())


# Together with other features.


def test_error_in_a_second_try_leaves_the_scale_to_the_policy() -> None:
    model, mp = steady(policy=gs.Dynamic())
    tries = []

    def closure() -> Tensor:
        tries.append(mp.scaler.get_scale())
        if len(tries) == 2:
            raise KeyError("out of memory, perhaps")
        return loss_of(model, data()) * SPIKE

    with pytest.raises(KeyError):
        mp.run(closure)
    assert tries == [2.0**14, 2.0**6]
    assert mp.scaler.get_scale() == 2.0**13
    assert taken(model, mp).applied


def test_whole_window_of_a_spike_is_computed_again() -> None:
    model, mp = steady()
    before = states(mp)

    def parts() -> Iterator[Tensor]:
        return (loss_of(model, data(8, i)) * (SPIKE * 8 if i == 2 else 1.0) for i in range(4))

    count = int(model.norm.num_batches_tracked)
    outcome = mp.run(parts, accumulate=4)
    assert outcome.applied
    assert outcome.earlier
    assert states(mp) == before
    assert model.norm.num_batches_tracked == count + 4


def test_droppable_micro_batch_is_left_out_and_not_computed_again() -> None:
    model, mp = steady()

    def parts() -> Iterator[Tensor]:
        return (loss_of(model, data(8, i)) * (SPIKE * 8 if i == 2 else 1.0) for i in range(4))

    outcome = mp.run(parts, accumulate=4, drop="micro")
    assert (bool(outcome.applied), int(outcome.dropped), outcome.earlier) == (True, 1, ())


def test_scales_of_other_losses_are_as_before_a_spike() -> None:
    model, mp = steady(steps=0, policy=gs.Headroom())

    def both(factor: float) -> Tensor:
        mp.scaler.backward(loss_of(model, data(16, 3)) * factor, loss_id="other")
        return loss_of(model, data())

    for _ in range(20):
        assert mp.run(lambda: both(1.0)).applied
    before = states(mp)
    assert set(before) == {0, "other"}
    outcome = mp.run(lambda: both(2.0**14))
    assert outcome.applied
    assert outcome.earlier
    assert states(mp) == before


def test_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped() -> None:
    model, mp = steady()
    taken(model, mp, SPIKE)
    saved = copy.deepcopy(mp.state_dict())
    ends = []
    for _ in range(2):
        for factor in (1.0, SPIKE, SPIKE, 1.0):
            torch.manual_seed(5)
            taken(model, mp, factor)
        ends.append([*picture(mp), torch.tensor([mp.retries, mp.recomputed, *states(mp)[0]])])
        model, mp = built("fp16", retries=2)
        mp.load_state_dict(saved)
    assert same(*ends)
    del saved["recomputation"]  # written by an earlier version
    mp.load_state_dict(saved)
    assert (mp.retries, mp.recomputed) == (saved["retries"], 0.0)


def test_copy_of_a_run_has_the_credit_of_the_run() -> None:
    model, mp = steady()
    taken(model, mp, SPIKE)
    other = copy.deepcopy(mp)
    assert other._recomputation.numbers() == mp._recomputation.numbers()
    assert taken(other.models[0], other).applied
    assert other._recomputation._scaler is other.scaler


@pytest.mark.parametrize(
    ("way", "backend"),
    [("copy", "reference"), ("checkpoint", "reference"), ("checkpoint", "triton")],
)
def test_first_batch_after_a_checkpoint_may_be_a_spike(way: str, backend: str) -> None:
    def run(mp: MixedPrecision, factor: float) -> Any:
        [model] = mp.models

        def both() -> Tensor:
            mp.scaler.backward(loss_of(model, data(16, 3)), loss_id="other")
            return loss_of(model, data()) * factor

        return mp.run(both)

    def spike(mp: MixedPrecision) -> tuple[list[float], Any, list[Tensor]]:
        torch.manual_seed(5)
        outcome = run(mp, 2.0**14)
        assert outcome.applied
        assert outcome.earlier
        return [float(one.scale) for one in (*outcome.earlier, outcome)], states(mp), picture(mp)

    with kernels.use(backend):
        _, mp = steady(policy=gs.Headroom(), steps=1)
        run(mp, 1.0)
        if way == "copy":
            other = copy.deepcopy(mp)
        else:
            _, other = built("fp16", policy=gs.Headroom(), retries=2)
            other.load_state_dict(copy.deepcopy(mp.state_dict()))
        *numbers, weights = spike(other)
        *expected, theirs = spike(mp)
    assert numbers == expected
    assert same(weights, theirs)


# On ranks.


def check_spike() -> None:
    """Raises if ranks do not compute the same batches again at the same scales."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mp = MixedPrecision(wrapped, optimizer, "fp16", retries=2)
    tries, scales = [], []
    for step in range(12):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        # A spike of one rank alone.
        factor = 2.0**13 if step in (5, 8) and rank == 1 else 1.0

        def loss(x: Tensor = x, factor: float = factor) -> Tensor:
            return (wrapped(x).float() - 1.0).square().mean() * factor

        outcome = mp.run(loss, clip_norm=1.0)
        assert outcome.applied, (step, outcome.earlier, outcome)
        tries.append([float(one.scale) for one in (*outcome.earlier, outcome)])
        scales.append(mp.scaler.get_scale())
    assert [len(each) > 1 for each in tries] == [step in (5, 8) for step in range(12)]
    assert scales[5] == scales[4]
    found = everyone((tries, scales, [param.tolist() for param in model.parameters()]))
    assert found[0] == found[1]


@pytest.mark.parametrize(("check", "world"), on_ranks(2, "spike"))
def test_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)


class Slow(torch.optim.AdamW):
    """Keeps the device busy after every step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        torch.cuda._sleep(2**31)  # about a second
        return result


@pytest.mark.gpu
def test_a_try_is_read_before_its_step_is_done() -> None:
    model = nn.Linear(8, 8, device="cuda")
    mp = MixedPrecision(model, Slow(model.parameters(), fused=True), "fp16", retries=2)
    x = torch.ones(4, 8, device="cuda")
    outcomes = []
    for factor in (1.0, 1.0, SPIKE, 1.0):
        outcomes.append(mp.run(lambda factor=factor: model(x).square().mean() * factor))
        done = torch.cuda.Event()
        done.record()
        if factor == 1.0:  # else it was measured how large the spike was
            assert not done.query()
    torch.cuda.synchronize()
    assert [bool(each.applied) for each in outcomes] == [True] * 4
    assert [len(each.earlier) > 0 for each in outcomes] == [False, False, True, False]
    assert not any(bool(each.applied) for each in outcomes[2].earlier)
