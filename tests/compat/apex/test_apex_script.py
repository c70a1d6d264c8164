"""A script written for Apex runs as it is, and trains as torch.amp does.

The references are loops with torch's own GradScaler and autocast, in the same order. All factors
are powers of two and all sums are float32's, so nothing is to be rounded differently: the curves
must be equal to the bit.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from gradscale.demo.digits import FILE
from programs import run_python

SCRIPT = Path(__file__).with_name("apex_script.py")
STEPS, BAD = 40, 7
RUN = """
import json, runpy, sys
from gradscale.compat.apex import install

install()
script, *runs = sys.argv[1:]
for run in runs:
    sys.argv = [script, *json.loads(run)]
    runpy.run_path(script, run_name="__main__")
"""
HOW = {
    "O0": [],
    "O1": ["--bad-batch", str(BAD)],
    "O2": ["--bad-batch", str(BAD)],
    "O3": ["--bad-batch", str(BAD), "--loss-scale", "128.0"],
}
"""Arguments for every opt level. float32 has no bad batch to skip: it just goes on."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the script's process: sums of two threads are rounded in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Curve(NamedTuple):
    """The losses of every step, and the scales after it."""

    losses: list[list[float]]
    scales: list[list[float]]


def run_script(folder: Path, *runs: list[str]) -> list[Curve]:
    """What the script logs, run by run, in a process of its own that knows our `apex`."""
    logs = [folder / f"{number}.json" for number in range(len(runs))]
    usual = ["--data", str(FILE), "--steps", str(STEPS)]
    given = [
        json.dumps([*usual, "--log", str(log), *run]) for log, run in zip(logs, runs, strict=True)
    ]
    # Which torch 2.4 and 2.5 say at every torch.load(path).
    known = "ignore:You are using `torch.load`:FutureWarning"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python("-W", "error", "-W", known, "-c", RUN, SCRIPT, *given, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return [Curve(**json.loads(log.read_text())) for log in logs]


class Runs(NamedTuple):
    """The curves of all opt levels: 40 steps, and the last 20 of them after a resume."""

    whole: dict[str, Curve]
    resumed: dict[str, Curve]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two processes: one trains and saves, the other resumes."""
    folder = tmp_path_factory.mktemp("apex")
    common = {
        level: ["--opt-level", level, "--checkpoint", str(folder / f"{level}.pt"), *how]
        for level, how in HOW.items()
    }
    whole = run_script(folder, *([*each, "--save-at", "20"] for each in common.values()))
    resumed = run_script(folder, *([*each, "--resume"] for each in common.values()))
    return Runs(dict(zip(HOW, whole, strict=True)), dict(zip(HOW, resumed, strict=True)))


def train_with_torch(round_first: bool, autocast: bool = True, bad_batch: int = BAD) -> Curve:
    """The same training with torch.amp; with weights that are float16 numbers `round_first`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with gzip.open(FILE) as file:
        pixels = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    images = pixels.view(-1, 64).float().div(16).to(device)
    encoder = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
    decoder = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 64))
    encoder, decoder = encoder.to(device), decoder.to(device)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in (encoder, decoder)
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 15, gamma=0.5) for one in optimizers]
    if round_first:
        for layer in (*encoder, *decoder):
            if isinstance(layer, nn.Linear):
                for param in layer.parameters():
                    param.data = param.data.half().float()
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, enabled=autocast)
    curve = Curve([], [])
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batch = images[torch.randint(len(images), (64,), generator=generator).to(device)]
        with torch.autocast(device, torch.float16, enabled=autocast):
            code = encoder(batch * 1e6 if step == bad_batch else batch)
            restored = decoder(code)
        loss = nn.functional.mse_loss(restored.float(), batch)
        penalty = 1e-3 * code.float().pow(2).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward(retain_graph=True)
        scaler.scale(penalty).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            nn.utils.clip_grad_norm_(params, 0.05)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        curve.losses.append([loss.item(), penalty.item()])
        curve.scales.append([scaler.get_scale()] * 2)
    return curve


def first_difference(ours: Curve, theirs: Curve) -> int | None:
    """The first step on which two curves differ; None if they are equal to the bit."""
    assert len(ours.losses) == len(theirs.losses)
    for step in range(len(ours.losses)):
        # As text, so that two NaNs of the bad batch are the same.
        mine, other = (repr((curve.losses[step], curve.scales[step])) for curve in (ours, theirs))
        if mine != other:
            return step
    return None


@pytest.mark.parametrize("level", HOW)
def test_script_learns(runs: Runs, level: str) -> None:
    losses = runs.whole[level].losses
    assert losses[-1][0] < losses[0][0] / 2


def test_o0_is_plain_float32(runs: Runs) -> None:
    theirs = train_with_torch(round_first=False, autocast=False, bad_batch=-1)
    assert first_difference(runs.whole["O0"], theirs) is None


def test_o1_trains_as_torch_amp_to_the_bit(runs: Runs) -> None:
    ours = runs.whole["O1"]
    assert first_difference(ours, train_with_torch(round_first=False)) is None
    assert ours.scales[BAD - 1 : BAD + 1] == [[2.0**16] * 2, [2.0**15] * 2]


def test_o2_trains_as_torch_amp_from_rounded_weights_to_the_bit(runs: Runs) -> None:
    # O2 begins with weights in float16; from there on its masters are torch.amp's weights.
    ours = runs.whole["O2"]
    assert first_difference(ours, train_with_torch(round_first=True)) is None
    assert ours.scales[BAD] == [2.0**15] * 2


def test_static_scale_skips_the_bad_batch(runs: Runs) -> None:
    # Apex would have stepped, and every loss after it would be NaN.
    ours = runs.whole["O3"]
    assert ours.scales == [[128.0] * 2] * STEPS
    assert not math.isfinite(ours.losses[BAD][0])
    assert all(math.isfinite(loss) for loss, _ in ours.losses[BAD + 1 :])


@pytest.mark.parametrize("level", HOW)
def test_resumed_run_is_the_whole_run(runs: Runs, level: str) -> None:
    rest = runs.resumed[level]
    assert first_difference(Curve(*(rows[20:] for rows in runs.whole[level])), rest) is None
    assert len(rest.losses) == 20


def test_difference_of_one_bit_is_found() -> None:
    curve = Curve([[0.5, 0.25], [0.5, float("nan")]], [[1.0, 1.0], [1.0, 1.0]])
    assert first_difference(curve, curve) is None
    other = Curve([[0.5, 0.25], [0.5 + 2**-53, float("nan")]], curve.scales)
    assert first_difference(curve, other) == 1
    assert first_difference(curve, curve._replace(scales=[[2.0, 1.0], [1.0, 1.0]])) == 0


def test_script_is_written_for_apex_alone() -> None:
    assert "gradscale" not in SCRIPT.read_text()
