"""The panel of `gradscale run`: two lines at the bottom of the terminal while a script trains.

The script goes on to write to the terminal as it likes, progress bars included. So the two lines
are not part of what scrolls: the terminal scrolls only the lines above them.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from gradscale.report.curves import CURVES, optimizer_steps
from gradscale.report.words import printable, scale_text, title_of

HEIGHT = 2
INTERVAL = 0.5
"""Seconds between two drawings."""
SAVE, RESTORE, RESET_REGION = "\x1b7", "\x1b8", "\x1b[r"
_ENDS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)


class Panel:
    """Scale, headroom, skips, speed and the last finding, from the lines of a log."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._steps = self._skipped = 0
        self._scale: float | None = None
        self._headroom: float | None = None
        self._finding = ""
        self._times: deque[float] = deque(maxlen=50)
        self._size: os.terminal_size | None = None
        self._over = threading.Event()
        self._drawing = threading.Lock()

    @staticmethod
    def can_show(descriptor: int = 2) -> bool:
        """Whether stderr is a terminal with room for it."""
        try:
            if not os.isatty(descriptor) or os.environ.get("TERM", "dumb") == "dumb":
                return False
            size = os.get_terminal_size(descriptor)
        except OSError:
            return False
        return size.columns >= 40 and size.lines >= 3 * HEIGHT

    def take(self, line: Mapping[str, Any]) -> None:
        """Takes a line of the log."""
        if line["kind"] == "step":
            self._steps += 1
            self._skipped += any(not step["applied"] for step in optimizer_steps(line))
            self._scale = CURVES["scale"](line)
            headroom = CURVES["headroom"](line)
            self._headroom = self._headroom if headroom is None else headroom
            self._times.append(time.monotonic())
        elif line["kind"] == "finding":
            found = line["finding"]
            place = f" in {found['where']}" if found["where"] else ""
            self._finding = f"{title_of(found['kind'])}{place}: {found['evidence']}"

    def text(self) -> list[Text]:
        """The lines of the panel."""
        if not self._steps:
            return [Text("gradscale: waiting for the first step", style="dim"), Text("")]
        span = self._times[-1] - self._times[0]
        speed = f"{(len(self._times) - 1) / span:.3g} steps/s" if span > 0 else ""
        room = "-" if self._headroom is None else f"{self._headroom:.1f}"
        parts = [  # 80 columns hold all of it
            f"scale {scale_text(self._scale)}",
            f"headroom {room}",
            f"skipped {self._skipped:,} of {self._steps:,}",
            speed,
        ]
        first = Text("gradscale  ", style="bold")
        first.append("  ".join(part for part in parts if part), style="not bold")
        return [first, Text(self._finding or "no findings so far", style="dim")]

    def start(self) -> None:
        """Draws it from now on, in a thread of its own."""
        self._process = os.getpid()
        for number in _ENDS:
            # Else the terminal would keep its shorter page. A script that handles the signal itself
            # takes this away.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._end)
        self._draw()
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        """Gives the whole terminal back. Can be called again."""
        with self._drawing:
            size, self._size = self._size, None
            self._over.set()
            if size is not None:
                top = f"\x1b[{size.lines - HEIGHT + 1};1H"
                self._write(f"{SAVE}{RESET_REGION}{top}\x1b[J{RESTORE}")

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Ends the process by the signal, as if there were no handler."""
        # The thread may be drawing, and this handler may have interrupted stop(). A forked process
        # has no panel to end.
        if os.getpid() == self._process and self._drawing.acquire(timeout=1.0):
            self._drawing.release()
            self.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _serve(self) -> None:
        """Draws until it is over."""
        while not self._over.wait(INTERVAL):
            self._draw()

    def _draw(self) -> None:
        """Draws the two lines, wherever the cursor is."""
        with self._drawing:
            if self._over.is_set():
                return
            try:
                size = os.get_terminal_size(self._descriptor)
            except OSError:
                return
            out = ""
            if size != self._size:
                room = "\n" * HEIGHT if self._size is None else ""
                region = f"{SAVE}\x1b[1;{size.lines - HEIGHT}r{RESTORE}"
                out += f"{room}{region}" + (f"\x1b[{HEIGHT}A" if room else "")
                self._size = size
            out += SAVE
            for number, line in enumerate(self.text()):
                row = size.lines - HEIGHT + 1 + number
                out += f"\x1b[{row};1H\x1b[2K{_rendered(line, size.columns)}"
            self._write(out + RESTORE)

    def _write(self, text: str) -> None:
        """Writes in one piece, so that nothing of the script comes in between."""
        try:
            sys.stderr.flush()
            os.write(self._descriptor, text.encode(errors="replace"))
        except (OSError, ValueError, AttributeError):
            self._over.set()  # the terminal is gone


def _rendered(line: Text, width: int) -> str:
    """One line with its style, cut to the width."""
    line.truncate(width - 1, overflow="ellipsis")
    # Of what a log holds, no character may move the cursor.
    line.plain = printable(line.plain)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False)
    with console.capture() as captured:
        console.print(line, end="", no_wrap=True)
    return captured.get()
