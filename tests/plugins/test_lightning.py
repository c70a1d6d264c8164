"""Lightning's Trainer: what a run with the plugin does, compared with loops written by hand."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import gradscale as gs
import lightning_runs as runs
from gradscale.errors import SettingError, StateError
from gradscale.plugins.lightning import GradscalePrecision
from gradscale.torch import GradScaler, MixedPrecision
from lightning_runs import (
    POLICY,
    Model,
    batches,
    bits,
    by_hand,
    by_trainer,
    loader,
    loss_of,
    network,
    same,
    trainer,
)

torch.set_num_threads(1)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in runs.THEIR_WARNINGS]

MODES = ["16-mixed", "bf16-mixed", "fp16-master", "bf16-master", "fp16-pure"]


class Watcher(Callback):
    """Reads the gradients before every step, so that they must be unscaled by then."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, _: Any, model: Any, optimizer: Any) -> None:
        grads = [param.grad for param in model.parameters()]
        self.norms.append(float(torch.stack([grad.float().norm() for grad in grads]).norm()))


@pytest.mark.parametrize("kind", ["foreach", "fused", "own"])
@pytest.mark.parametrize("mode", MODES)
def test_run_is_that_of_a_loop_by_hand(mode: str, kind: str) -> None:
    ours = by_trainer(mode, kind)
    assert ours.agrees(by_hand(mode, kind))
    assert "loss not finite" in ours.verdicts
    assert ours.verdicts.count("applied") >= 2
    # A skipped step has moved no scheduler: the rate is halved once for every applied one.
    assert ours.rates[-1] == 1e-2 * 0.5 ** ours.verdicts.count("applied")
    if mode == "16-mixed":
        assert "scale too high" in ours.verdicts


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.5), ("value", 0.01)])
@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master"])
def test_clipping_and_accumulation(
    mode: str, algorithm: str, limit: float, accumulate: int, kind: str
) -> None:
    ours = by_trainer(
        mode,
        kind,
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=accumulate,
    )
    limits = {f"clip_{algorithm}": limit}
    assert ours.agrees(by_hand(mode, kind, accumulate, **limits))
    assert len(ours.verdicts) == 8 // accumulate
    assert not ours.agrees(by_hand(mode, kind, accumulate))  # it does clip


def torch_loop(kind: str, algorithm: str, limit: float) -> tuple[list[Tensor], list[float]]:
    """Weights and gradient norms of `Model` in torch's loop with our scaler."""
    net = network()
    optimizer = runs.adamw(net.parameters(), kind)
    scaler = GradScaler("cpu", policy=POLICY)
    scheduler, norms = StepLR(optimizer, 1, 0.5), []
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(net, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(float(torch.stack([param.grad.norm() for param in net.parameters()]).norm()))
        if algorithm == "norm":
            scaler.clip_grad_norm_(optimizer, limit)
        else:
            nn.utils.clip_grad_value_(net.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()
        if scaler.outcome().applied:
            scheduler.step()
    return bits(net.parameters()), norms


@pytest.mark.parametrize("kind", ["foreach", "fused", "own"])
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.5), ("value", 0.01)])
def test_hooks_see_unscaled_gradients(algorithm: str, limit: float, kind: str) -> None:
    plugin, model, watcher = GradscalePrecision(policy=POLICY), Model(kind), Watcher()
    trainer(
        plugin,
        callbacks=[watcher],
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
    ).fit(model, loader(batches()))
    weights, norms = torch_loop(kind, algorithm, limit)
    assert list(map(str, watcher.norms)) == list(map(str, norms))  # as text, because NaN != NaN
    assert same(model.parameters(), weights)


# Manual optimization.


class Pair(Model):
    """Two networks with an optimizer and a scheduler each, stepped by hand."""

    def __init__(self, kind: str, joint: bool) -> None:
        super().__init__(kind)
        self.other = network()
        self.joint = joint
        self.automatic_optimization = False
        self.verdicts: list[str] = []

    def configure_optimizers(self) -> Any:
        optimizers = [runs.adamw(net.parameters(), self.kind) for net in (self.net, self.other)]
        return optimizers, [StepLR(each, 1, 0.5) for each in optimizers]

    def training_step(self, batch: Tensor) -> None:
        scaler = self.trainer.precision_plugin.scaler
        (first, second), (slow, fast) = self.optimizers(), self.lr_schedulers()
        first.zero_grad()
        second.zero_grad()
        if self.joint:  # one backward pass for both
            self.manual_backward(loss_of(self.net, batch) + loss_of(self.other, batch))
        else:
            self.manual_backward(loss_of(self.net, batch))
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        slow.step()
        self.verdicts.append(scaler.outcome().verdict())
        if not self.joint:  # through weights that were stepped just now
            self.manual_backward(loss_of(self.other, batch) * loss_of(self.net, batch))
            self.clip_gradients(second, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        second.step()
        fast.step()
        self.verdicts.append(scaler.outcome().verdict())


def pair_by_hand(mode: str, kind: str, joint: bool) -> tuple[list[Tensor], list[str]]:
    """Weights and verdicts of `Pair` in torch's loop."""
    net, other = network(), network()
    first, second = (runs.adamw(each.parameters(), kind) for each in (net, other))
    mp = MixedPrecision([net, other], [first, second], runs.OURS.get(mode, mode), policy=POLICY)
    scaler, verdicts = mp.scaler, []
    slow, fast = StepLR(first, 1, 0.5), StepLR(second, 1, 0.5)

    for batch in batches():
        first.zero_grad()
        second.zero_grad()
        with mp.autocast():
            loss = loss_of(net, batch) + (loss_of(other, batch) if joint else 0.0)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(first, 0.5)
        scaler.step(first)
        scaler.update()
        verdicts.append(scaler.outcome().verdict())
        if verdicts[-1] == "applied":
            slow.step()
        if not joint:
            with mp.autocast():
                loss = loss_of(other, batch) * loss_of(net, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(second)
            nn.utils.clip_grad_value_(other.parameters(), 0.01)
        scaler.step(second)
        scaler.update()
        verdicts.append(scaler.outcome().verdict())
        if verdicts[-1] == "applied":
            fast.step()
    return bits([*net.parameters(), *other.parameters()]), verdicts


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master"])
def test_manual_optimization_with_two_optimizers(mode: str, joint: bool, kind: str) -> None:
    model = Pair(kind, joint)
    trainer(GradscalePrecision(mode, policy=POLICY)).fit(model, loader(batches()))
    weights, verdicts = pair_by_hand(mode, kind, joint)
    assert model.verdicts == verdicts
    assert {"applied", "scale too high", "loss not finite"} <= set(verdicts)
    assert same([*model.net.parameters(), *model.other.parameters()], weights)


# Checkpoints.


@pytest.mark.parametrize("kind", ["fused", "own"])
@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master", "fp16-pure"])
def test_resumed_run_is_the_whole_one(mode: str, kind: str, tmp_path: Path) -> None:
    data = loader(batches())

    def plugin() -> GradscalePrecision:
        return GradscalePrecision(mode, policy=POLICY)

    whole, half, rest = Model(kind), Model(kind), Model(kind)
    kept = plugin()
    trainer(kept, max_epochs=2).fit(whole, data)
    first = trainer(plugin())
    first.fit(half, data)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = plugin()
    with torch.no_grad():
        for param in rest.parameters():
            param.zero_()
    trainer(resumed, max_epochs=2).fit(rest, data, ckpt_path=tmp_path / "half.ckpt")
    assert half.rates + rest.rates == whole.rates
    assert not same(half.parameters(), whole.parameters())
    assert same(rest.parameters(), whole.parameters())
    exact = [
        each.float32_model_state(net).values() for each, net in ((resumed, rest), (kept, whole))
    ]
    assert same(*exact)
    assert resumed.scaler.state_dict() == kept.scaler.state_dict()


def test_checkpoint_of_another_mode_is_refused(tmp_path: Path) -> None:
    first = trainer(GradscalePrecision("16-mixed"))
    first.fit(Model(), loader(batches(2, None)))
    first.save_checkpoint(tmp_path / "run.ckpt")
    other = trainer(GradscalePrecision("fp16-master"), max_epochs=2)
    with pytest.raises(StateError, match=r"in the mode 'fp16', but this run uses 'fp16-master'"):
        other.fit(Model(), loader(batches(2, None)), ckpt_path=tmp_path / "run.ckpt")
    with pytest.raises(
        StateError, match=r"not a state of GradscalePrecision: its keys are \['scale'\]"
    ):
        GradscalePrecision().load_state_dict({"scale": 1.0})


def test_checkpoint_of_lightnings_own_plugin_gives_the_scale() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    theirs.scale(torch.ones(()))
    plugin = GradscalePrecision(policy=gs.Headroom())
    plugin.on_load_checkpoint({"MixedPrecision": theirs.state_dict()})
    assert plugin.scaler.get_scale() == 2.0**9
    assert isinstance(plugin.scaler.policy, gs.Headroom)


def test_policy_can_be_a_name() -> None:
    assert GradscalePrecision(policy="dynamic").scaler.policy == gs.Dynamic()
    plugin = GradscalePrecision("bf16-mixed", policy="headroom")
    assert plugin.scaler.policy == gs.Headroom(format="bfloat16")


# One model in several runs.


@pytest.mark.parametrize("kind", ["foreach", "own"])
@pytest.mark.parametrize("mode", ["fp16-master", "fp16-pure"])
def test_second_fit_goes_on_with_the_masters(mode: str, kind: str) -> None:
    model, plugin = Model(kind), GradscalePrecision(mode)
    run = trainer(plugin)
    run.test(model, loader(batches(1, None)), verbose=False)
    begin = bits(network().parameters())
    assert {param.dtype for param in model.parameters()} == {torch.float16, torch.float32}
    run.fit(model, loader(batches(4, None)))
    exact = plugin.float32_model_state(model.net)
    assert not same(exact.values(), begin)
    seen: list[Any] = []

    class Start(Callback):
        def on_train_start(self, _: Any, model: Any) -> None:
            seen.extend(bits(plugin.float32_model_state(model.net).values()))

    run.callbacks.append(Start())
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(batches(4, None)))
    assert same(seen, exact.values())
    rounded = [value.half().float() for value in exact.values()]
    assert not same(seen, rounded)


def test_masters_begin_as_the_weights_were_before_the_cast() -> None:
    model, plugin, seen = Model(), GradscalePrecision("fp16-master"), []

    class Start(Callback):
        def on_train_start(self, _: Any, model: Any) -> None:
            seen.append(bits(plugin.float32_model_state(model.net).values()))

    run = trainer(plugin, callbacks=[Start()])
    run.test(model, loader(batches(1, None)), verbose=False)
    run.fit(model, loader(batches(2, None)))
    assert same(seen[0], network().parameters())


@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master"])
def test_next_run_releases_the_last_one(mode: str) -> None:
    plugin, optimizers = GradscalePrecision(mode), []
    for _ in range(2):
        run = trainer(plugin)
        run.fit(Model("fused"), loader(batches()))
        optimizers.append(weakref.ref(run.optimizers[0]))
        del run
        gc.collect()
    assert optimizers[0]() is None
    assert optimizers[1]() is not None  # kept for float32_model_state()


def test_what_is_loaded_between_two_runs_counts() -> None:
    model, fresh = Model(), Model()
    run = trainer(GradscalePrecision("fp16-master"))
    run.test(model, loader(batches(1, None)), verbose=False)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    fresh.load_state_dict(model.state_dict())
    run.fit(model, loader(batches(2, None)))
    trainer(GradscalePrecision("fp16-master")).fit(fresh, loader(batches(2, None)))
    assert same(model.parameters(), fresh.parameters())


def test_model_of_another_format_is_refused() -> None:
    model = Model()
    trainer(GradscalePrecision("fp16-master")).fit(model, loader(batches(1, None)))
    with pytest.raises(
        SettingError, match=r"already cast to torch.float16, but the mode is 'bf16-"
    ):
        trainer(GradscalePrecision("bf16-master")).fit(model, loader(batches(1, None)))
    trainer(GradscalePrecision("fp16-master")).fit(model, loader(batches(1, None)))


# Schedulers.


def test_scheduler_of_epochs_moves_unless_all_of_an_epoch_was_skipped() -> None:
    good, bad = Model(interval="epoch"), Model(interval="epoch")
    trainer(GradscalePrecision(), max_epochs=2).fit(good, loader(batches(2, 1)))
    assert good.rates == [0.01, 0.005, 0.005, 0.0025]  # although the last step was skipped
    trainer(GradscalePrecision(), max_epochs=2).fit(bad, loader(batches(1, 0)))
    assert bad.rates == [0.01, 0.01]


# What is refused, and what is left out.


def test_step_without_a_loss_is_left_out() -> None:
    class Sometimes(Model):
        def training_step(self, batch: Tensor) -> Any:
            return None if self.trainer.global_step == 1 else loss_of(self.net, batch)

    model, plugin = Sometimes(), GradscalePrecision()
    with pytest.warns(UserWarning, match="`training_step` returned `None`"):
        trainer(plugin, gradient_clip_val=1.0).fit(model, loader(batches(3, None)))
    net = network()
    optimizer = runs.adamw(net.parameters(), "foreach")
    mp = MixedPrecision(net, optimizer, "fp16")
    schedule = StepLR(optimizer, 1, 0.5)
    for number, batch in enumerate(batches(3, None)):
        if number != 1:
            with mp.autocast():
                loss = loss_of(net, batch)
            mp.backward(loss)
            mp.step(clip_norm=1.0)
        schedule.step()  # as Lightning does, without a step too
    assert same(model.parameters(), net.parameters())


def test_run_without_an_optimizer_evaluates() -> None:
    class Frozen(Model):
        seen = 0

        def configure_optimizers(self) -> None:
            return None

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen += 1

    model = Frozen()
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        trainer(GradscalePrecision()).fit(model, loader(batches(2, None)))
    assert model.seen == 2
    assert same(model.parameters(), network().parameters())


def test_lbfgs_is_refused() -> None:
    class Quasi(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(SettingError, match="LBFGS evaluates the loss many times"):
        trainer(GradscalePrecision()).fit(Quasi(), loader(batches(1, None)))


def test_weight_in_two_optimizers_is_refused_with_masters() -> None:
    class Twice(Pair):
        def configure_optimizers(self) -> Any:
            return [runs.adamw(self.parameters(), "foreach") for _ in range(2)]

    with pytest.raises(SettingError, match="A parameter is in two optimizers"):
        trainer(GradscalePrecision("fp16-master")).fit(Twice("foreach", True), loader(batches()))


def test_modes() -> None:
    with pytest.raises(SettingError, match=r"mode must be one of fp32, bf16, .*got '16-true'"):
        GradscalePrecision("16-true")
    assert GradscalePrecision("fp16-pure").precision == "16-true"
    plugin = GradscalePrecision("16-mixed", policy=gs.Static(init_scale=8.0), on_stuck="raise")
    assert trainer(plugin).precision == "16-mixed"
    assert plugin.scaler.get_scale() == 8.0
    with pytest.raises(ValueError, match="Choose one"):
        trainer(plugin, precision="16-mixed")


def test_model_is_named() -> None:
    model, plugin = Model(), GradscalePrecision()
    trainer(plugin).fit(model, loader(batches(1, 0)))
    names = {culprit.name for culprit in plugin.scaler.outcome().culprits()}
    assert "net.0.weight" in names
    assert [event for _, _, event in plugin.scaler.history] == ["skip"]
