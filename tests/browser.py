"""A real headless Chromium, driven over the DevTools protocol through a pipe: no driver, no port, no dependency."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
PATIENCE_S = 30.0


class Browser:
    """One browser process with one page."""

    def __init__(self) -> None:
        if CHROMIUM is None:
            pytest.skip("no Chromium here: install it (apt-get install chromium) or name it in CHROMIUM")
        self._profile = tempfile.mkdtemp(prefix="joulery-browser-")
        child_reads, self._write = _pipe()
        self._read, child_writes = _pipe()
        null = (os.devnull, os.O_RDWR, 0)
        self._pid = os.posix_spawn(
            CHROMIUM,
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, *null),
                (os.POSIX_SPAWN_OPEN, 2, *null),
                (os.POSIX_SPAWN_DUP2, child_reads, 3),
                (os.POSIX_SPAWN_DUP2, child_writes, 4),
            ],
            setpgroup=0,
        )
        os.close(child_reads)
        os.close(child_writes)
        self._buffer = b""
        self._next_id = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._next_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size and wait until it has loaded."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url="about:blank")  # a page of before goes on asking a server that has ended
        self.wait("document.readyState === 'complete' && location.href === 'about:blank'")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression, awaited where it is asynchronous."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until the expression is true."""
        try:
            return wait_until(lambda: self.evaluate(expression), expression, PATIENCE_S)
        except TimeoutError as error:
            error.add_note(f"complaints: {self.complaints()}")
            raise

    def text(self, selector: str) -> str:
        """The visible text of the first element that matches."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def complaints(self) -> list[str]:
        """Errors of the page: exceptions, console errors, refused by policy, failed requests."""
        self.evaluate("1")
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
                found.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
                found.append(str(params["args"]))
        return found

    def requested(self) -> list[str]:
        """Every address the page asked for."""
        self.evaluate("1")
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self, path: Path, *, full: bool = True) -> None:
        """A picture of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        """End the browser and everything it started."""
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are clear of the numbers that the browser expects."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
