"""Accelerate with our scaler: the same to the bit as a loop written by hand, skipped or not."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, GradScalerKwargs
from torch import Tensor, nn, optim

import gradscale as gs
from accelerate_runs import (
    BAD,
    STEPS,
    Run,
    batches,
    clip,
    decay,
    loss_of,
    net,
    optimizer_of,
    reset,
    same,
)
from gradscale.errors import CallOrderError, SettingError
from gradscale.plugins.accelerate import GradscaleOptimizer, use_gradscale
from gradscale.torch import GradScaler


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    reset()
    yield
    reset()


def by_hand(kind: str, accumulate: int, clips: str, device: str = "cpu") -> list[Any]:
    """The same training in a loop with our scaler; its state, the scaler's, and the skips."""
    model = net().to(device)
    optimizer = optimizer_of(model, kind)
    scheduler = decay(optimizer)
    scaler = GradScaler(device, init_scale=2.0**10, growth_interval=3)
    skipped = []
    for number, batch in enumerate(each.to(device) for each in batches()):
        with torch.autocast(device, dtype=torch.float16):
            outputs = model(batch)
        scaler.scale(loss_of(outputs, batch, number) / accumulate).backward()
        if (number + 1) % accumulate:
            continue
        if clips:
            scaler.unscale_(optimizer)
            clip(clips, model.parameters(), nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_)
        scaler.step(optimizer)
        scaler.update()
        if scaler.outcome().applied:
            scheduler.step()
        else:
            skipped.append(number)
        optimizer.zero_grad()
    state = [*model.parameters(), optimizer.state_dict(), scheduler.state_dict()]
    return [*state, scaler.state_dict(), skipped]


CASES = [
    # optimizer, precision, batches a step, clipping, whether prepare() comes first
    ("fused", "fp16", 1, "", False),
    ("fused", "fp16", 2, "norm", True),
    ("fused", "no", 1, "value", False),
    ("fused", "no", 2, "", True),
    ("foreach", "fp16", 1, "value", True),
    ("foreach", "fp16", 2, "", False),
    ("foreach", "no", 1, "norm", True),
    ("foreach", "no", 2, "norm", False),
    ("ours", "fp16", 1, "norm", False),
    ("ours", "fp16", 2, "", True),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("kind", "precision", "accumulate", "clips", "late"), CASES)
def test_training_equals_a_loop_by_hand(
    kind: str, precision: str, accumulate: int, clips: str, late: bool, device: str
) -> None:
    run = Run(kind, precision, accumulate, late, device)
    for number, batch in enumerate(batches()):
        run.step(number, batch.to(device), clips)
    wanted = by_hand(kind, accumulate, clips, device)
    assert same([*run.state(), run.scaler.state_dict(), run.skipped], wanted)
    assert len(run.skipped) == 1  # the planted one
    assert run.scheduler.scheduler.last_epoch == STEPS // accumulate - 1
    other = by_hand(kind, accumulate, "norm" if clips != "norm" else "value", device)
    assert not same(wanted, other)  # so clipping does something, and the comparison can fail


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["fused", "foreach", "ours"])
def test_skipped_step_moves_nothing(kind: str, device: str) -> None:
    run = Run(kind, device=device)
    assert not run.optimizer.step_was_skipped  # before the first
    data = [each.to(device) for each in batches()]
    for number in range(BAD):
        run.step(number, data[number])
    before = run.state()
    run.step(BAD, data[BAD], "norm")
    assert run.optimizer.step_was_skipped is True
    assert run.accelerator.optimizer_step_was_skipped
    assert same(run.state(), before)
    run.step(BAD + 1, data[BAD + 1], "norm")
    assert run.optimizer.step_was_skipped is False
    assert not same(run.state(), before)


def test_step_that_is_undone_after_it_was_called_was_skipped() -> None:
    run = Run("lbfgs")
    batch, numbers = batches()[0], iter((0, BAD, 0, 0, 0, 0, 0))

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = loss_of(run.model(batch), batch, next(numbers))
        run.accelerator.backward(loss)
        return loss

    before = run.state()
    run.optimizer.step(closure)
    run.scheduler.step()
    assert run.optimizer.step_was_skipped is True
    after = run.state()
    assert same(after[:4], before[:4])
    assert after[-1] == before[-1]
    run.optimizer.step(closure)
    run.scheduler.step()  # which warns if `optimizer.step` is not the one it was made with
    assert run.optimizer.step_was_skipped is False
    assert run.scheduler.scheduler.last_epoch == 1


def test_skip_inside_of_the_optimizer_is_seen() -> None:
    def skip_of(accelerator: Accelerator) -> bool:
        model = net()
        _, optimizer = accelerator.prepare(model, optimizer_of(model, "fused"))
        accelerator.backward(loss_of(model(batches()[BAD]), batches()[BAD], BAD))
        optimizer.step()
        assert same(list(model.parameters()), list(net().parameters()))
        return optimizer.step_was_skipped

    # The defect: fused optimizers skip inside of a step() that Accelerate has seen.
    theirs = Accelerator(cpu=True, mixed_precision="fp16")
    theirs.scaler, theirs.native_amp = torch.amp.GradScaler("cpu"), True
    assert skip_of(theirs) is False
    reset()
    ours = Accelerator(cpu=True, mixed_precision="fp16")
    use_gradscale(ours)
    assert skip_of(ours) is True


@pytest.mark.parametrize("late", [False, True])
def test_scheduler_can_follow_the_scaler(late: bool) -> None:
    run = Run(late=late)
    scheduler = decay(run.optimizer.optimizer)  # after prepare()
    run.scaler.follow(scheduler)
    for number, batch in enumerate(batches()):
        run.accelerator.backward(loss_of(run.model(batch), batch, number))
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.scaler.flush()
    assert scheduler.last_epoch == STEPS - 1


def test_prepared_optimizer_pickles() -> None:
    run = Run()
    run.step(0, batches()[0])
    run.optimizer.optimizer.__dict__.pop("step")  # of the scheduler, which no pickle can hold
    other = pickle.loads(pickle.dumps(run.optimizer))
    assert type(other) is GradscaleOptimizer
    assert same(other.state_dict(), run.optimizer.state_dict())


def test_checkpoint_resumes_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init_scale": 2.0**16, "growth_interval": 2000}
    policy = {**settings, "policy": gs.Headroom(memory=3)}
    whole = Run(**policy)
    for number, batch in enumerate(batches()):
        if number == BAD + 1:
            whole.accelerator.save_state(str(tmp_path))
        whole.step(number, batch, "norm")
    for late in (False, True):
        resumed = Run(late=late, **policy)
        resumed.accelerator.load_state(str(tmp_path))
        assert resumed.scaler.state_dict() != whole.scaler.state_dict()
        for number in range(BAD + 1, STEPS):
            resumed.step(number, batches()[number], "norm")
        assert same(resumed.state(), whole.state())
        assert resumed.scaler.state_dict() == whole.scaler.state_dict()


def test_checkpoint_with_torchs_scaler_loads(tmp_path: Path) -> None:
    run = Run()
    run.step(0, batches()[0])
    run.accelerator.save_state(str(tmp_path))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    torch.save(theirs.state_dict(), tmp_path / "scaler.pt")
    run.accelerator.load_state(str(tmp_path))
    assert run.scaler.get_scale() == 2.0**7


def two_optimizers(accelerator: Accelerator) -> tuple[Any, Any, list[Any]]:
    """A model, prepared, with an optimizer for each of its layers."""
    model = net()
    several = [optim.SGD(model[place].parameters(), lr=0.1, momentum=0.9) for place in (0, 2)]
    model, *optimizers = accelerator.prepare(model, *several)
    return model, several, optimizers


def test_optimizers_of_one_backward_pass_are_one_step_of_the_scale() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    scaler = use_gradscale(accelerator, init_scale=2.0**10, growth_interval=3)
    model, _, optimizers = two_optimizers(accelerator)
    scales, skips = [], []
    for number, batch in enumerate(batches()):
        accelerator.backward(loss_of(model(batch), batch, number))
        for layer in (model[0], model[2]):  # a second call, which Accelerate's own refuses
            accelerator.clip_grad_norm_(layer.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
        skips.append([each.step_was_skipped for each in optimizers])
    once = [10, 10, 11, 11, 10, 10, 10, 11]  # grown with the third, halved with the fifth
    assert scales == [2.0**each for each in once]
    assert skips == [[number == BAD] * 2 for number in range(STEPS)]


def test_losses_in_turn_with_an_optimizer_each() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    use_gradscale(accelerator, init_scale=2.0**10)
    model, inner, optimizers = two_optimizers(accelerator)
    reference = net()
    ours = [optim.SGD(reference[place].parameters(), lr=0.1, momentum=0.9) for place in (0, 2)]
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for number, batch in enumerate(batches()):
        for turn in (0, 1):
            accelerator.backward(loss_of(model(batch), batch, number + turn))
            accelerator.clip_grad_norm_(model[2 * turn].parameters(), 1.0)
            optimizers[turn].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = reference(batch)
            scaler.scale(loss_of(outputs, batch, number + turn)).backward()
            scaler.unscale_(ours[turn])
            nn.utils.clip_grad_norm_(reference[2 * turn].parameters(), 1.0)
            scaler.step(ours[turn])
            scaler.update()
            assert optimizers[turn].step_was_skipped == (number + turn == BAD)
            for each in ours:
                each.zero_grad()
    assert same(list(model.parameters()), list(reference.parameters()))
    assert accelerator.scaler.state_dict() == scaler.state_dict()
    assert inner[0] is optimizers[0].optimizer


@pytest.mark.parametrize("late", [False, True])
def test_model_runs_in_float16_and_has_names(late: bool) -> None:
    run = Run(late=late)
    seen = []
    run.model[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    batch = batches()[0]
    assert run.model(batch).dtype is torch.float32
    assert seen == [torch.float16]
    run.step(BAD, batch)
    culprits = run.scaler.outcome().culprits()
    assert {each.name for each in culprits} <= {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert culprits
    bare = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    bare(batch)
    assert seen[1:] == [torch.float16, torch.float32]


def test_settings_of_accelerates_handler_hold() -> None:
    def scaler_of(**settings: Any) -> GradScaler:
        reset()
        handler = GradScalerKwargs(init_scale=2.0**5, growth_interval=7)
        return use_gradscale(Accelerator(cpu=True, kwargs_handlers=[handler]), **settings)

    assert scaler_of().get_scale() == 2.0**5
    assert scaler_of(init_scale=8.0).policy == gs.Dynamic(
        init_scale=8.0, growth_interval=7, exact=False
    )
    with pytest.raises(SettingError, match="Pass either policy or torch's settings"):
        scaler_of(policy=gs.Headroom())
    assert isinstance(scaler_of(policy="dynamic").policy, gs.Dynamic)


def test_policy_can_be_a_name() -> None:
    scaler = use_gradscale(Accelerator(cpu=True, mixed_precision="bf16"), policy="headroom")
    assert scaler.policy == gs.Headroom(format="bfloat16")
    reset()
    with pytest.raises(SettingError, match=r"one of the names headroom, .*got 'best'"):
        use_gradscale(Accelerator(cpu=True), policy="best")


def test_bfloat16_is_the_format_where_accelerate_uses_it() -> None:
    scaler = use_gradscale(Accelerator(cpu=True, mixed_precision="bf16"), policy=gs.Static(4.0))
    assert scaler._state.format.name == "bfloat16"


def test_second_call_replaces_the_first() -> None:
    run = Run()
    run.step(0, batches()[0])
    second = use_gradscale(run.accelerator, policy=gs.Static(2.0))
    run.step(1, batches()[1])
    assert run.accelerator.scaler is run.optimizer.scaler is second
    assert second.outcome().scale == 2.0


def test_second_call_is_refused_while_gradients_wait() -> None:
    run = Run()
    batch = batches()[0]
    run.accelerator.backward(loss_of(run.forward(batch), batch, 0))
    with pytest.raises(
        CallOrderError, match="gradients of the previous scaler have not been used in a step"
    ):
        use_gradscale(run.accelerator, policy=gs.Static(2.0))
    assert run.accelerator.scaler is run.scaler
    run.optimizer.zero_grad()
    use_gradscale(run.accelerator, policy=gs.Static(2.0))


def test_unscaling_after_the_step_is_refused_as_by_torch() -> None:
    run = Run()
    batch = batches()[0]
    run.accelerator.backward(loss_of(run.forward(batch), batch, 0))
    run.scaler.step(run.optimizer.optimizer)
    with pytest.raises(CallOrderError, match=r"unscale_\(\) was called after step\(\)"):
        run.accelerator.unscale_gradients()


def test_disabled_scaler_steps_plainly() -> None:
    run = Run(enabled=False)
    run.step(0, batches()[0], "norm")
    assert run.skipped == []
    assert run.scaler.get_scale() == 1.0


def test_refusals_name_the_cause_and_change_nothing() -> None:
    with pytest.raises(SettingError, match=r"takes an Accelerator, got Linear\. For a Trainer"):
        use_gradscale(nn.Linear(1, 1))  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(SettingError, match="DeepSpeed scales losses itself"):
        use_gradscale(accelerator)
    assert accelerator.scaler is None
