"""A headless browser for tests, spoken to through its own debugging pipe: no driver, no further package.

`find()` is the path of a Chromium or Chrome on this machine. `Browser(path)` starts it; `open` loads a page at a
width and returns what happened: requests, console messages, what sticks out sideways.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
TIMEOUT_S = 60.0

OVERFLOW = """(() => {
  const wide = document.documentElement.clientWidth, found = [];
  for (const e of document.body.querySelectorAll('*')) {
    if (e.closest('.scroll') && !e.matches('.scroll')) continue;
    if (e.closest('svg') && !e.matches('svg')) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > wide + 0.5 || box.left < -0.5))
      found.push(e.tagName + ' ' + Math.round(box.left) + '..' + Math.round(box.right));
  }
  return JSON.stringify({scroll: document.documentElement.scrollWidth, wide: wide, found: found.slice(0, 9)});
})()"""


def find() -> str | None:
    """The browser of `LINATTN_BROWSER`, else the first one on the path that starts at all."""
    if "LINATTN_BROWSER" in os.environ:
        return os.environ["LINATTN_BROWSER"]
    return next((path for path in map(shutil.which, NAMES) if path is not None and _starts(path)), None)


def _starts(path: str) -> bool:
    """Some systems have only a stub that tells how to install the browser."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=TIMEOUT_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@dataclass
class Visit:
    """What loading a page did."""

    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    scroll_width: int = 0
    client_width: int = 0
    sticking_out: list[str] = field(default_factory=list)
    png: bytes = b""


class Browser:
    """One headless browser; a context manager."""

    def __init__(self, path: str, profile: Path) -> None:
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # High numbers, so that 3 and 4 of the child are never the ends that are copied onto them.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
        null = os.open(os.devnull, os.O_RDWR)
        words = [
            *(path, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
            # Containers often have no namespaces for a sandbox, and the pages are our own.
            *("--hide-scrollbars", "--no-sandbox"),
        ]
        actions = [(os.POSIX_SPAWN_DUP2, ends[0], 3), (os.POSIX_SPAWN_DUP2, ends[1], 4)]
        actions += [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        environment = {**os.environ, "HOME": str(profile)}
        self._pid = os.posix_spawn(path, words, environment, file_actions=actions)
        for end in (theirs_in, theirs_out, null, *ends):
            os.close(end)
        self._in, self._out = ours_in, ours_out

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        for end in (self._in, self._out):
            os.close(end)
        deadline = time.monotonic() + 10
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, 9)
                deadline = float("inf")
            time.sleep(0.05)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for found in self._messages():
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return dict(found["result"])
            self._events.append(found)
        raise AssertionError("unreachable")

    def wait_for(self, event: str) -> None:
        """Until an event came, now or before."""
        if any(found.get("method") == event for found in self._events):
            return
        for found in self._messages():
            self._events.append(found)
            if found.get("method") == event:
                return

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" in self._buffer:
                text, self._buffer = self._buffer.split(b"\0", 1)
                yield json.loads(text)
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {TIMEOUT_S} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise OSError("the browser is gone")
            self._buffer += data

    def open(self, url: str, *, width: int, height: int, phone: bool = False) -> Visit:
        """Load a page at a size, and look."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self._events.clear()
        self.call("Page.navigate", session, url=url)
        self.wait_for("Page.loadEventFired")
        # Whatever a page does late it does within a moment: it has no script.
        self.call("Runtime.evaluate", session, expression="new Promise(r => setTimeout(r, 200))", awaitPromise=True)
        found = json.loads(self.call("Runtime.evaluate", session, expression=OVERFLOW)["result"]["value"])
        whole = self.call("Page.captureScreenshot", session, format="png", captureBeyondViewport=True)
        visit = Visit(
            scroll_width=found["scroll"],
            client_width=found["wide"],
            sticking_out=found["found"],
            png=base64.b64decode(whole["data"]),
        )
        for event in self._events:
            method, data = event.get("method"), event.get("params", {})
            if method == "Network.requestWillBeSent":
                visit.requests.append(data["request"]["url"])
            elif method == "Log.entryAdded":
                visit.messages.append(f"{data['entry']['level']}: {data['entry']['text']}")
            elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                visit.messages.append(json.dumps(data)[:300])
        self.call("Target.closeTarget", targetId=target)
        return visit

    def evaluate(self, url: str, expression: str) -> Any:
        """The value of an expression on a page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        self._events.clear()
        self.call("Page.navigate", session, url=url)
        self.wait_for("Page.loadEventFired")
        found = self.call("Runtime.evaluate", session, expression=expression, returnByValue=True)
        self.call("Target.closeTarget", targetId=target)
        return found["result"].get("value")
