"""`gradscale run`: a script notices nothing, and there is a log.

Most scripts here do not import torch, which takes seconds; what needs it more than once is in
test_run_trainers.py.
"""

from __future__ import annotations

import importlib.util
import io
import os
import py_compile
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from gradscale.cli import launch
from gradscale.cli.commands import app
from gradscale.cli.imports import ImportHook
from gradscale.cli.launch import Script
from gradscale.cli.panel import HEIGHT, Panel
from gradscale.errors import SettingError
from gradscale.runlog import read

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
NOTHING = "created no torch.amp.GradScaler"


def written(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(*args: Any, cwd: Path, stdin: str = "", ours: bool = True, **more: Any) -> Any:
    """A finished process: `gradscale run` with these arguments, or plain python."""
    command = [sys.executable, *(["-m", "gradscale", "run"] if ours else []), *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=ENV, input=stdin, capture_output=True, text=True, timeout=120, **more
    )


def test_a_torch_amp_script_gives_the_same_bits_and_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    script = SCRIPTS / "train_amp.py"
    done = run("--log", "log", script, 60, cwd=tmp_path, stdin="1e37\n")
    assert done.returncode == 3, done.stderr
    assert done.stderr == "gradscale: the log is in log. To read it, run: gradscale report log\n"
    # The same script with torch's scaler, in this process.
    monkeypatch.setattr(sys, "argv", [str(script), "60"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("1e37\n"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.raises(SystemExit, match="3"):
        runpy.run_path(str(script), run_name="__main__")
    torch.set_num_threads(threads)
    assert capsys.readouterr().out == done.stdout
    log = read(tmp_path / "log")
    assert [line["step"] for line in log.steps] == list(range(1, 61))
    skipped = [line for line in log.steps if not line["steps"][0]["applied"]]
    assert [line["step"] for line in skipped] == [41]
    assert skipped[0]["steps"][0]["verdict"] == "scale too high"
    assert all("headroom" in line["steps"][0] for line in log.steps if line not in skipped)
    assert "underflow" in log.steps[0]["steps"][0]
    assert "Dynamic" in log.settings["policy"]


PROBE = """
import atexit, sys, threading, time
class Mine: pass
def late(): print("late", sys.modules["__main__"].__dict__ is globals(), Mine.__module__)
atexit.register(late)
thread = threading.Thread(target=lambda: (time.sleep(0.2), late()))
thread.start()
print(sys.argv, __name__, __file__, sys.path[0], sys.stdin.read(), __spec__, __package__)
print(__doc__, __annotations__ if "__annotations__" in globals() else None, "torch" in sys.modules)
"""


def test_a_script_sees_what_it_sees_without(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real = written(tmp_path / "there", PROBE)
    (tmp_path / "link.py").symlink_to(real)
    found = []
    for ours in (False, True):
        done = run("link.py", "--log", "-x", "-m", cwd=tmp_path, stdin="typed", ours=ours)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[1] == found[0]
    assert "['link.py', '--log', '-x', '-m'] __main__" in found[0]
    assert done.stderr.count("\n") == 1
    assert NOTHING in done.stderr


@pytest.mark.soak
def test_a_module_and_a_folder_run_as_with_python(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    written(package, "", "__init__.py")
    text = "import sys\nprint(sys.argv[1:], __name__, __package__, __spec__.name, sys.path[0])\n"
    written(package, text + "raise SystemExit('no')", "__main__.py")
    for args in (("-m", "pack", "-m", "x"), ("pack", "-q")):
        plain, ours = (run(*args, cwd=tmp_path, ours=ours) for ours in (False, True))
        assert ours.stdout == plain.stdout != ""
        assert (ours.returncode, plain.returncode) == (1, 1)
        assert ours.stderr.startswith(plain.stderr)
        assert plain.stderr == "no\n"


LATE = """
import atexit, sys
HERE = [sys.argv, sys.path[0], __file__, __spec__ and __spec__.name, sys.excepthook.__module__]
def late():
    import __main__
    print(HERE, __main__.HERE is HERE)
atexit.register(late)
"""


@pytest.mark.parametrize("args", [("-m", "pack.part", "x"), ("./there/", "x"), ("late.pyc", "x")])
def test_main_is_there_until_the_process_has_ended(tmp_path: Path, args: tuple[str, ...]) -> None:
    for folder, name in (("pack", "part.py"), ("there", "__main__.py")):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, LATE, name)
    py_compile.compile(str(written(tmp_path, LATE)), str(tmp_path / "late.pyc"))
    plain, ours = (run(*args, cwd=tmp_path, ours=ours) for ours in (False, True))
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert plain.stdout.endswith("'sys'] True\n")


@pytest.mark.parametrize("args", [("-m", "pack.nothing"), ("empty",)])
def test_what_cannot_be_run_is_one_line_as_with_python(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    plain, ours = (run(*args, cwd=tmp_path, ours=ours) for ours in (False, True))
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr.splitlines()[:-1] == plain.stderr.splitlines()


FAILING = """
import sys
def fail(): raise ValueError("first")
try:
    fail()
except ValueError:
    sys.excepthook = sys.excepthook
    raise KeyError("second")
"""


@pytest.mark.parametrize(
    "text",
    [
        FAILING,
        pytest.param("def f(:\n", marks=pytest.mark.soak),
        pytest.param("import nothing_like_it", marks=pytest.mark.soak),
    ],
)
def test_a_traceback_has_none_of_our_frames(tmp_path: Path, text: str) -> None:
    script = written(tmp_path, text)
    plain, ours = (run(script, cwd=tmp_path, ours=ours) for ours in (False, True))
    assert ours.returncode == plain.returncode == 1
    assert "Error" in plain.stderr
    *rest, last = ours.stderr.splitlines()
    assert rest == plain.stderr.splitlines()
    assert NOTHING in last


def test_a_traceback_of_a_module_begins_in_it(tmp_path: Path) -> None:
    written(tmp_path, "1 / 0", "mod.py")
    done = run("-m", "mod", cwd=tmp_path)
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "mod.py"}", line 1, in <module>',
    ]


WAITING = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("left", flush=True)
"""


@pytest.mark.parametrize(("number", "out"), [(signal.SIGTERM, ""), (signal.SIGINT, "left\n")])
def test_a_signal_ends_a_script_as_without(tmp_path: Path, number: int, out: str) -> None:
    script = written(tmp_path, WAITING)
    command = [sys.executable, "-m", "gradscale", "run", str(script)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest) == (-number, out)
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert "gradscale/cli" not in errors


def test_a_file_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nothing.py"
    with pytest.raises(SystemExit, match="2"):
        Script([str(path)]).start()
    assert capsys.readouterr().err == (
        f"gradscale run: can't open file {str(path)!r}: no such file\n"
    )


@pytest.mark.parametrize("option", ["--log", "--log-to"])
def test_arguments_after_the_script_are_its_own(option: str) -> None:
    scripts: list[Script] = []
    args = ["run", option, "a", "--no-panel", "-m", "pack.mod", "--log", "b", "-m", "--", "c"]
    done = CliRunner().invoke(app, args, obj=scripts)
    assert done.exit_code == 0, done.output
    command = ["pack.mod", "--log", "b", "-m", "--", "c"]
    assert scripts == [Script(command, module=True, log=Path("a"), policy=None, panel=False)]


def test_a_policy_that_is_none_is_named_before_the_script_runs() -> None:
    scripts: list[Script] = []
    done = CliRunner().invoke(app, ["run", "--policy", "novel", "train.py"], obj=scripts)
    assert (done.exit_code, scripts) == (1, [])
    assert "policy must be" in done.stderr


# Where the log goes.


def test_folders_of_several_runs_differ_and_those_of_ranks_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    first, second = launch.new_folder("a/train.py"), launch.new_folder("a/train.py")
    assert first != second
    assert first.parent == second.parent == launch.RUNS
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launch.new_folder("train.py") == launch.RUNS / "train-29500-none"
    monkeypatch.setenv("SLURM_JOB_ID", "../7")
    assert launch.new_folder("train.py") == launch.RUNS / "train-29500----7"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch.new_folder("train.py") == launch.RUNS / f"train-29500-{os.getppid()}"


class Scaler:
    """Takes calls of log_to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.paths: list[Any] = []
        self._error = error

    def log_to(self, path: Any) -> None:
        if self._error is not None:
            raise self._error
        self.paths.append(path)


def test_every_scaler_has_a_log_of_its_own(tmp_path: Path) -> None:
    recorder = launch.Recorder(Script(["train.py"], log=tmp_path / "log"))
    scalers = [Scaler(), Scaler()]
    for scaler in scalers:
        recorder.take(scaler)
    assert [scaler.paths for scaler in scalers] == [
        [tmp_path / "log"],
        [tmp_path / "log" / "scaler-2"],
    ]


@pytest.mark.parametrize(("world", "inside"), [("1", "process-{}"), ("2", ".")])
def test_a_forked_process_has_a_log_of_its_own_unless_it_is_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str, inside: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    recorder, scaler = launch.Recorder(Script(["train.py"], log=tmp_path)), Scaler()
    monkeypatch.setattr(os, "getpid", lambda: 123)
    recorder.take(scaler)
    assert scaler.paths == [tmp_path / inside.format(123)]


@pytest.mark.parametrize("log", [None, Path("log")])
def test_a_script_that_leaves_its_folder_has_its_log_where_it_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    log: Path | None,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    recorder, scaler = launch.Recorder(Script(["train.py"], log=log)), Scaler()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder.take(scaler)
    recorder.finish()
    (folder,) = scaler.paths
    shown = folder.relative_to(tmp_path)
    assert shown.parent == (launch.RUNS if log is None else Path())
    said = f"gradscale: the log is in {shown}. To read it, run: gradscale report {shown}\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("error", [SettingError("locked"), OSError(28, "disk full")])
def test_a_log_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = launch.Recorder(Script(["train.py"], log=tmp_path))
    recorder.take(Scaler(error))
    assert "gradscale: scaler 1 is not logged:" in capfd.readouterr().err


def test_a_folder_that_cannot_be_made_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch.RUNS.touch()  # a file is in the way
    recorder = launch.Recorder(Script(["train.py"]))
    recorder.take(Scaler())
    recorder.finish()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("gradscale: scaler 1 is not logged: ")


# Imports.


def test_torch_is_acted_on_once_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "ready = True\n", "torch.py")  # a stand-in: the real one is imported once
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    seen: list[Any] = []
    hook = ImportHook(lambda: seen.append(sys.modules["torch"].ready), lambda: ModuleType("apex"))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert importlib.util.find_spec("torch") is not None
    assert seen == []
    module = __import__("torch")
    assert seen == [True]
    assert module.__spec__ is not None
    assert "exec_module" not in vars(module.__spec__.loader)


def test_apex_is_ours_for_a_script_and_not_for_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    text = "try:\n    import apex\nexcept ImportError:\n    apex = None\n"
    written(library, text, "a_library.py")
    written(tmp_path, text, "a_script.py")
    for folder in (library, tmp_path):
        monkeypatch.syspath_prepend(folder)
    ours = ModuleType("apex")
    hook = ImportHook(lambda: None, lambda: ours)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    try:
        assert __import__("a_library").apex is None
        assert __import__("a_script").apex is ours
    finally:
        for name in ("a_library", "a_script", "apex"):
            sys.modules.pop(name, None)


# The panel.


def step_line(step: int, applied: bool = True) -> dict[str, Any]:
    taken = {"optimizer": 0, "applied": applied, "headroom": 2.5}
    return {"kind": "step", "step": step, "scale": 1024.0, "steps": [taken]}


def test_the_panel_shows_the_numbers_of_the_log() -> None:
    panel = Panel()
    assert [line.plain for line in panel.text()] == ["gradscale: waiting for the first step", ""]
    for step in range(1, 5):
        panel.take(step_line(step, applied=step != 2))
    first, second = (line.plain for line in panel.text())
    assert "scale 2**10" in first
    assert "headroom 2.5" in first
    assert "skipped 1 of 4" in first
    assert second == "no findings so far"
    found = {"kind": "underflow", "where": "a.b\x1b[2J", "evidence": "Much.", "remedy": ""}
    panel.take({"kind": "finding", "finding": found})
    assert panel.text()[1].plain == "Small gradients are lost in a.b\x1b[2J: Much."


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_panel_keeps_to_two_lines_of_a_terminal_and_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fcntl
    import pty
    import struct
    import termios

    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    assert Panel.can_show(slave)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    panel = Panel(slave)
    found = {"kind": "stuck", "where": "\x1b[2J" * 40, "evidence": "", "remedy": ""}
    panel.take(step_line(1))
    panel.take({"kind": "finding", "finding": found})
    try:
        panel.start()
        time.sleep(0.1)
        panel.stop()
        panel.stop()
        end = time.monotonic() + 10
        text = ""
        while "\x1b[J" not in text and time.monotonic() < end:
            text += os.read(master, 65536).decode()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(master)
        os.close(slave)
    assert f"\x1b[1;{24 - HEIGHT}r" in text  # the rest scrolls
    assert "scale 2**10" in text
    assert text.count("\x1b[2J") == 0  # a name moves nothing
    assert text.endswith("\x1b[r\x1b[23;1H\x1b[J\x1b8")


def test_there_is_no_panel_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    try:
        assert not Panel.can_show(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    monkeypatch.setenv("TERM", "dumb")
    assert not Panel.can_show()
