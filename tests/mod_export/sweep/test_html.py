"""sweep.html as text: self-contained, escaped, and the same numbers as the console. test_charts.py has the geometry."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from mod_export.sweep.html import render_html
from mod_export.sweep.schema import CellEntry, SweepReport


class Page(HTMLParser):
    """Every tag with its attributes, and the visible text. Fails on tags that are not closed in order."""

    VOID = ("meta", "link", "line", "circle", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += " ".join(data.split()) + "\n"


def test_one_page_that_asks_for_nothing(whole: SweepReport) -> None:
    html = render_html(whole)
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?://|<script|@import|url\(", html)
    loaded = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href")]
    assert [value for value in loaded if not str(value).startswith("data:")] == []


def test_what_it_says(whole: SweepReport) -> None:
    text = Page(render_html(whole)).text
    for line in (
        "6 of 6 cells, every gate met",
        "seq 128: faster than dense up to capacity 0.125 (k 16); the next, 0.5, is not",
        "k 8, 16: 5.56 to 5.59 ms, the same within the noise; take 16",
        "seq 128, capacity 0.0625: 1.80x [1.78, 1.82]",
        "mod-export sweep tiny.pt --capacity 0.125,0.5",
    ):
        assert line in text
    assert "never trained to send every token through every block" in text


def test_every_chart_has_its_text(whole: SweepReport) -> None:
    charts = [attrs for tag, attrs in Page(render_html(whole)).tags if tag == "svg" and "role" in attrs]
    assert [str(attrs["aria-label"]).partition(" for ")[0] for attrs in charts] == [
        "speed-up over capacity",
        "latency of MoD over k",
        "latency of MoD over k",
        "perplexity over latency",
        "perplexity over latency",
    ]


def test_failures_come_first(
    cell: Any, failed: CellEntry, missed: CellEntry, report_of: Callable[..., SweepReport]
) -> None:
    page = Page(render_html(report_of(cell(8), failed, missed)))
    assert "3 of 3 cells: 1 could not be built, 1 missed a gate" in page.text
    assert page.text.index("stage <onnx>: refused") < page.text.index("Speed-up over the dense twin")


def test_nothing_measured_yet(report_of: Callable[..., SweepReport]) -> None:
    assert "Nothing was measured yet." in Page(render_html(report_of())).text


def test_names_from_outside_are_text(cell: Any, report_of: Callable[..., SweepReport]) -> None:
    html = render_html(report_of(cell(8, name="x"), name="<script>alert(1)</script>\u202e"))
    assert "<script>" not in html
    assert "\u202e" not in html
