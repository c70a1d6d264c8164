"""How far one iteration goes through our own code: calls, files, and jumps between files.

    python benchmarks/calls.py

Counted are frames of the gradscale package alone, in the third iteration of a model of four
tensors on the CPU: numbers that do not depend on the machine, unlike times.

- *calls*: functions that were called;
- *files*: modules that took part;
- *jumps*: calls and returns in another file than the call or return before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import gradscale
from gradscale.torch import GradScaler, MixedPrecision
from gradscale.torch.optim import AdamW

PACKAGE = str(Path(gradscale.__file__).parent) + os.sep
ITERATION = 3
"""The one that is counted: caches are full, and optimizers have their state."""
WORLD = 2
LOOPS = {
    "drop-in": "torch's loop with clipping, torch's fused AdamW",
    "apply": "backward() and apply(clip_norm=1.0), our AdamW",
    "ddp": f"MixedPrecision fp16-master under DDP, {WORLD} gloo ranks, torch's AdamW",
}


class Count(NamedTuple):
    """What one iteration takes."""

    calls: int
    files: int
    jumps: int


class Tracer:
    """Counts calls, files and jumps of the gradscale package, in all threads that Python starts."""

    def __init__(self) -> None:
        self.calls = self.jumps = 0
        self.files: set[str] = set()
        self._last: str | None = None

    def _global(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return None
        self.calls += 1
        self._at(file)
        frame.f_trace_lines = False
        return self._local

    def _local(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            self._at(frame.f_code.co_filename)
        return self._local

    def _at(self, file: str) -> None:
        self.files.add(file)
        self.jumps += self._last not in (None, file)
        self._last = file

    def run(self, call: Callable[[], object]) -> Count:
        """What `call` takes."""
        before = sys.gettrace()  # a debugger's, or that of a coverage
        threading.settrace(self._global)
        sys.settrace(self._global)
        try:
            call()
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]
        return Count(self.calls, len(self.files), self.jumps)


def net() -> nn.Sequential:
    """Two linear layers: four tensors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def drop_in() -> Callable[[], object]:
    """An iteration of torch's loop with our import."""
    model, x = net(), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cpu")

    def iterate() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return iterate


def apply() -> Callable[[], object]:
    """An iteration of two calls."""
    model, x = net(), torch.ones(4, 8)
    optimizer = AdamW(model.parameters())
    scaler = GradScaler("cpu")

    def iterate() -> None:
        scaler.backward(model(x).square().mean())
        scaler.apply(optimizer, clip_norm=1.0)

    return iterate


def ddp() -> Callable[[], object]:
    """An iteration on one of several ranks."""
    model, x = net(), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    mp = MixedPrecision(model, optimizer, "fp16-master")
    wrapped = nn.parallel.DistributedDataParallel(model)  # of weights that have been cast
    mp.scaler.name(wrapped)

    def iterate() -> None:
        with mp.autocast():
            loss = wrapped(x).float().square().mean()
        mp.backward(loss)
        mp.step(clip_norm=1.0)

    return iterate


def third(make: Callable[[], Callable[[], object]]) -> Count:
    """What the third iteration takes."""
    iterate = make()
    for _ in range(ITERATION - 1):
        iterate()
    return Tracer().run(iterate)


def count(loop: str) -> Count:
    """What an iteration of one of `LOOPS` takes."""
    if loop != "ddp":
        return third({"drop-in": drop_in, "apply": apply}[loop])
    # One more rank in a process of its own, as this one may have a group already.
    with tempfile.TemporaryDirectory() as folder:
        places = [str(Path(PACKAGE).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), folder], env=env, stdout=subprocess.PIPE
            )
            for rank in range(WORLD)
        ]
        told = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"The ranks ended with {[rank.returncode for rank in ranks]}.")
    return Count(*json.loads(told[0].splitlines()[-1]))  # gloo of torch 2.8 prints lines before it


def be_a_rank(rank: int, folder: str) -> None:
    """Prints what an iteration takes on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD)
    print(json.dumps(third(ddp)), flush=True)
    dist.barrier()
    os._exit(0)  # gloo may abort where the interpreter is finalized


def main() -> None:
    """Prints a line for each loop."""
    for loop, what in LOOPS.items():
        calls, files, jumps = count(loop)
        print(f"{loop:8}  {calls:4} calls  {files:3} files  {jumps:4} jumps   {what}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        be_a_rank(int(sys.argv[1]), sys.argv[2])
    else:
        main()
