"""report.html in a real browser: no messages or requests, readable text, and controls for mouse and keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from headless_chromium import DESK, PHONE, Chromium
from sample_report import renamed

from mod_export.report import render_html
from mod_export.rows.report import BuildReport

Opened = Callable[..., Chromium]


@pytest.fixture
def opened(chromium: Chromium, tmp_path: Path) -> Opened:
    """Opens the page of a report."""

    def open_(report: BuildReport, width: int = DESK, scheme: str = "light") -> Chromium:
        page = tmp_path / "report.html"
        page.write_text(render_html(report), encoding="utf-8")
        chromium.open(page, width, scheme)
        return chromium

    return open_


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "light"), (PHONE, "dark"), (DESK, "light")])
def test_the_page_is_quiet_and_fits(
    opened: Opened, tmp_path: Path, failed_report: BuildReport, width: int, scheme: str
) -> None:
    chromium = opened(failed_report, width, scheme)
    chromium.evaluate(OPEN_ALL)
    assert chromium.complaints() == []
    assert chromium.requests() == [(tmp_path / "report.html").as_uri()]
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(TOO_WIDE) == []


def test_nothing_runs_that_the_page_does_not_hold(opened: Opened, report: BuildReport) -> None:
    name = "</title><script>document.title = 'run'</script><img src=x onerror=\"document.title='run'\">"
    chromium = opened(renamed(report, name))
    assert chromium.evaluate("document.scripts.length + document.images.length") == 1
    assert chromium.evaluate("document.querySelector('h1').textContent") == name
    assert chromium.evaluate("document.title").startswith("PASS: </title><script>")
    added = "document.head.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    assert chromium.evaluate(f"{added}; window.ran === undefined") is True
    assert any("Content Security Policy" in json.dumps(event) for event in chromium.complaints())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out(opened: Opened, failed_report: BuildReport, scheme: str) -> None:
    """WCAG 2.2 asks for a contrast of at least 4.5 for all text (1.4.3), and of 3 for marks of figures (1.4.11)."""
    chromium = opened(failed_report, DESK, scheme)
    assert chromium.evaluate(f"(() => {{ {COLORS} return {MARKS.strip()} }})()") == []
    chromium.evaluate(OPEN_ALL)
    for layer in ("all", "5"):
        chromium.evaluate(f"document.querySelector('.map input[value=\"{layer}\"]').click()")
        assert chromium.evaluate(f"(() => {{ {COLORS} return {CONTRAST.strip()} }})()") == []


def test_a_token_is_found_by_keyboard_and_by_pointing(opened: Opened, report: BuildReport) -> None:
    chromium = opened(report)
    chromium.evaluate("document.querySelector('.map input[type=range]').focus()")
    for _ in range(4):
        chromium.press("ArrowRight")
    (found,) = report.routing_maps
    label = chromium.evaluate(TOLD)
    layers = [f"layer {layer.layer}" for layer in found.layers if 4 in layer.routed]
    assert layers
    assert label.startswith(f"position 4, \u201c{found.tokens[4]}\u201d: ran in {', '.join(layers)} (scores: layer 1 ")
    for layer in found.layers:
        assert f"layer {layer.layer} {layer.scores[4]:.3f}{' +' if 4 in layer.routed else ''}" in label
    assert chromium.evaluate("document.querySelector('.map input[type=range]').getAttribute('aria-valuetext')") == label
    assert chromium.evaluate("[...document.querySelectorAll('.t')].findIndex(t => t.matches('.here'))") == 4
    chromium.press("End")
    assert chromium.evaluate(TOLD).startswith("position 127, ")

    chromium.point(*chromium.evaluate(BOX.replace("SELECTOR", ".t:nth-of-type(9)")))
    assert chromium.evaluate(TOLD).startswith("position 8, \u201cp\u201d: ")
    chromium.point(*chromium.evaluate(BOX.replace("SELECTOR", ".positions .lane:nth-child(2) .plot > svg")))
    assert chromium.evaluate(TOLD).startswith("position 64, ")
    cursor = "document.querySelector('.positions .cursor').getAttribute('x1')"
    assert chromium.evaluate(cursor) == f"{100 * 64.5 / 128}%"


def test_a_layer_is_chosen_by_keyboard(opened: Opened, report: BuildReport) -> None:
    chromium = opened(report)
    chromium.evaluate("document.querySelector('.map input[value=all]').focus()")
    chromium.press("ArrowRight")
    chromium.press("ArrowRight")
    lit = chromium.evaluate("[...document.querySelectorAll('.t')].flatMap((t, i) => t.matches('.on') ? [i] : [])")
    layer = report.routing_maps[0].layers[1]
    assert chromium.evaluate("document.querySelector('.map').dataset.layer") == str(layer.layer)
    assert tuple(lit) == layer.routed
    assert chromium.evaluate("document.querySelectorAll('.positions .lane:not(.off)').length") == 1


def test_a_sample_is_found_by_keyboard_and_by_pointing(opened: Opened, report: BuildReport) -> None:
    chromium = opened(report)
    chromium.evaluate(OPEN_ALL)
    chromium.evaluate("document.querySelector('[data-bins] input').focus()")
    chromium.press("ArrowRight")
    dense, mod = (next(row for row in report.latency if row.model == kind) for kind in ("dense", "mod"))
    description = f"sample 2: dense {dense.samples_ms[1]:.0f} ms, MoD {mod.samples_ms[1]:.0f} ms"
    assert chromium.evaluate("document.querySelector('[data-bins] output').textContent") == description
    chromium.point(*chromium.evaluate(BOX.replace("SELECTOR", "[data-bins] .plot > svg")))
    assert chromium.evaluate("document.querySelector('[data-bins] output').textContent").startswith("sample 16: dense ")


def test_without_a_baseline_the_page_fits_and_tells_samples(opened: Opened, alone_report: BuildReport) -> None:
    chromium = opened(alone_report, PHONE)
    chromium.evaluate(OPEN_ALL)
    assert chromium.complaints() == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= PHONE
    assert chromium.evaluate(TOO_WIDE) == []
    chromium.evaluate("document.querySelector('[data-bins] input').focus()")
    chromium.press("ArrowRight")
    description = f"sample 2: MoD {alone_report.latency[0].samples_ms[1]:.0f} ms"
    assert chromium.evaluate("document.querySelector('[data-bins] output').textContent") == description


def test_without_script_nothing_that_needs_it_is_shown(chromium: Chromium, opened: Opened, report: BuildReport) -> None:
    chromium("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened(report)
        assert chromium.evaluate("[...document.querySelectorAll('.controls')].some(c => c.checkVisibility())") is False
        assert chromium.evaluate("document.querySelector('.tokens').checkVisibility()") is True
        assert chromium.evaluate("document.querySelectorAll('.scores tbody tr').length") == 128
        assert chromium.complaints() == []
    finally:
        chromium("Emulation.setScriptExecutionDisabled", value=False)


def test_paper_shows_what_is_folded_on_the_screen(opened: Opened, report: BuildReport) -> None:
    chromium = opened(report, DESK, "dark")
    folded = "[...document.querySelectorAll('details:not(.bulk) > :not(summary)')]"
    hidden = f"document.body.offsetHeight; {folded}.filter(e => !e.checkVisibility() || !e.offsetHeight).length"
    assert chromium.evaluate(hidden) > 0
    was_open = chromium.evaluate("document.querySelectorAll('details[open]').length")
    chromium("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert chromium.evaluate(hidden) == 0
    assert chromium.evaluate("getComputedStyle(document.body).color") == "rgb(23, 32, 43)"
    chromium("Emulation.setEmulatedMedia", media="", features=[])
    assert chromium.pdf().startswith(b"%PDF-")
    assert chromium.evaluate("document.querySelectorAll('details[open]').length") == was_open


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_assistive_technology_finds_names_and_tables(opened: Opened, failed_report: BuildReport, width: int) -> None:
    chromium = opened(failed_report, width)
    chromium.evaluate(OPEN_ALL)
    nodes = chromium("Accessibility.getFullAXTree")["nodes"]
    by_role: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            by_role.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert len(by_role["table"]) == chromium.evaluate("document.querySelectorAll('table').length")
    for role in ("slider", "radio", "link", "image", "region", "columnheader", "rowheader"):
        assert by_role[role], role
        assert all(by_role[role]), role
    assert len(by_role["slider"]) == len(by_role["status"]) == 5


OPEN_ALL = "document.querySelectorAll('details').forEach(d => { d.open = true; })"
TOLD = "document.querySelector('.map output').textContent"
BOX = """
(() => {
  const e = document.querySelector('SELECTOR');
  e.scrollIntoView({block: 'center'});
  const box = e.getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
})()
"""
TOO_WIDE = """
[...document.querySelectorAll('td, th, pre, h1, summary, p, output, fieldset, .flag, .axis span')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('thead, .scroll'))
  .map(e => e.textContent)
"""
COLORS = """
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
const contrast = (one, other) => {
  const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
};
"""
CONTRAST = """
[...document.querySelectorAll('body *:not(title, script)')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(e => [contrast(rgb(getComputedStyle(e).color), behind(e)), e.textContent.trim().slice(0, 40)])
  .filter(([ratio]) => ratio < 4.5)
"""
MARKS = """
[...document.querySelectorAll('.point, .predicted, .mean, .median, .series, .quantile, .one, .gate, .control, '
  + '.bound, .ran, .roof, [class^=part-]:not(.faint), .key')]
  .map(e => {
    const style = getComputedStyle(e);
    const color = e.matches('.key') ? style.backgroundColor : style.stroke !== 'none' ? style.stroke : style.fill;
    return [contrast(rgb(color), behind(e.closest('section'))), e.getAttribute('class')];
  })
  .filter(([ratio]) => ratio < 3)
"""
