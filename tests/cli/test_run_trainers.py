"""`gradscale run` with Apex, the Trainer of Transformers, several ranks and a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("torch")

from gradscale.runlog import read

pytestmark = pytest.mark.soak

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
RUN = ["-m", "gradscale", "run"]


def run(*args: Any, cwd: Path, env: dict[str, str] = ENV) -> Any:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_an_apex_script_gives_the_same_bits_and_a_log(tmp_path: Path) -> None:
    script = SCRIPTS / "train_apex.py"
    code = "import runpy, sys; from gradscale.compat.apex import install; install(); "
    plain = run(
        "-c", code + "runpy.run_path(sys.argv[1], run_name='__main__')", script, cwd=tmp_path
    )
    done = run(*RUN, "--log", "log", script, cwd=tmp_path)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    log = read(tmp_path / "log")
    assert len(log.steps) == 30
    skipped = [line["step"] for line in log.steps if not line["steps"][0]["applied"]]
    assert skipped == [1, 2, 11]  # float16 cannot hold the first two at a scale of 2**16
    assert list((tmp_path / "log").iterdir()) == [tmp_path / "log" / "rank-0.jsonl"]
    assert {event["name"] for event in log.events} == {"skip", "backoff", "recover"}
    assert "apex" in log.headers[0]["engine"]


@pytest.mark.parametrize(
    "device",
    [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"],
)
def test_a_trainer_with_fp16_gives_the_same_bits_and_a_log(tmp_path: Path, device: str) -> None:
    pytest.importorskip("transformers")
    script, paths = SCRIPTS / "train_trainer_fp16.py", ENV["PYTHONPATH"]
    if device == "cpu":  # Accelerate makes no scaler there, unless it is made to
        paths = os.pathsep.join([str(SCRIPTS / "cpu_fp16"), paths])
    env = {**ENV, "PYTHONPATH": paths}
    plain = run(script, tmp_path / "out", cwd=tmp_path, env=env)
    done = run(*RUN, "--log", "log", script, tmp_path / "out", cwd=tmp_path, env=env)
    assert done.returncode == plain.returncode == 0, done.stderr + plain.stderr
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1] != ""
    log = read(tmp_path / "log")
    assert len(log.steps) == 12
    assert log.steps[-1]["steps"][0]["applied"]


def test_another_policy_is_used_where_the_script_chooses_none(tmp_path: Path) -> None:
    text = (SCRIPTS / "train_amp.py").read_text().replace("sys.stdin.readline()", "1.0")
    (tmp_path / "train.py").write_text(text)
    done = run(*RUN, "--log", "log", "--policy", "headroom", "train.py", 10, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    # growth_interval, which it does not have, is left out; the first scale is the script's.
    assert read(tmp_path / "log").settings["policy"] == "Headroom(init_scale=16384.0)"


@pytest.mark.parametrize("how", ["module", "script"])
def test_each_rank_of_torchrun_has_a_log(tmp_path: Path, how: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    entry = tmp_path / "gradscale-entry"
    entry.write_text("from gradscale.cli import main\nmain()\n")
    ours = ["-m", "gradscale"] if how == "module" else [entry]
    script = SCRIPTS / "train_ranks.py"
    plain = run(*launcher, script, cwd=tmp_path)
    log_to = ["--log-to", "gradscale-runs/log"] if how == "script" else []
    done = run(*launcher, *ours, "run", *log_to, script, cwd=tmp_path)
    assert done.returncode == plain.returncode == 0, done.stderr
    lines = [sorted(one.stdout.splitlines()) for one in (plain, done)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
    (folder,) = (tmp_path / "gradscale-runs").iterdir()
    log = read(folder)
    assert log.ranks == [0, 1]
    assert len(log.steps) == 10
    assert done.stderr.count("gradscale: the log is in") == 1


TRAINING = """
import sys, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(10_000):
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    if step == 20:
        print("ready", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_log_of_a_script_that_a_signal_ends_can_be_read(tmp_path: Path, number: int) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, *RUN, "--log", "log", "train.py"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == -number
    assert len(read(tmp_path / "log").steps) > 15


def test_a_terminal_gets_a_panel_and_keeps_its_lines(tmp_path: Path) -> None:
    import fcntl
    import pty
    import struct
    import termios

    (tmp_path / "train.py").write_text(TRAINING)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, *RUN, "--log", "log", "train.py"]
    env = {**ENV, "TERM": "xterm"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    text, end, asked = b"", time.monotonic() + 120, False
    while time.monotonic() < end:
        try:
            more = os.read(master, 65536)
        except OSError:  # what Linux gives at the end of a terminal
            break
        if not more:
            break
        text += more
        if b"steps/s" in text and b"ready" in text and not asked:
            process.send_signal(signal.SIGTERM)
            asked = True
    os.close(master)
    assert process.wait(60) == -signal.SIGTERM
    assert b"scale 2**16" in text
    assert text.endswith(b"\x1b[r\x1b[23;1H\x1b[J\x1b8")
