"""report.html in a real browser, driven over the DevTools pipe: two file descriptors and JSON, no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from mod_export.report import BuildReport, render_html

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for found in map(shutil.which, NAMES) if found), None)
PHONE, DESK = 390, 1200
PATIENCE_S = 60

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed")


class Chromium:
    """One headless page. Events that come while waiting for an answer are kept in `events`."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        pipes = (*os.pipe(), *os.pipe())
        # 3 and 4 are where Chromium looks, and the pipes may lie there, so they are moved out of the way first.
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
        return found["result"]["value"]

    def open(self, page: Path, width: int, scheme: str) -> None:
        for domain in ("Page", "Network", "Log", "Runtime"):
            self(f"{domain}.enable")
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width == PHONE)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self("Page.navigate", url=page.as_uri())
        self.wait_for("Page.loadEventFired")

    def screenshot(self, path: Path) -> None:
        image = self("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=PATIENCE_S)
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        try:
            browser.attach()
        except (AssertionError, BrokenPipeError) as error:
            pytest.skip(f"{BROWSER} cannot be driven here: {str(error).splitlines()[:1]}")
        yield browser


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_quiet_and_fits(
    chromium: Chromium, tmp_path: Path, report: BuildReport, width: int, scheme: str
) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    chromium.open(page, width, scheme)

    assert [
        event for event in chromium.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")
    ] == []
    asked = [
        event["params"]["request"]["url"] for event in chromium.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    too_wide = "[...document.querySelectorAll('td, th, pre, h1, summary, p, .axis span')]"
    too_wide += (
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('thead')).map(e => e.textContent)"
    )
    assert chromium.evaluate(too_wide) == []


def test_a_name_made_of_markup_runs_nothing(chromium: Chromium, tmp_path: Path, report: BuildReport) -> None:
    name = "</title><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"
    page = tmp_path / "report.html"
    named = report.model_copy(update={"model": report.model.model_copy(update={"name": name})})
    page.write_text(render_html(named), encoding="utf-8")
    chromium.open(page, DESK, "light")
    assert chromium.evaluate("document.scripts.length + document.images.length") == 0
    assert chromium.evaluate("document.querySelector('h1').textContent") == name
    assert chromium.evaluate("document.title").startswith("PASS: </title><script>")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(
    chromium: Chromium, tmp_path: Path, failed_report: BuildReport, scheme: str
) -> None:
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5 for every piece of text."""
    page = tmp_path / "report.html"
    page.write_text(render_html(failed_report), encoding="utf-8")
    chromium.open(page, DESK, scheme)
    assert chromium.evaluate(CONTRAST) == []


CONTRAST = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.slice(0, 3).map(c => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const color = rgb(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) poor.push(`${e.textContent.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return poor;
})()
"""
