"""A real browser, controlled over the DevTools pipe with two file descriptors and JSON, without a library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for found in map(shutil.which, NAMES) if found), None)
PHONE, DESK = 390, 1200
PATIENCE_S = 60
NOISY = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Chromium:
    """One headless page. Events that arrive while it waits for an answer are kept in `events`."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        pipes = (*os.pipe(), *os.pipe())
        # Chromium uses file descriptors 3 and 4. The pipes may have these numbers, so they are moved first.
        to_read, self._write, self._read, to_write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in pipes)
        for fd in pipes:
            os.close(fd)
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, BROWSER, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None

    def attach(self) -> None:
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, event: str) -> None:
        while not any(item["method"] == event for item in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            assert ready, f"the browser has been silent for {PATIENCE_S} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def evaluate(self, expression: str) -> Any:
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, page: Path, width: int, scheme: str) -> None:
        self.visit(page.as_uri(), width, scheme)

    def visit(self, url: str, width: int, scheme: str) -> None:
        for domain in ("Page", "Network", "Log", "Runtime"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width == PHONE)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def complaints(self) -> list[dict[str, Any]]:
        """Messages that the page wrote to its console or log since it was opened."""
        return [event for event in self.events if event["method"] in NOISY]

    def requests(self) -> list[str]:
        """Addresses that the page requested since it was opened, except data URLs."""
        sent = (event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [url for url in (params["request"]["url"] for params in sent) if not url.startswith("data:")]

    def press(self, key: str) -> None:
        """Presses one key, as the keyboard sends it."""
        codes = {"ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "Tab": 9, " ": 32}
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def point(self, x: float, y: float) -> None:
        """Moves the mouse to a place in the window."""
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, size: tuple[int, int]) -> None:
        """Saves the top left corner of the page as PNG; `size` is (width, height) in pixels."""
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        image = self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))

    def pdf(self) -> bytes:
        """Prints the page."""
        return base64.b64decode(self("Page.printToPDF", printBackground=True)["data"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=PATIENCE_S)
        os.close(self._write)
        os.close(self._read)
