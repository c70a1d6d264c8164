"""A run that is killed goes on bit for bit, in every mode.

As a script, `python test_precision_killed.py CHECKPOINT [DIES]` trains in all modes at once, saves
every few steps and says at the end what came of it. `DIES` is the step after which it kills itself,
or "writing": then it does so in the middle of its second checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from gradscale.torch import MixedPrecision, checkpoint
from gradscale.torch.mixed_precision import MODES
from gradscale.torch.optim import AdamW

STEPS, EVERY = 20, 4


def runs() -> list[MixedPrecision]:
    """Every mode, with our optimizer and with one of torch's."""
    found = []
    for mode in MODES:
        for make in (AdamW, optim.AdamW):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
            optimizer = make(model.parameters(), lr=1e-2)
            mp = MixedPrecision(model, optimizer, mode)
            mp.follow(optim.lr_scheduler.StepLR(optimizer, 3))
            found.append(mp)
    return found


def loss_of(mp: MixedPrecision, x: Tensor, factor: float) -> Tensor:
    out: Tensor = mp.models[0](x)
    return out.float().square().mean() * factor


def train(path: Path, dies: str | None) -> str:
    """What came of training, in hexadecimal digits."""
    torch.set_num_threads(1)
    everyone = runs()
    torch.manual_seed(5)
    first = 0
    if path.exists():
        state = checkpoint.load(path)
        first = state["step"]
        for mp, saved in zip(everyone, state["runs"], strict=True):
            mp.load_state_dict(saved)
        checkpoint.set_random_state(state["random"])
    for step in range(first, STEPS):
        for mp in everyone:
            x = torch.randn(16, 6)
            spoilt = 1e30 if step % 7 == 3 else 1.0  # skipped in float16
            mp.run(partial(loss_of, mp, x, spoilt), retries=1)
        if dies == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % EVERY == 0:
            if dies == "writing" and path.exists():
                die_writing()
            state = {
                "step": step + 1,
                "runs": [mp.state_dict() for mp in everyone],
                "random": checkpoint.random_state(),
            }
            checkpoint.save(path, state)
    digest = hashlib.sha256()
    for mp in everyone:
        add(digest, mp.state_dict())
    return digest.hexdigest()


def add(digest: Any, value: Any) -> None:
    """Adds all numbers of `value` to `digest`."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            add(digest, value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            add(digest, each)
    elif isinstance(value, Tensor):
        digest.update(
            str(value.dtype).encode() + bytes(value.reshape(-1).view(torch.uint8).tolist())
        )
    else:
        digest.update(repr(value).encode())


def die_writing() -> None:
    """Has the next checkpoint end in the middle."""
    save = torch.save

    def half(state: Any, file: Any) -> None:
        save(state, file)
        file.flush()
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half  # type: ignore[assignment]


def run(path: Path, *dies: str) -> subprocess.CompletedProcess[str]:
    from programs import run_python  # not at the top: the script is this file too

    return run_python("-W", "error", __file__, path, *dies, cwd=Path(__file__).parents[3])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return finish(tmp_path_factory.mktemp("undisturbed") / "run.pt")


def finish(path: Path) -> str:
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 64
    return done.stdout


def test_killed_in_the_middle(tmp_path: Path, undisturbed: str) -> None:
    path = tmp_path / "run.pt"
    assert run(path, "9").returncode == -signal.SIGKILL
    assert checkpoint.load(path)["step"] == 8
    assert finish(path) == undisturbed


def test_killed_while_writing(tmp_path: Path, undisturbed: str) -> None:
    path = tmp_path / "run.pt"
    assert run(path, "writing").returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".run.pt.*.part"))
    assert checkpoint.load(path)["step"] == 4
    assert finish(path) == undisturbed
    assert not list(tmp_path.glob(".run.pt.*.part"))


def test_the_digits_tell_runs_apart() -> None:
    (one, other, *_) = (mp.state_dict() for mp in runs())
    with torch.no_grad():
        changed = {name: value.clone() for name, value in one["models"][0].items()}
        changed["0.weight"].view(-1)[0] += 2.0**-20
    found = []
    for state in (one, one, other | {"mode": "?"}, {**one, "models": [changed]}):
        found.append(hashlib.sha256())
        add(found[-1], state)
    assert found[0].digest() == found[1].digest()
    assert len({each.digest() for each in found}) == 3


if __name__ == "__main__":
    sys.stdout.write(train(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
