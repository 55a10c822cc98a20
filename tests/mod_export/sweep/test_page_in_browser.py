"""sweep.html in a real browser: quiet, alone, and no wider than the screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_chromium import BROWSER, DESK, NAMES, PHONE, Chromium

from mod_export.sweep.html import render_html
from mod_export.sweep.schema import SweepReport

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser: none of {', '.join(NAMES)} is installed")
NOISY = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


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
    chromium: Chromium, tmp_path: Path, whole: SweepReport, width: int, scheme: str
) -> None:
    page = tmp_path / "sweep.html"
    page.write_text(render_html(whole), encoding="utf-8")
    chromium.open(page, width, scheme)
    assert [event for event in chromium.events if event["method"] in NOISY] == []
    asked = [
        event["params"]["request"]["url"] for event in chromium.events if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate("document.querySelectorAll('svg').length") > 0
