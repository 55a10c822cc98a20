"""sweep.html: its charts, its text, and no complaints from a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headless_chromium import DESK, PHONE, Chromium
from report_pages import Page, drawn, told

from mod_export.sweep.findings import points_of, stairs
from mod_export.sweep.schema import CellEntry, SweepReport
from mod_export.sweep.show import front_plot, render_html, speedup_plots, stair_plot


def words(report: SweepReport) -> str:
    return re.sub(r"\s+", " ", Page(render_html(report)).text)


def test_everything_lies_in_the_plot(whole: SweepReport) -> None:
    found = whole.findings
    plots = [*speedup_plots(points_of(whole.cells)), *map(stair_plot, found.stairs), *map(front_plot, found.fronts)]
    assert len(plots) == 5
    for plot in plots:
        positions = [float(at) for at in re.findall(r'(?:[xy][12]|c[xy])="([\d.e+-]+)%"', plot)]
        assert len(positions) > 20
        assert all(0 <= at <= 100 for at in positions)


def test_speedups_over_capacity(whole: SweepReport) -> None:
    (plot,) = speedup_plots(points_of(whole.cells))
    assert Page(plot).text.split()[-1] == "capacity"
    assert ("seq 128" in plot, "seq 512" in plot) == (True, True)
    short, (slow,) = drawn(plot, "series-0")[-2:], drawn(plot, "series-0 hollow")
    assert len(drawn(plot, "series-1 range")) == 3
    assert slow["cx"] - short[1]["cx"] == pytest.approx(2 * (short[1]["cx"] - short[0]["cx"]), abs=0.1)
    no_gain = drawn(plot, "one")[0]["y1"]
    assert short[0]["cy"] < no_gain < slow["cy"]


def test_over_length_where_there_is_one_capacity(cell: Any) -> None:
    (plot,) = speedup_plots(points_of([cell(8, seq=64), cell(16, seq=128)]))
    assert "sequence length" in plot
    assert "capacity 0.125" in plot
    assert [float(at) for at in re.findall(r'left:([\d.]+)%">(?:64|128)<', plot)] == [6.0, 94.0]
    # A single cell has no line.
    (plot,) = speedup_plots(points_of([cell(8)]))
    assert [mark["cx"] for mark in drawn(plot, "series-0") if "cx" in mark] == [50.0]


def test_values_that_cost_the_same_are_joined_and_the_largest_is_filled(cell: Any) -> None:
    (found,) = stairs(points_of([cell(8, 2.0), cell(16, 2.0), cell(32, 1.0)]))
    plot = stair_plot(found)
    lines = [mark for mark in drawn(plot, "series-0") if "x1" in mark]
    filled = [mark for mark in drawn(plot, "series-0") if "cx" in mark]
    assert [len(lines), len(filled), len(drawn(plot, "series-0 hollow"))] == [1, 2, 1]
    assert (lines[0]["x1"], lines[0]["x2"]) == (drawn(plot, "series-0 hollow")[0]["cx"], filled[0]["cx"])


def test_the_front_is_joined_and_the_dense_baseline_is_a_limit(whole: SweepReport) -> None:
    plot = front_plot(whole.findings.fronts[0])
    on_front = [mark["cx"] for mark in drawn(plot, "series-0") if "cx" in mark]
    (worse,) = drawn(plot, "series-0 hollow")
    (dense,) = drawn(plot, "one")
    assert len(on_front) == 2
    assert max(on_front) < dense["x1"] < worse["cx"]


def test_what_it_says(whole: SweepReport) -> None:
    html, text = render_html(whole), words(whole)
    for line in (
        "6 of 6 cells, every gate met",
        "seq 128: faster than dense up to capacity 0.125 (k 16); the next, 0.5, is not shown to be",
        "k 8, 16: 5.56 to 5.59 ms, the same within the intervals; choose 16",
        "seq 128, capacity 0.0625: 1.80x [1.78, 1.82]",
        "mod-export sweep tiny.pt --capacity 0.125,0.5",
        "never trained to send every token through every block",
    ):
        assert line in text
    assert [words.partition(" for ")[0] for words in told(html)] == [
        "speed-up over capacity", *["latency of MoD over k"] * 2, *["perplexity over latency"] * 2,
    ]  # fmt: skip
    assert len(re.findall(r"<tr", html[html.index('id="cells"') : html.index('id="reproduce"')])) == 7


def test_failures_come_first_and_names_are_text(
    cell: Any, failed: CellEntry, missed: CellEntry, report_of: Callable[..., SweepReport]
) -> None:
    report = report_of(cell(8), failed, missed, name="<script>alert(1)</script>\u202e")
    html, text = render_html(report), words(report)
    assert "3 of 3 cells: 1 could not be built, 1 missed a gate" in text
    assert text.index("stage <onnx>: refused") < text.index("Speed-up over the dense baseline")
    assert "<script>alert" not in html
    assert "\u202e" not in html
    assert [html.count(f'<span class="mark {state}">') for state in ("pass", "fail")] == [1, 2]
    assert "Nothing was measured yet." in words(report_of())


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "light"), (DESK, "dark")])
def test_the_page_is_quiet_alone_and_fits(
    chromium: Chromium, tmp_path: Path, whole: SweepReport, width: int, scheme: str
) -> None:
    page = tmp_path / "sweep.html"
    page.write_text(render_html(whole), encoding="utf-8")
    chromium.open(page, width, scheme)
    assert chromium.complaints() == []
    assert chromium.requests() == [page.as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate("document.querySelectorAll('svg').length") > 0
