"""A headless Chromium that shows pages: for tests of what a reader sees, where it is installed."""

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")


class Tab:
    """One page, by the DevTools protocol: a message is JSON and ends with a zero byte."""

    def __init__(self, requests: BinaryIO, replies: BufferedReader) -> None:
        self._requests, self._replies = requests, replies
        self._number, self._left = 0, b""
        self._events: list[dict[str, Any]] = []
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        # Pages keep colours that were chosen; every visit here is a first one.
        first = "try { localStorage.clear() } catch {}"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=first)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method. Raises if there is an error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._requests.write(json.dumps(message).encode() + b"\0")
        self._requests.flush()
        while (found := self._next()).get("id") != self._number:
            self._events.append(found)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        result: dict[str, Any] = found["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = self._replies.read1(2**16)
            if not piece:
                raise EOFError("the browser ended")
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def show(self, path: Path, width: int, *, dark: bool = False) -> list[str]:
        """Loads a file in a window of some width. Returns errors of its scripts and of what it loads."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        colours = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=colours)
        self._events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())
        return [
            json.dumps(event["params"])
            for event in self._events
            if event["method"] == "Runtime.exceptionThrown"
            or (
                event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"
            )
        ]

    def evaluate(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def photograph(self, path: Path) -> None:
        """Writes a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A browser of its own, with one page. `profile` is an empty folder."""
    to_browser, from_browser = os.pipe(), os.pipe()
    redirected = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
    process = subprocess.Popen(
        ["bash", "-c", redirected, "bash", CHROMIUM, *options, f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    with os.fdopen(to_browser[1], "wb") as requests, os.fdopen(from_browser[0], "rb") as replies:
        try:
            yield Tab(requests, replies)
        finally:
            process.kill()
            process.wait()


def brightness(colour: str) -> float:
    """The brightness of `rgb(r, g, b)`, from 0 to 1."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 / 255
