"""`gradscale run`: somebody's script, unchanged, with our scaler in place of torch's and a log.

The script is to notice nothing. So it runs as `__main__`, after the command line is done with;
exceptions lose the frames that are ours; and torch is imported when the script does, not before,
because scripts set variables of the environment first (`OMP_NUM_THREADS`) that torch reads then.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import runpy
import sys
import time
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from gradscale.cli.imports import ImportHook
from gradscale.cli.panel import Panel

RUNS = Path("gradscale-runs")
"""Where logs go that were given no folder."""


class Script(NamedTuple):
    """What to run, and how."""

    command: Sequence[str]
    """The script or module, and its arguments."""
    module: bool = False
    log: Path | None = None
    policy: str | None = None
    panel: bool = True

    def start(self) -> None:
        """Runs the script; returns when it has ended. Its exceptions come through."""
        name = self.command[0]
        if not self.module and not os.path.exists(name):
            sys.stderr.write(
                f"gradscale run: can't open file {os.path.abspath(name)!r}: no such file\n"
            )
            sys.exit(2)
        recorder = Recorder(self)
        # What is registered first is called last: after what the script and the logs have to do.
        atexit.register(recorder.finish)
        sys.meta_path.insert(0, ImportHook(recorder.on_torch, recorder.on_apex))
        if "torch" in sys.modules:
            recorder.on_torch()
        recorder.show()
        try:
            run_script(self.command, self.module)
        except SystemExit:
            raise
        except BaseException:
            hide_our_frames()
            raise


class Recorder:
    """Gives every scaler of the script a log."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._rank = number_from("RANK", 0)
        self._process = os.getpid()
        self._start = Path.cwd()
        """Where paths begin: the script may go to another folder before it makes a scaler."""
        self._replaced = ExitStack()  # never closed: the names stay for as long as the process
        self._folder: Path | None = None
        self._scalers = 0
        self._panel: Panel | None = None

    def show(self) -> None:
        """Shows the panel, on the first rank, if stderr is a terminal that can."""
        if self._script.panel and self._rank == 0 and Panel.can_show():
            self._panel = Panel()
            self._panel.start()

    def on_torch(self) -> None:
        """Puts our scaler in place of torch's, which has just been imported."""
        from gradscale.torch.construction import measure_more
        from gradscale.torch.replacement import replace

        def take(scaler: Any) -> None:
            measure_more(scaler)
            self.take(scaler)

        self._replaced.enter_context(replace(policy=self._script.policy, on_new=take))

    def on_apex(self) -> ModuleType:
        """The module `apex`, ours."""
        from gradscale.compat.apex import install, run_log

        run_log.on_first = self.take
        return install()

    def take(self, scaler: Any) -> None:
        """Logs what a new scaler does."""
        self._scalers += 1
        try:
            if self._folder is None:
                wanted = self._script.log
                name, runs = self._script.command[0], self._start / RUNS
                self._folder = new_folder(name, runs) if wanted is None else self._start / wanted
            scaler.log_to(self._place_for(self._folder, self._scalers))
            if self._panel is not None:
                scaler.log_to(self._panel.take)
        except (ValueError, OSError) as error:  # a training must not end for its log
            say(f"scaler {self._scalers} is not logged: {error}")

    def _place_for(self, folder: Path, number: int) -> Path:
        """The folder for the log of a scaler, inside of that of the run: a file has one writer."""
        if os.getpid() != self._process and not is_a_rank():  # forked, perhaps with others
            folder = folder / f"process-{os.getpid()}"
        return folder if number == 1 else folder / f"scaler-{number}"

    def finish(self) -> None:
        """Says where the log is, at the end of the process."""
        if os.getpid() != self._process:
            return  # forked by the script
        if self._panel is not None:
            self._panel.stop()
        if self._rank:
            return
        name = self._script.command[0]
        if not self._scalers:
            say(
                f"{name} created no torch.amp.GradScaler and did not use apex.amp in this process, "
                "so there is nothing to log."
            )
        elif self._folder is not None:
            inside = self._folder.is_relative_to(self._start)
            shown = self._folder.relative_to(self._start) if inside else self._folder
            say(f"the log is in {shown}. To read it, run: gradscale report {shown}")


def say(text: str) -> None:
    """Writes one line to stderr, whatever the script has done to it."""
    try:
        os.write(2, f"gradscale: {text}\n".encode(errors="replace"))
    except OSError:
        pass  # closed: nobody reads it


def run_script(command: Sequence[str], module: bool) -> None:
    """Runs a script, or a module, as `python` would, with its arguments.

    `__main__` stays until the process has ended, for threads and what atexit calls. So nothing is
    run by `run_module()` and `run_path()`, which take it away, but by what `python -m` itself uses.
    """
    name = command[0]
    path = os.path.join(os.getcwd(), name)
    holds_modules = not module and (os.path.isdir(name) or zipfile.is_zipfile(name))
    sys.argv = list(command)
    safe = bool(getattr(sys.flags, "safe_path", False))
    if not safe:
        del sys.path[0]
    if holds_modules:
        sys.path.insert(0, path)
    elif not safe:
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(name)))
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if module or holds_modules:
        runner: Any = runpy
        runner._run_module_as_main(name if module else "__main__", alter_argv=module)
        return
    compiled = name.endswith(".pyc")
    loader: Any = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __spec__=None)
    if compiled:
        code = loader.get_code("__main__")
    else:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def hide_our_frames() -> None:
    """Has the exception hook, whoever's it is by now, show tracebacks without our frames."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = after_our_frames(trace)
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def after_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script: after `run_script`, and runpy's frames."""
    while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
        trace = trace.tb_next
    trace = None if trace is None else trace.tb_next
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == "runpy":
        trace = trace.tb_next
    return trace


def new_folder(name: str, runs: Path = RUNS) -> Path:
    """A folder for the log of a script that was given none; the same one on all ranks."""
    stem = Path(name).stem or "run"
    if number_from("WORLD_SIZE", 1) == 1:
        wanted = runs / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        for count in range(1, 1000):
            folder = wanted if count == 1 else wanted.with_name(f"{wanted.name}-{count}")
            try:
                folder.mkdir(parents=True)
            except FileExistsError:
                continue
            return folder
        return wanted
    # No clock: ranks do not start in the same second. A launcher's processes have one parent; on
    # several machines the job has a port, and a name if it was given one.
    job = os.environ.get("MASTER_PORT", "0")
    if number_from("LOCAL_WORLD_SIZE", 0) == number_from("WORLD_SIZE", 1):
        job += f"-{os.getppid()}"
    else:
        named = os.environ.get("SLURM_JOB_ID", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        job += "-" + "".join(sign if sign.isalnum() else "-" for sign in named)
    return runs / f"{stem}-{job}"


def is_a_rank() -> bool:
    """Whether this process is one of several ranks, each of which has a file of its own."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return True
    return number_from("WORLD_SIZE", 1) > 1


def number_from(variable: str, default: int) -> int:
    """The number in a variable of the environment; the default if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default
