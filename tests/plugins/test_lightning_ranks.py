"""Lightning on several ranks: DDP and FSDP2, with Trainer and with Fabric.

Warnings are errors on the ranks, but for those in `THEIR_WARNINGS`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

import lightning_runs as runs
from gradscale.plugins.lightning import GradscalePrecision
from lightning_runs import Model, bits, loader, loss_of, network, same, trainer
from ranks import everyone, on_ranks, run_check

KINDS = ["foreach", "fused"]


class OurRanks(ClusterEnvironment):
    """The ranks that this process is one of, in Lightning's terms."""

    creates_processes_externally = True
    main_address = "localhost"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Sharded(Model):
    """The model, sharded by FSDP2, with the verdict on every step."""

    def configure_model(self) -> None:
        if self.device_mesh is not None and not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def data() -> Tensor:
    """Another batch on every rank; a loss that is not finite on rank 1 alone."""
    rank = dist.get_rank()
    return runs.batches(8, bad=4 if rank == 1 else None, seed=rank)


def verdicts_of(model: Any, plugin: GradscalePrecision) -> list[str]:
    """A list that is filled with the verdict on every step of a Trainer."""
    verdicts: list[str] = []
    rates = model.on_train_batch_end

    def note(*args: Any) -> None:
        rates(*args)
        verdicts.append(plugin.scaler.outcome().verdict())

    model.on_train_batch_end = note
    return verdicts


def check_outcome(verdicts: list[str], rates: list[float]) -> None:
    """Fails unless ranks agreed, and the scheduler has followed the steps that were applied."""
    assert everyone((verdicts, rates)) == [(verdicts, rates)] * 2
    # Rank 0 had a finite loss then: that of rank 1 was found because the group is known.
    assert verdicts[4] == "loss not finite"
    assert {"scale too high", "applied"} <= set(verdicts)
    applied = [verdict == "applied" for verdict in verdicts]
    assert rates == [1e-2 * 0.5**count for count in itertools.accumulate(applied)]


def check_ddp() -> None:
    runs.ignore_their_warnings()
    for mode, kind in itertools.product(["16-mixed", "fp16-master"], KINDS):
        plugin, model = GradscalePrecision(mode, policy=runs.POLICY), Model(kind)
        verdicts = verdicts_of(model, plugin)
        strategy = DDPStrategy(cluster_environment=OurRanks(), process_group_backend="gloo")
        trainer(plugin, strategy=strategy, devices=2).fit(model, loader(data()))
        check_outcome(verdicts, model.rates)
        weights = everyone(bits(model.parameters()))
        assert same(*weights)
        assert not same(weights[0], network().to(next(model.parameters()).dtype).parameters())


def check_ddp_accumulates() -> None:
    runs.ignore_their_warnings()
    plugin, model = GradscalePrecision("16-mixed", policy=runs.POLICY), Model("fused")
    strategy = DDPStrategy(cluster_environment=OurRanks(), process_group_backend="gloo")
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer(plugin, strategy=strategy, devices=2, **settings).fit(model, loader(data()))
    assert everyone(model.rates) == [model.rates] * 2
    assert model.rates[3] == model.rates[5]  # batches 4 and 5 made the step that was skipped
    assert same(*everyone(bits(model.parameters())))


def check_fsdp2() -> None:
    runs.ignore_their_warnings()
    folder = everyone(tempfile.mkdtemp())[0]
    for kind in KINDS:
        ends = []
        for epochs, saved in ((2, None), (1, None), (2, os.path.join(folder, kind))):
            strategy = ModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
            )
            plugin, model = GradscalePrecision("16-mixed", policy=runs.POLICY), Sharded(kind)
            verdicts = verdicts_of(model, plugin)
            run = trainer([plugin, OurRanks()], strategy=strategy, devices=2, max_epochs=epochs)
            run.fit(model, loader(data()), ckpt_path=saved)
            if epochs == 1:
                check_outcome(verdicts, model.rates)
                run.save_checkpoint(os.path.join(folder, kind))
            ends.append([param.full_tensor() for param in model.parameters()])
        whole, half, rest = ends
        assert same(whole, rest)
        assert not same(whole, half)


def check_fabric() -> None:
    runs.ignore_their_warnings()
    for mode, kind in (("16-mixed", "fused"), ("fp16-master", "foreach")):
        plugin, net, verdicts, rates = (
            GradscalePrecision(mode, policy=runs.POLICY),
            network(),
            [],
            [],
        )
        run = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[plugin, OurRanks()])
        run.launch()
        model, optimizer = run.setup(net, inner := runs.adamw(net.parameters(), kind))
        plugin.scaler.follow(StepLR(inner, 1, 0.5))
        for batch in data():
            optimizer.zero_grad()
            run.backward(loss_of(model, batch))
            optimizer.step()
            plugin.scaler.flush()
            verdicts.append(plugin.scaler.outcome().verdict())
            rates.append(inner.param_groups[0]["lr"])
        check_outcome(verdicts, rates)
        assert same(*everyone(bits(net.parameters())))


def check_fabric_fsdp2() -> None:
    runs.ignore_their_warnings()
    plugin = GradscalePrecision("16-mixed", policy=runs.POLICY)
    strategy = FabricModelParallel(
        lambda net, mesh: fully_shard(net, mesh=mesh["data_parallel"]),
        data_parallel_size=2,
        tensor_parallel_size=1,
        process_group_backend="gloo",
    )
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin, OurRanks()])
    run.launch()
    model = run.setup(network())
    optimizer = run.setup_optimizers(inner := runs.adamw(model.parameters(), "fused"))
    plugin.scaler.follow(StepLR(inner, 1, 0.5))
    verdicts, rates, culprits = [], [], set()
    for batch in data():
        optimizer.zero_grad()
        run.backward(loss_of(model, batch))
        run.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        plugin.scaler.flush()
        verdicts.append(plugin.scaler.outcome().verdict())
        culprits |= {each.name for each in plugin.scaler.outcome().culprits()}
        rates.append(inner.param_groups[0]["lr"])
    check_outcome(verdicts, rates)
    assert "0.weight" in culprits  # named after it was sharded


@pytest.mark.parametrize(
    ("check", "world"), on_ranks(2, "ddp ddp_accumulates fsdp2 fabric fabric_fsdp2")
)
def test_ranks(check: str, world: int, tmp_path: Path) -> None:
    run_check(__file__, check, world, tmp_path)
