"""Training with DeepSpeed on the CPU, once for all tests: importing it takes seconds.

As a script this is one rank: it runs every scenario and writes what it saw as JSON.

    python deepspeed_runs.py RANK WORLD FOLDER
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradscale as gs
from gradscale.compat.deepspeed import LossScaler, attach, detach
from gradscale.torch import GradScaler

RULE = gs.Dynamic(init_scale=2.0**8, growth_interval=3, hysteresis=2, min_scale=1.0)
STEPS = 24
OVERFLOWS = (4, 8, 9, 10, 17)
"""Steps whose input on the last rank is too large for float16."""
STAGES = (1, 2)
LIMIT = 240
"""Seconds after which ranks that still run are ended."""


def results(world: int, folder: Path) -> list[dict[str, Any]]:
    """What each of `world` ranks wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    outputs = [folder / f"{rank}.txt" for rank in range(world)]
    ranks = []
    for rank, output in enumerate(outputs):
        command = [sys.executable, __file__, str(rank), str(world), str(folder)]
        with output.open("w") as out:
            ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    end = time.monotonic() + LIMIT
    codes: list[int | None] = [None]
    # A rank that ends with an error leaves the others waiting for it.
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    if codes != [0] * world:
        texts = "\n".join(output.read_text()[-4000:] for output in outputs)
        raise RuntimeError(f"The ranks ended with {codes}:\n{texts}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


class Training:
    """A DeepSpeed engine with a small model, and the loop around it."""

    def __init__(self, stage: int, **config: Any) -> None:
        import deepspeed

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        settings = {
            "train_micro_batch_size_per_gpu": 16,
            "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            **config,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.stage = stage
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    @property
    def scaler(self) -> Any:
        return self.engine.optimizer.loss_scaler

    def step(self, number: int, overflow: bool = False) -> dict[str, Any]:
        """Trains on the batches of step `number`; what came of it."""
        losses, scales = [], []
        for micro in range(self.engine.gradient_accumulation_steps()):
            rank = torch.distributed.get_rank()
            seed = 1000 * number + 100 * micro + rank
            inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
            target = inputs.sum(dim=1, keepdim=True)
            if overflow and rank == torch.distributed.get_world_size() - 1:
                target = target * 2.0**100  # the gradient is more than float16 can have
            loss = nn.functional.mse_loss(self.engine(inputs.half()).float(), target)
            self.engine.backward(loss)
            losses.append(loss.item())
            scales.append(self.scaler.cur_scale)
            self.engine.step()
        return {
            "loss": losses[0],
            "scales": scales,
            "overflow": bool(self.engine.optimizer.overflow),
            "next": getattr(self.scaler, "next_scale", self.scaler.cur_scale),
        }

    def run(self, steps: Sequence[int], overflows: Sequence[int] = ()) -> list[dict[str, Any]]:
        return [self.step(number, number in overflows) for number in steps]

    def weights(self) -> list[float]:
        """The float32 masters that this rank has."""
        optimizer = self.engine.optimizer
        parts = (
            optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else optimizer.single_partition_of_fp32_groups
        )
        return [number for part in parts for number in part.detach().flatten().tolist()]


def rule(stage: int, folder: Path) -> Any:
    """A run with overflows: the scale step by step."""
    training = Training(stage)
    attach(training.engine, RULE)
    seen = training.run(range(STEPS), OVERFLOWS)
    return {"seen": seen, "skipped": training.engine.skipped_steps}


def growth(stage: int, folder: Path) -> Any:
    """The weights after steps on some of which the scale grew, and at a scale that stayed.

    Without clipping, which would undo a wrong division.
    """
    weights = {}
    for name, policy in (("moving", RULE), ("constant", gs.Static(RULE.init_scale))):
        training = Training(stage, gradient_clipping=0.0)
        attach(training.engine, policy)
        training.run(range(7))
        weights[name] = training.weights()
    section = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
    theirs = Training(stage, fp16=section, gradient_clipping=0.0)
    theirs.run(range(7))
    return {**weights, "theirs": theirs.weights()}


def accumulation(stage: int, folder: Path) -> Any:
    """The scale of each of two micro-batches per step."""
    training = Training(stage, gradient_accumulation_steps=2)
    attach(training.engine, RULE)
    return training.run(range(8), overflows=[5])


def resumed(stage: int, folder: Path) -> Any:
    """A run that goes on from a checkpoint, and the checkpoint in our GradScaler."""
    whole = Training(stage)
    attach(whole.engine, RULE, on_stuck="ignore", stuck_after=7)
    whole.run(range(11), OVERFLOWS)
    whole.engine.save_checkpoint(str(folder), tag=f"ours{stage}")
    saved = whole.scaler.state_dict()
    after = whole.run(range(11, STEPS), OVERFLOWS)
    second = Training(stage)
    second.engine.load_checkpoint(str(folder), tag=f"ours{stage}")
    kind, loaded = type(second.scaler).__module__, second.scaler.state_dict()
    again = second.run(range(11, STEPS), OVERFLOWS)
    weights = second.weights()
    file = torch.load(shard(folder, f"ours{stage}"), weights_only=False)
    scaler = GradScaler("cpu")
    scaler.load_state_dict(file["optimizer_state_dict"])
    second.scaler.load_state_dict(scaler.state_dict())
    back = second.scaler.state_dict()
    return {
        "same": after == again,
        "same weights": whole.weights() == weights,
        "kind": kind,
        "saved": saved,
        "loaded": loaded,
        "stuck": [second.scaler._held.on_stuck, second.scaler._held.stuck_after],
        "torch": scaler.state_dict(),
        "back": back,
        "from there": second.run(range(11, STEPS), OVERFLOWS),
        "after": after,
    }


def shard(folder: Path, tag: str) -> Path:
    """The file of this rank's part of the optimizer."""
    rank = torch.distributed.get_rank()
    (found,) = (folder / tag).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return found


def moved_over(stage: int, folder: Path) -> Any:
    """DeepSpeed's own checkpoint to our GradScaler, to an engine of ours, and back to theirs."""
    section = {
        "enabled": True,
        "initial_scale_power": 8,
        "loss_scale_window": 3,
        "hysteresis": 2,
        "consecutive_hysteresis": True,
    }
    theirs = Training(stage, fp16=section)
    theirs.run(range(6), [1])
    theirs.engine.save_checkpoint(str(folder), tag=f"theirs{stage}")
    file = torch.load(shard(folder, f"theirs{stage}"), weights_only=False)
    scaler = GradScaler("cpu", policy=RULE)
    scaler.load_state_dict(file["optimizer_state_dict"])
    ours = Training(stage, fp16=section)
    ours.engine.load_checkpoint(str(folder), tag=f"theirs{stage}")
    attach(ours.engine)
    taken = ours.scaler.state_dict()
    seen = [step["next"] for step in ours.run(range(6, 13))]
    before = ours.scaler.state_dict()
    back = detach(ours.engine)
    counters = [back.cur_scale, back.cur_iter, back.last_overflow_iter, back.cur_hysteresis]
    kept = attach(ours.engine).state_dict()  # what the reader makes of them is what they were
    detach(ours.engine)
    walk = []
    for number in range(13, 17):
        ours.step(number)
        walk.append(ours.scaler.cur_scale)
    return {
        "torch": scaler.state_dict(),
        "taken": taken,
        "theirs": [step["next"] for step in theirs.run(range(6, 13))],
        "ours": seen,
        "before": before,
        "kept": kept,
        "counters": counters,
        "walk": walk,
        "module": type(back).__module__,
    }


def refusals(folder: Path) -> dict[str, str]:
    """The messages of engines and policies that do not go together."""
    cases: dict[str, Callable[[], Any]] = {
        "no ZeRO": lambda: attach(Training(0).engine, RULE),
        "bfloat16": lambda: attach(
            Training(1, fp16={"enabled": False}, bf16={"enabled": True}).engine, RULE
        ),
        "measuring": lambda: attach(Training(1).engine, gs.Headroom()),  # type: ignore[arg-type]
        "allowance": lambda: attach(Training(1, fp16={"enabled": True}).engine),
        "not ours": lambda: detach(Training(1).engine),
    }
    messages = {}
    for name, case in cases.items():
        try:
            case()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def constant(stage: int, folder: Path) -> Any:
    """A constant scale: from the engine's settings, and put back."""
    training = Training(stage, fp16={"enabled": True, "loss_scale": 96.0})
    attach(training.engine)
    ours = type(training.scaler) is LossScaler
    seen = training.run(range(3), [1])
    back = detach(training.engine)
    return {"ours": ours, "seen": seen, "back": [back.cur_scale, back.dynamic]}


def manual(stage: int, folder: Path) -> Any:
    """`engine.scale(loss).backward()` instead of `engine.backward(loss)`: the scales of losses."""
    training = Training(stage)
    scaler = attach(training.engine, RULE)
    scales = []
    for number in range(8):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        target = inputs.sum(dim=1, keepdim=True)
        loss: Tensor = nn.functional.mse_loss(training.engine(inputs.half()).float(), target)
        training.engine.scale(loss).backward()
        scales.append(scaler.cur_scale)
        training.engine.step()
    return scales


SCENARIOS = {
    1: (rule, growth, accumulation, resumed, moved_over, constant, manual),
    2: (rule, growth, resumed, moved_over),
}
"""What is run on so many ranks."""


def main(rank: int, world: int, folder: Path) -> None:
    """Runs all scenarios as one rank."""
    import logging

    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It asks for float16 instructions, which few CPUs have; torch computes without them.
    get_accelerator().is_fp16_supported = lambda: True
    # Communication in shared memory, which it would compile first.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    meeting = f"file://{folder / 'meeting'}"
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, rank=rank, world_size=world, init_method=meeting
    )
    seen: dict[str, Any] = {"refusals": refusals(folder)} if world == 1 else {}
    for scenario in SCENARIOS[world]:
        name = scenario.__name__
        print(name, flush=True)  # the last one is in the message if it fails
        stages = (*STAGES, 3) if scenario is rule else STAGES
        seen[name] = {str(stage): scenario(stage, folder) for stage in stages}
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
