"""The page of a model: its text, its figure, and no complaints from a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from headless_chromium import DESK, PHONE, Chromium
from report_pages import drawn, told

from mod_export.inspect.layers import Layers
from mod_export.inspect.page import MOST_SITES, flops_chart, flops_scale, render_html
from mod_export.inspect.routed_text import RoutedText, routed_text
from mod_export.model.model import Model

Loaded = Callable[[str], Model]
Found = Callable[[str], Layers]
ALL = ["dense", "experts", "routed", "routed apart", "staged MoDE", "threshold"]


def page_of(loaded: Loaded, layers: Found, kind: str) -> str:
    model = loaded(kind)
    return render_html(model, layers(kind), routed_text(model, "import <b>this</b> & that"))


@pytest.mark.parametrize("kind", ALL)
def test_bars_are_as_long_as_flops(layers: Found, kind: str) -> None:
    found = layers(kind)
    chart = flops_chart(found)
    size, unit = flops_scale(found.most_flops)
    (end,) = re.findall(rf">([\d.]+) {unit}<", chart)
    for costs, paler in ((found.own, ""), (found.baseline, " faint")):
        for part in ("mlp", "attention", "head"):
            widths = [mark.get("width", 100.0) for mark in drawn(chart, f"part-{part}{paler}")]
            flops = [row.flops[part] for row in costs.rows if row.flops.get(part)] if costs else []
            assert widths == [pytest.approx(100 * count / size / float(end), abs=0.02) for count in flops]


def test_a_part_without_a_colour_has_that_of_others(layers: Found) -> None:
    found = layers("dense")
    row = found.own.rows[-1]
    other = type(row)(
        name="x", routed="", selected={}, flops={"convolution": 7}, needed_flops=7, weight_bytes=0, kv_bytes=0
    )
    costs = type(found.own)(rows=[row, other])
    chart = flops_chart(Layers(buckets=found.buckets, mod=dict.fromkeys(found.buckets, costs), dense=None))
    assert len(drawn(chart, "part-other")) == 1
    assert told(chart)[-1] == "x: 7 FLOP: convolution 7 FLOP"


def test_it_says_what_the_text_says(loaded: Loaded, layers: Found) -> None:
    page = page_of(loaded, layers, "routed")
    assert page.startswith("<!doctype html>\n")
    for text in ("Not causal: routing.selection=topk", "block by topk", "k of 256", "dense baseline", "25 tokens, "):
        assert text in page
    assert "<b>this</b>" not in page
    assert len(re.findall(r'<span class="t s', page)) == 25


def test_without_dense_baseline_and_map(loaded: Loaded, layers: Found) -> None:
    page = page_of(loaded, layers, "dense")
    assert "dense baseline" not in page
    assert "No map of a text: nothing is routed" in page


def test_where_a_text_is_from_and_what_was_cut(loaded: Loaded, layers: Found) -> None:
    model = loaded("routed")
    routed = routed_text(model, "y" * 300)
    assert routed is not None
    assert "44 more tokens at its end are left out" in render_html(model, layers("routed"), routed)
    named = RoutedText(source="notes.txt", left_out=0, map=routed.map)
    assert "From notes.txt, in reading order" in render_html(model, layers("routed"), named)


def test_more_routing_sites_than_can_be_read(loaded: Loaded, layers: Found) -> None:
    model = loaded("routed")
    routed = routed_text(model, "abc")
    assert routed is not None
    many = [routed.map.layers[0].model_copy(update={"layer": f"0.expert{e}"}) for e in range(MOST_SITES + 5)]
    routed = RoutedText(source="s", left_out=0, map=routed.map.model_copy(update={"layers": tuple(many)}))
    page = render_html(model, layers("routed"), routed)
    assert f"The first {MOST_SITES} routing sites; 5 more are left out." in page
    assert page.count('class="lane" data-lane=') == MOST_SITES


@pytest.mark.parametrize(("kind", "width"), [("dense", PHONE), ("routed", DESK), ("staged MoDE", PHONE)])
def test_the_page_is_quiet_and_fits(
    chromium: Chromium, tmp_path: Path, loaded: Loaded, layers: Found, kind: str, width: int
) -> None:
    page = tmp_path / "inspect.html"
    page.write_text(page_of(loaded, layers, kind), encoding="utf-8")
    chromium.open(page, width, "dark")
    assert chromium.complaints() == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    if kind != "dense":
        chromium.evaluate("document.querySelector('.map input[type=range]').focus()")
        chromium.press("ArrowRight")
        assert chromium.evaluate("document.querySelector('.map output').textContent").startswith("position 1, ")
