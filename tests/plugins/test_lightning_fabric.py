"""Lightning's Fabric: what a loop with the plugin does, compared with loops written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim.lr_scheduler import StepLR

import gradscale as gs
import lightning_runs as runs
from gradscale.errors import CallOrderError, StateError
from gradscale.plugins.lightning import GradscalePrecision
from gradscale.torch import MixedPrecision
from lightning_runs import batches, bits, loss_of, network, same

torch.set_num_threads(1)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in runs.THEIR_WARNINGS]


def fabric(plugin: GradscalePrecision) -> Fabric:
    """Fabric on the CPU."""
    return Fabric(accelerator="cpu", devices=1, plugins=plugin)


def clip(run: Fabric, model: Any, optimizer: Any, how: str) -> None:
    """Clips gradients as `how` says."""
    if how == "norm":
        run.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
    elif how == "value":
        run.clip_gradients(model, optimizer, clip_val=0.01)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("how", ["", "norm", "value"])
@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master"])
def test_run_is_that_of_a_loop_by_hand(mode: str, how: str, kind: str) -> None:
    plugin = GradscalePrecision(mode, policy=runs.POLICY)
    run, net = fabric(plugin), network()
    scheduler = StepLR(optimizer := runs.adamw(net.parameters(), kind), 1, 0.5)
    model, optimizer = run.setup(net, optimizer)
    plugin.scaler.follow(scheduler)
    verdicts = []
    for batch in batches():
        optimizer.zero_grad()
        run.backward(loss_of(model, batch))
        clip(run, model, optimizer, how)
        optimizer.step()
        verdicts.append(plugin.scaler.outcome().verdict())
    plugin.scaler.flush()

    other = network()
    theirs = runs.adamw(other.parameters(), kind)
    mp = MixedPrecision(other, theirs, runs.OURS.get(mode, mode), policy=runs.POLICY)
    schedule, expected = StepLR(theirs, 1, 0.5), []
    for batch in batches():
        theirs.zero_grad()
        with mp.autocast():
            output = other(batch).float()
        mp.backward(nn.functional.mse_loss(output, batch.sum(1, keepdim=True)))
        if how:
            mp.scaler.unscale_(theirs)
        if how == "norm":
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        elif how == "value":
            nn.utils.clip_grad_value_(other.parameters(), 0.01)
        mp.scaler.step(theirs)
        mp.scaler.update()
        expected.append(mp.scaler.outcome().verdict())
        if expected[-1] == "applied":
            schedule.step()
    assert verdicts == expected
    assert {"applied", "scale too high", "loss not finite"} <= set(verdicts)
    assert same(net.parameters(), other.parameters())
    exact = plugin.float32_model_state(net).values(), mp.float32_model_state().values()
    assert same(*exact)
    assert scheduler.last_epoch == schedule.last_epoch == verdicts.count("applied")


@pytest.mark.parametrize("kind", ["fused", "own"])
@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master", "fp16-pure"])
def test_resumed_run_is_the_whole_one(mode: str, kind: str, tmp_path: Path) -> None:
    def train(data: Any, saved: Path | None = None, to: Path | None = None) -> tuple[Any, Any]:
        plugin = GradscalePrecision(mode, policy=runs.POLICY)
        run, net = fabric(plugin), network()
        model, optimizer = run.setup(net, runs.adamw(net.parameters(), kind))
        state = {"model": model, "optimizer": optimizer, "precision": plugin}
        if saved is not None:
            plugin.watch(optimizer)
            run.load(saved, state)
        for batch in data:
            optimizer.zero_grad()
            run.backward(loss_of(model, batch))
            optimizer.step()
        if to is not None:
            run.save(to, state)
        return bits(plugin.float32_model_state(net).values()), plugin.scaler.get_scale()

    data = batches()
    half = train(data[:3], to=tmp_path / "half.ckpt")
    whole = train(data)
    rest = train(data[3:], saved=tmp_path / "half.ckpt")
    assert same(rest[0], whole[0])
    assert not same(half[0], whole[0])
    assert rest[1] == whole[1]


def test_masters_that_were_rounded_by_loading_are_an_error(tmp_path: Path) -> None:
    def setup() -> tuple[Any, ...]:
        run, net = fabric(GradscalePrecision("fp16-master")), network()
        return run, *run.setup(net, runs.adamw(net.parameters(), "foreach"))

    run, model, optimizer = setup()
    run.backward(loss_of(model, batches()[0]))
    optimizer.step()
    run.save(tmp_path / "run.ckpt", {"optimizer": optimizer})
    run, model, optimizer = setup()
    run.load(tmp_path / "run.ckpt", {"optimizer": optimizer})
    run.backward(loss_of(model, batches()[0]))
    with pytest.raises(StateError, match=r"Call precision.watch\(optimizer\) before fabric.load"):
        optimizer.step()


def test_two_models_with_accumulation_in_one_scale() -> None:
    policy = gs.Static(init_scale=2.0**8)
    plugin = GradscalePrecision("fp16-master", policy=policy)
    run, nets = fabric(plugin), [network(), network()]
    pairs = [run.setup(net, runs.adamw(net.parameters(), "foreach")) for net in nets]
    for first, second in batches(4, None).unflatten(0, (2, 2)):
        for model, _ in pairs:
            run.backward(loss_of(model, first) / 2)
            run.backward(loss_of(model, second) / 2)
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
    other = network()
    theirs = runs.adamw(other.parameters(), "foreach")
    mp = MixedPrecision(other, theirs, "fp16-master", policy=policy)
    for window in batches(4, None).unflatten(0, (2, 2)):
        with mp.accumulate(2):
            for batch in window:
                with mp.autocast():
                    mp.backward(loss_of(other, batch))
        mp.step()
    for net in nets:
        assert same(net.parameters(), other.parameters())


def test_closure_is_evaluated_with_one_scale() -> None:
    plugin = GradscalePrecision("16-mixed")
    run, net = fabric(plugin), network()
    model, optimizer = run.setup(net, torch.optim.LBFGS(net.parameters(), max_iter=4))
    data, losses = batches(1, None)[0], []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, data)
        run.backward(loss)
        losses.append(loss.item())
        return loss

    before = loss_of(network(), data).item()
    returned = optimizer.step(closure)
    assert len(losses) > 1
    assert returned.item() == losses[0]
    assert abs(losses[0] - before) < 0.01 * before  # a float16 forward pass: 2**-11 an operation
    assert losses[-1] < losses[0] / 2
    assert plugin.scaler.outcome().applied


def test_outputs_are_float32_and_names_are_known() -> None:
    plugin = GradscalePrecision("bf16-mixed")
    run, net = fabric(plugin), network()
    with pytest.raises(CallOrderError, match=r"Call fabric.setup\(model\) first"):
        run.autocast()
    model, optimizer = run.setup(net, runs.adamw(net.parameters(), "foreach"))
    bad = batches(1, 0)[0]
    assert model(bad).dtype is torch.float32
    with run.autocast():
        assert net(bad).dtype is torch.bfloat16
    run.backward(loss_of(model, bad))
    optimizer.step()
    assert "0.weight" in {culprit.name for culprit in plugin.scaler.outcome().culprits()}
