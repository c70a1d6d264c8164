"""A headless Chromium, driven through its DevTools protocol over a pipe: no package is needed.

Chromium reads commands from file descriptor 3 and writes replies and events to 4, each a JSON
object that ends with a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60.0


def path_of_chromium() -> str | None:
    """Where a Chromium is; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab, and what has happened in it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        """Exceptions of scripts, messages of level error, and refusals of the page's policy."""
        self.requests: list[str] = []
        """Addresses that the page asked for, but its own."""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The reply to a command."""
        return self._browser.send(method, self._session, **params)

    def open(self, path: Path, *, width: int = 1400, dark: bool = False) -> float:
        """Opens a file; seconds until it has drawn."""
        self.errors, self.requests = [], []
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        began = time.perf_counter()
        self.send("Page.navigate", url=path.as_uri())
        end = time.monotonic() + TIMEOUT
        drawn = (
            "document.readyState === 'complete' && (document.querySelector('footer') !== null)"
            f" && location.href === {json.dumps(path.as_uri())}"
        )
        while not self.evaluate(drawn):
            if time.monotonic() > end:
                raise TimeoutError(f"{path} was not drawn; errors: {self.errors}")
            time.sleep(0.02)
        # Two frames: observers of sizes draw in the first.
        self.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")
        taken = time.perf_counter() - began
        self.requests = [url for url in self.requests if url != path.as_uri()]
        return taken

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        reply = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(reply["exceptionDetails"])
        return reply["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, *, clip: dict[str, float] | None = None) -> None:
        """Writes a PNG of the whole page, or of a part of it."""
        params: dict[str, Any] = {"format": "png", "captureBeyondViewport": True}
        if clip is not None:
            params["clip"] = {**clip, "scale": 1}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **params)["data"]))

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Keeps what matters of an event."""
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


class Browser:
    """A running Chromium."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._number, self._rest = 0, b""
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """A new tab."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        session = attached["sessionId"]
        page = self._pages[session] = Page(self, session)
        page.send("Page.enable")
        for domain in ("Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        return page

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The reply to a command; events that come before it go to their page."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return dict(reply["result"])
            page = self._pages.get(reply.get("sessionId", ""))
            if page is not None and "method" in reply:
                page.note(reply["method"], reply["params"])

    def _read(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._rest:
            if not select.select([self._replies], [], [], TIMEOUT)[0]:
                raise TimeoutError("Chromium does not answer.")
            more = os.read(self._replies, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended.")
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block; its profile is in the folder `profile`."""
    path = path_of_chromium()
    if path is None:
        raise FileNotFoundError(f"None of {', '.join(NAMES)} is installed.")
    theirs, commands = os.pipe()
    replies, theirs_out = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    quiet = ["--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage"]

    def place() -> None:
        # Away from 3 and 4 first: either may be one of the ends already.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs, theirs_out)]
        for end, number in zip(ends, (3, 4), strict=True):
            os.dup2(end, number)
            os.close(end)

    with warnings.catch_warnings():
        # jax, where another test has imported it, warns of every fork. This one calls exec at once.
        warnings.simplefilter("ignore", RuntimeWarning)
        process = subprocess.Popen(
            [path, *flags, *quiet, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            preexec_fn=place,
            close_fds=False,  # what Python opens is closed by exec anyway, but for 3 and 4
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    os.close(theirs)
    os.close(theirs_out)
    browser = Browser(commands, replies)
    try:
        yield browser
    finally:
        with contextlib.suppress(OSError, EOFError, TimeoutError, RuntimeError):
            browser.send("Browser.close")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(commands)
        os.close(replies)
