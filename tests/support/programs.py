"""Python programs in processes of their own that need not import torch, which takes seconds.

    done = run_python("-W", "error", "-c", "import torch; print(torch.ones(2).sum())")

They are forked from the server of ranks.py, which has imported torch, its compiler and FSDP, and
neither our library nor JAX. Everything else is as if Python had been started: `__main__`,
`sys.argv` and `sys.path`, the environment, warnings, the streams, what happens at the end, and the
exit status. What a program does before torch is imported needs a process that is really started.
"""

from __future__ import annotations

import atexit
import builtins
import os
import re
import runpy
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


class Program(NamedTuple):
    """What to run, and where."""

    args: tuple[str, ...]
    """As they follow `python`."""
    cwd: str
    env: dict[str, str]
    folder: str
    """Where its streams are: the files `in`, `out` and `err`."""
    limit: float
    """Seconds after which it is ended."""


def run_python(
    *args: Any,
    cwd: Path | str | None = None,
    env: dict[str, str] | None = None,
    stdin: str = "",
    limit: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """A finished program, with what it wrote.

    Raises:
        TimeoutError: It was still running after `limit` seconds, and was ended.
    """
    import ranks  # which imports torch

    command = tuple(map(str, args))
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        for stream, text in zip(streams, (stdin, "", ""), strict=True):
            stream.write_text(text)
        where = str(cwd or Path.cwd())
        program = Program(command, where, dict(env or os.environ), folder, limit)
        code = ranks.run_program(program)
        out, err = (stream.read_text() for stream in streams[1:])
    if code is None:
        raise TimeoutError(f"{command} was still running after {limit:g} s: {out}{err}")
    return subprocess.CompletedProcess([sys.executable, *command], code, out, err)


def be(program: Program, links: list[Connection]) -> NoReturn:
    """Becomes `program`, in a process that was forked for it."""
    code: object = 1
    try:
        _run(program, links)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    # What Python does at its end, but for freeing all of torch, which takes as long as a program.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(program: Program, links: list[Connection]) -> None:
    """Runs `program` as Python would."""
    for link in links:
        link.close()
    for number, name in enumerate(("in", "out", "err")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND
        os.dup2(os.open(Path(program.folder, name), flags), number)
    ours = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    paths = [path for path in sys.path if path not in ours]
    os.environ.clear()
    os.environ.update(program.env)
    os.chdir(program.cwd)
    args = _warn_as_told(list(program.args))
    given = list(filter(None, program.env.get("PYTHONPATH", "").split(os.pathsep)))
    kind, first = args[0], ""
    if kind not in ("-c", "-m"):
        first = str(Path(kind).resolve().parent)
    elif kind == "-m":
        first = program.cwd
    sys.path[:] = [first, *given, *paths]
    # An editable install whose folder was in our PYTHONPATH has been left out above.
    site.addsitedir(sysconfig.get_path("purelib"))
    if kind == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *args[2:]]
        module: Any = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(args[1], "<string>", "exec"), vars(module))
    else:
        sys.argv = args
        runpy.run_path(kind, run_name="__main__")


def _warn_as_told(args: list[str]) -> list[str]:
    """Takes the options of warnings, `-W ...`, off `args`, and heeds them."""
    warnings.filters[:] = [each for each in warnings.filters if each[0] != "error"]  # type: ignore[index]
    sys.warnoptions = []
    while args[0] == "-W":
        sys.warnoptions.append(args[1])
        action, message, category, *_ = [*args[1].split(":"), "", ""]
        kind = getattr(builtins, category or "Warning")
        warnings.filterwarnings(action, re.escape(message), kind)  # type: ignore[arg-type]
        args = args[2:]
    return args
