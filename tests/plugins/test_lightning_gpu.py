"""Lightning's Trainer on a GPU, where results of steps come late."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")

from torch.optim.lr_scheduler import StepLR

import lightning_runs as runs
from gradscale.plugins.lightning import GradscalePrecision
from lightning_runs import Model, batches, bits, by_hand, by_trainer, loader, same, trainer

pytestmark = [
    pytest.mark.gpu,
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in runs.THEIR_WARNINGS),
]


@pytest.mark.parametrize("kind", ["foreach", "fused", "own"])
@pytest.mark.parametrize("mode", ["16-mixed", "fp16-master", "fp16-pure"])
def test_run_is_that_of_a_loop_by_hand(mode: str, kind: str) -> None:
    ours = by_trainer(mode, kind, accelerator="gpu", gradient_clip_val=0.5)
    theirs = by_hand(mode, kind, device="cuda", clip_norm=0.5)
    assert same(ours.weights, theirs.weights)
    assert same(ours.exact, theirs.exact)
    assert ours.verdicts == theirs.verdicts


@pytest.mark.parametrize("kind", ["foreach", "fused", "own"])
def test_scheduler_follows_without_being_asked(kind: str) -> None:
    plugin, model = GradscalePrecision("fp16-master", policy=runs.POLICY), Model(kind)
    run = trainer(plugin, accelerator="gpu", gradient_clip_val=0.5)
    run.fit(model, loader(batches()))
    theirs = by_hand("fp16-master", kind, device="cuda", clip_norm=0.5)
    assert same(bits(model.parameters()), theirs.weights)  # with the rates of the steps
    scheduler = run.lr_scheduler_configs[0].scheduler
    assert isinstance(scheduler, StepLR)
    assert scheduler.last_epoch == theirs.verdicts.count("applied")
