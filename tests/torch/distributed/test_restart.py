"""Ranks that die and come back, and checkpoints that another number of ranks loads.

As a script under torchrun, `test_restart.py FOLDER WHAT`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
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
    rank = dist.get_rank()
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
        if kills and step == 12 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
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


def sharded(folder: Path, load: bool) -> None:
    """Trains with FSDP2; saves in the middle, or loads what was saved and goes on."""
    from torch.distributed.fsdp import fully_shard  # of torch 2.6

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


def torchrun(folder: Path, what: str, world: int, restarts: int = 0) -> None:
    """Runs `what` on so many ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, *launch, f"--max-restarts={restarts}", __file__, str(folder), what]
    env = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_rank_that_is_killed_comes_back(tmp_path: Path) -> None:
    digests = []
    for what, restarts in (("elastic", 0), ("elastic-kills", 1)):
        folder = tmp_path / what
        folder.mkdir()
        torchrun(folder, what, 2, restarts)
        digests.append([(folder / f"{rank}.txt").read_text() for rank in range(2)])
    assert digests[0] == digests[1]
    assert digests[0][0] == digests[0][1]


def test_another_number_of_ranks_loads_it(tmp_path: Path) -> None:
    import torch_has  # not at the top: the ranks run this file as a script

    torch_has.fsdp2_on_the_cpu()
    torchrun(tmp_path, "sharded", 4)
    expected = json.loads((tmp_path / "4.json").read_text())
    for world in (2, 1):
        torchrun(tmp_path, "sharded-load", world)
        told = json.loads((tmp_path / f"{world}.json").read_text())
        assert told["scales"] == expected["scales"]
        assert told["after"] == expected["after"]
        # Means over 8 rows in another order, and three steps that divide by eps at most.
        for mine, theirs in zip(told["losses"], expected["losses"], strict=True):
            assert abs(mine - theirs) <= 64 * torch.finfo(torch.float32).eps * max(1.0, theirs)
    assert expected["after"] != 2.0**10  # there was something to load


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, job = Path(sys.argv[1]), sys.argv[2]
    # A file for every start: in torchrun's own store (torch 2.13) gloo sometimes finds the
    # addresses of ranks that have died.
    this, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{where}/{job}-{size}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", init_method=store, rank=this, world_size=size)
    if job.startswith("elastic"):
        elastic(where, job.endswith("kills"))
    else:
        sharded(where, job.endswith("load"))
    dist.barrier()
    dist.destroy_process_group()
