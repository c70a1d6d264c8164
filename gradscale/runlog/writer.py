"""Writing a run log without holding up what it is about.

`write()` puts a line into a queue. A thread encodes it and appends it to the file with one call of
the system, so a process that is killed leaves whole lines and at most one torn one. Nothing that
goes wrong with the file is an error in a step: lines are lost, with one warning.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradscale.errors import SettingError, caller_level
from gradscale.runlog.lines import encode
from gradscale.runlog.thinning import Thinning

try:
    import fcntl
except ImportError:  # Windows, where two processes that write one file are not noticed
    fcntl = None  # type: ignore[assignment]

MAX_STEPS = 100_000
"""Lines of applied steps that a file keeps unless another number is given."""
_WAITING = 10_000
"""Lines that can wait for the disk; further ones are lost. About 10 MB."""
_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)


def rank_file(path: str | os.PathLike[str], rank: int) -> Path:
    """Returns the path of the file of `rank` in the folder of a run."""
    return Path(path) / f"rank-{rank}.jsonl"


class RunLog:
    """Appends lines to the file of one rank, in a thread.

    A file has one writer: a second one, in this process or another, is refused. A forked process
    does not write and must open a log of its own. Lines in the queue are written by `close()`, when
    the log is garbage collected, and at exit.

    Args:
        path: The folder of the run; it is created if it does not exist.
        rank: The rank of the file.
        max_steps: Number of applied steps to keep, evenly thinned; all skipped steps are kept.

    Raises:
        SettingError: A setting is wrong, or another log writes to this file.
        OSError: The file cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int = 0, *, max_steps: int = MAX_STEPS
    ) -> None:
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 2:
            raise SettingError(f"max_steps must be a whole number >= 2, got {max_steps!r}.")
        # Absolute: the program may go to another folder, and thinning opens the file anew.
        self.path = rank_file(path, rank).absolute()
        self._writer = _Writer(self.path, max_steps)
        # At exit too. The writer, not the log: a function that refers to it would keep it alive.
        self._end = weakref.finalize(self, self._writer.close)

    @property
    def last_step(self) -> int:
        """Number of the last step in the file when it was opened; 0 if there was none."""
        return self._writer.thinning.last_step

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends `line`, which has a "kind" and must not be changed afterwards; never waits."""
        self._writer.put(line)

    def flush(self) -> None:
        """Writes the lines in the queue; **waits for the disk**."""
        self._writer.drain()
        self._writer.complain()

    def close(self) -> None:
        """Writes the lines in the queue and closes the log; later lines are ignored."""
        self._end()
        self._writer.complain()


class _Writer:
    """The queue, the thread and the file of a log."""

    def __init__(self, path: Path, max_steps: int) -> None:
        self.path = path
        self._queue: deque[Mapping[str, Any]] = deque()
        self._wake = threading.Event()
        self._busy = threading.Lock()
        """Held by who writes to the file."""
        self._owner: int | None = None
        """The thread that holds it."""
        self._ending = False
        """Whether it was to be closed by the thread that was writing."""
        self._thread: threading.Thread | None = None
        self._closed = self._forked = False
        self._why = ""
        self._complained = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_alone(path)
        self.thinning = Thinning(path, max_steps)
        self._torn = _ends_torn(path)
        """Whether the last line of the file has no end, so that one must come before the next."""
        _writers.add(self)

    # By the thread that trains.

    def put(self, line: Mapping[str, Any]) -> None:
        """Puts `line` into the queue."""
        if self._closed:
            if self._forked:
                self._fail(f"process {os.getpid()} was forked from the process that opened it")
                self.complain()
            return
        if len(self._queue) >= _WAITING:
            self._fail("the disk is too slow")
        else:
            self._queue.append(line)
        if self._thread is None or not self._thread.is_alive():
            self._start()
        self._wake.set()
        if self._why and not self._complained:
            self.complain()

    def _start(self) -> None:
        """Starts the thread; near the end of the interpreter writes at once instead."""
        thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._wake), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.drain()
        else:
            self._thread = thread

    def complain(self) -> None:
        """Warns once if something is wrong."""
        if self._why and not self._complained:
            self._complained = True
            warnings.warn(
                f"The run log {self.path} is incomplete: {self._why}. Training continues, and so "
                "does logging if possible. To start a new log, call log_to() with another folder.",
                stacklevel=caller_level(),
            )

    def close(self) -> None:
        """Writes what is in the queue and closes the file."""
        if self._closed:
            return
        if self._owner == threading.get_ident():
            # The log was collected while this very thread wrote a line: it closes when it is done.
            self._ending = True
            return
        self.drain()
        with self._busy:
            if self.is_over():  # by then
                return
            self._closed = True
            os.close(self._file)
        self._wake.set()  # the thread sees that it is over

    def leave(self) -> None:
        """In a forked process: lets go of the file, whose lock the parent must not share."""
        self._queue.clear()
        self._busy, self._wake, self._thread = threading.Lock(), threading.Event(), None
        if not self._closed:
            self._closed = self._forked = True
            os.close(self._file)

    # By whoever writes.

    def drain(self) -> None:
        """Writes every line that is in the queue."""
        while self._queue and not self._closed:
            with self._busy:
                self._owner = threading.get_ident()
                try:
                    if self._queue and not self._closed:
                        self._write(self._queue.popleft())
                finally:
                    self._owner = None
        with self._busy:
            pass  # another thread may be writing the last one
        if self._ending:
            self._ending = False
            self.close()

    def is_over(self) -> bool:
        """Whether the log is closed."""
        return self._closed

    def _write(self, line: Mapping[str, Any]) -> None:
        """Writes `line`, or notes why it is lost."""
        try:
            text = encode(line)
        except Exception as error:  # whatever it is, the thread must live on
            self._fail(f"a line cannot be encoded: {error}")
            return
        if self.thinning.is_full():
            try:
                self._thin()
            except OSError as error:
                self.thinning.failed()
                self._fail(f"it grows beyond max_steps: {error.strerror or error}")
        if not self.thinning.keeps(text):
            return
        try:
            if os.fstat(self._file).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the file was removed")
            self._append(text)
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _append(self, text: bytes) -> None:
        """Appends `text`; an OSError if not all of it could be written."""
        if self._torn:
            text = b"\n" + text
        written = os.write(self._file, text)
        if written:
            self._torn = written < len(text)
        if written < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _thin(self) -> None:
        """Puts a thinner file in the place of the old one."""
        new, file = self.thinning.new, None
        try:
            stride, count = self.thinning.rewrite()
            file = _locked(new)  # before another log can open it
            os.replace(new, self.path)
        except OSError:
            if file is not None:
                os.close(file)
            new.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._torn = file, False
        self.thinning.replaced(stride, count)

    def _fail(self, why: str) -> None:
        """Notes what is wrong, for the thread that trains to warn of."""
        self._why = self._why or why


def _serve(ref: weakref.ref[_Writer], wake: threading.Event) -> None:
    """Writes lines as they come, until the writer is closed or gone."""
    while True:
        wake.wait()
        wake.clear()
        writer = ref()
        if writer is None or writer.is_over():
            return
        writer.drain()
        del writer  # nothing may keep it alive while this waits


def _open_alone(path: Path) -> int:
    """A file to append to that no other log has open."""
    for attempt in range(2):
        try:
            while True:
                file = _locked(path)
                # The log that had it before may have put a thinner file in its place meanwhile.
                try:
                    if os.path.samestat(os.fstat(file), path.stat()):
                        return file
                except FileNotFoundError:
                    pass
                os.close(file)
        except BlockingIOError:
            if attempt:
                break
            # Perhaps that of a scaler that nobody refers to any more, as in a notebook.
            gc.collect()
    raise SettingError(
        f"A run log can have only one writer, but {path} is already open. Use a separate folder "
        "for each run, and set the rank of each process of a run (by torch.distributed, or the "
        "environment variable RANK)."
    )


def _locked(path: Path) -> int:
    """The file `path`, opened to append to and locked; a BlockingIOError if another log has it."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED:
            os.close(file)
            raise BlockingIOError(error.errno, "locked") from None
        # Some file systems have no locks. Then two writers are not noticed.
    return file


def _ends_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    with path.open("rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


_writers: weakref.WeakSet[_Writer] = weakref.WeakSet()


def _leave_all() -> None:
    """Lets go of every log, in a process that was forked."""
    for writer in list(_writers):
        writer.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)
