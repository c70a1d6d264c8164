"""Ranks that die and come back, and checkpoints that another number of ranks loads.

As a script, `test_restart.py FOLDER RESTARTS`, it trains under the agent of torchrun.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional  # before there is a group: else gloo may abort at the end
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

import gradscale as gs
from gradscale.torch import GradScaler, MixedPrecision, checkpoint

STEPS, EVERY, CUT = 20, 5, 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def part_of_batch(step: int) -> Tensor:
    whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out.float() - x[:, :4]).square().mean()


def elastic(folder: Path, kills: bool) -> None:
    """Trains with DDP; one rank kills itself in the middle of a step, the first time."""
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    # A file for every start: in torchrun's own store (torch 2.13) gloo sometimes finds the
    # addresses of ranks that have died.
    dist.init_process_group("gloo", init_method=f"file://{folder}/{count}", rank=rank, world_size=2)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = gs.Dynamic(init_scale=2.0**10, growth_interval=3)
    mp = MixedPrecision(model, optimizer, "fp16-master", policy=policy)
    wrapped = DistributedDataParallel(model)
    mp.name(wrapped)
    path, first = folder / "run.pt", 0
    losses: list[float] = []
    if path.exists():
        state = checkpoint.load(path)
        mp.load_state_dict(state["mp"])
        first, losses = state["step"], state["losses"]
    for step in range(first, STEPS):
        with mp.autocast():
            loss = loss_of(wrapped, part_of_batch(step))
        mp.backward(loss)
        if kills and step == 12 and rank == 1 and count == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 7 and rank == 0:
            model[0].weight.grad[0, 0] = float("inf")
        outcome = mp.step(clip_norm=1.0)
        assert bool(outcome.applied) == (step != 7)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if (step + 1) % EVERY == 0 and rank == 0:
            checkpoint.save(path, {"mp": mp.state_dict(), "step": step + 1, "losses": losses})
        dist.barrier()
    told = repr((losses, mp.scaler.state_dict(), [p.tolist() for p in model.parameters()]))
    digest = hashlib.sha256(told.encode()).hexdigest()
    (folder / f"{rank}.txt").write_text(digest)
    dist.barrier()
    dist.destroy_process_group()


def check_saves() -> None:
    sharded(load=False)


def check_loads() -> None:
    sharded(load=True)


def sharded(load: bool) -> None:
    """Trains with FSDP2; saves in the middle, or loads what was saved and goes on."""
    from torch.distributed.fsdp import fully_shard  # of torch 2.6

    folder = Path(os.environ["RANKS_FOLDER"])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses, scales = [], []
    for step in range(0, 2 * CUT):
        if step == CUT:
            weights, states = get_state_dict(model, optimizer)
            state: dict[str, Any] = {
                "model": weights,
                "optimizer": states,
                "scaler": scaler,
            }
            if load:
                checkpoint.load_sharded(state, folder / "saved")
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=state["model"],
                    optim_state_dict=state["optimizer"],
                )
            else:
                dcp.save(state, checkpoint_id=folder / "saved")
        if load and step < CUT:  # other batches: what comes of them must not matter
            scaler.backward(loss_of(model, part_of_batch(step + 100)))
            scaler.apply(optimizer)
            continue
        loss = loss_of(model, part_of_batch(step))
        scaler.backward(loss)
        outcome = scaler.apply(optimizer, clip_norm=1.0)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        scales.append(float(outcome.scale))
    if dist.get_rank() == 0:
        told = {"losses": losses[-CUT:], "scales": scales[-CUT:], "after": scaler.get_scale()}
        (folder / f"{dist.get_world_size()}.json").write_text(json.dumps(told))


def torchrun(folder: Path, restarts: int) -> None:
    """Trains under an agent that starts the ranks again so often; dies so often."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",  # torch is imported
    )
    elastic_launch(config, elastic)(folder, restarts > 0)


def test_a_rank_that_is_killed_comes_back(tmp_path: Path) -> None:
    from programs import run_python  # not at the top: the script is this file too

    digests = []
    for restarts in (0, 1):
        folder = tmp_path / str(restarts)
        folder.mkdir()
        done = run_python(__file__, folder, restarts, cwd=Path(__file__).parents[3])
        assert done.returncode == 0, done.stderr[-4000:]
        digests.append([(folder / f"{rank}.txt").read_text() for rank in range(2)])
    assert digests[0] == digests[1]
    assert digests[0][0] == digests[0][1]


def test_another_number_of_ranks_loads_it(tmp_path: Path) -> None:
    import torch_has
    from ranks import run_check

    torch_has.fsdp2_on_the_cpu()
    run_check(__file__, "saves", 4, tmp_path)
    expected = json.loads((tmp_path / "4.json").read_text())
    for world in (2, 1):
        (tmp_path / "loads-store").unlink(missing_ok=True)
        run_check(__file__, "loads", world, tmp_path)
        told = json.loads((tmp_path / f"{world}.json").read_text())
        assert told["scales"] == expected["scales"]
        assert told["after"] == expected["after"]
        # Means over 8 rows in another order, and three steps that divide by eps at most.
        for mine, theirs in zip(told["losses"], expected["losses"], strict=True):
            assert abs(mine - theirs) <= 64 * torch.finfo(torch.float32).eps * max(1.0, theirs)
    assert expected["after"] != 2.0**10  # there was something to load


if __name__ == "__main__":
    torchrun(Path(sys.argv[1]), int(sys.argv[2]))
