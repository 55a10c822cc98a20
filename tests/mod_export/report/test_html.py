"""report.html as text: complete, self-contained, accessible, and safe with names that come from outside."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser

import pytest

from mod_export.report import BuildReport, render_html
from mod_export.report.parity_entries import InputAgreement
from mod_export.report.wording import interval_text

Renamed = Callable[[BuildReport, str], BuildReport]
VOID = {"meta", "link", "br"}
DRAWN = {"line", "rect", "circle"}


class Page(HTMLParser):
    """Every element with its attributes and ancestors; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def without(report: BuildReport, *fields: str) -> BuildReport:
    return report.model_copy(update=dict.fromkeys(fields, ()))


def test_the_page_tells_everything(report: BuildReport) -> None:
    text = re.sub(r"\s+", " ", Page(render_html(report)).text)
    for artifact in report.artifacts:
        assert artifact.path in text
        assert f"{artifact.bytes:,}" in text
        assert artifact.sha256 in text
    for row in report.speedup:
        assert f"{row.target} {row.bucket} {row.dtype}" in text
        assert interval_text(row) in text
    for target in report.targets:
        assert target.ran or target.reason in text
    assert report.model.checkpoint_sha256 in text
    assert str(report.environment["cpu"]) in text


def test_the_verdict_comes_first_and_reasons_are_complete(report: BuildReport, failed_report: BuildReport) -> None:
    passed, failed = Page(render_html(report)).text, Page(render_html(failed_report)).text
    assert "PASS: medium, mod-export report" in passed
    assert passed.index("Every gate was met in 4 settings") < passed.index("What to deploy")
    assert "Fail, for 2 reasons" in failed
    for reason in failed_report.verdict.reasons:
        assert failed.index(reason) < failed.index("What to deploy")
    one = failed_report.verdict.model_copy(update={"reasons": failed_report.verdict.reasons[:1]})
    assert "Fail, for 1 reason<" in render_html(failed_report.model_copy(update={"verdict": one}))


def test_the_page_needs_nothing_from_outside(report: BuildReport) -> None:
    html = render_html(report)
    page = Page(html)
    assert not {tag for tag, _, _ in page.elements} & {"script", "iframe", "img", "object", "embed", "base", "form"}
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert all(str(anchor["href"]).startswith("#") for anchor in page.all("a"))
    assert re.findall(r"(?:https?:)?//[\w.]+|url\(|@import|@font-face", html) == []
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert "prefers-color-scheme: dark" in html


def test_every_link_of_the_page_has_a_target(report: BuildReport) -> None:
    page = Page(render_html(report))
    names = {attributes.get("id") for _, attributes, _ in page.elements}
    assert {str(anchor["href"]).removeprefix("#") for anchor in page.all("a")} <= names
    assert {section["aria-labelledby"] for section in page.all("section")} <= names


def test_charts_and_tables_can_be_heard(report: BuildReport) -> None:
    page = Page(render_html(report))
    assert page.all("html") == [{"lang": "en"}]
    charts = [attributes for _, attributes, above in page.elements if attributes.get("role") == "img"]
    assert len(charts) == len(report.speedup) + len(report.latency) + len(report.cost)
    assert all(chart["aria-label"] for chart in charts)
    headed = sum(1 for tag, _, above in page.elements if tag == "thead")
    assert headed == len(page.all("table"))
    for head in page.all("th"):
        assert (head["scope"], head["role"]) in {("col", "columnheader"), ("row", "rowheader")}
    assert all(cell["data-label"] for cell in page.all("td"))
    assert sum(tag == "h1" for tag, _, _ in page.elements) == 1


def test_every_row_has_as_many_cells_as_its_head(report: BuildReport, failed_report: BuildReport) -> None:
    for one in (report, failed_report):
        for table in re.findall(r"<table.*?</table>", render_html(one), flags=re.DOTALL):
            head, *rows = re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)
            width = len(re.findall("<th", head))
            assert rows
            assert {len(re.findall("<t[hd]", row)) for row in rows} == {width}


def test_coordinates_stay_inside_the_chart(report: BuildReport, failed_report: BuildReport) -> None:
    for one in (report, failed_report):
        for tag, attributes, _ in Page(render_html(one)).elements:
            if tag in DRAWN:
                places = [str(attributes[name]) for name in ("x1", "x2", "cx", "x", "width") if name in attributes]
                assert all(0 <= float(place.removesuffix("%")) <= 100 for place in places), attributes


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "a & b", "</style><b>"]
)
def test_names_are_text(report: BuildReport, renamed: Renamed, name: str) -> None:
    html = render_html(renamed(report, name))
    assert Page(html).text.count(name) == 2
    assert {tag for tag, _, _ in Page(html).elements} == {tag for tag, _, _ in Page(render_html(report)).elements}


def test_every_string_of_a_report_is_escaped(report: BuildReport) -> None:
    hostile = "<script>x</script>"
    text = report.to_json()
    for old in ("mod_transformer", "AMD EPYC", "engines/ort-cpu", "CPUExecutionProvider", "torch eager", "medium.pt"):
        assert old in text
        text = text.replace(old, hostile)
    text = (
        text.replace("no NVIDIA GPU;", hostile)
        .replace('"capacity"', f'"{hostile}"')
        .replace('"warmup": 5', '"warmup": 5')
    )
    html = render_html(BuildReport.model_validate_json(text))
    assert hostile not in html
    assert html.count("&lt;script&gt;") >= 8


def test_control_characters_do_not_reach_the_page(report: BuildReport, renamed: Renamed) -> None:
    html = render_html(renamed(report, "a\x00\u202eb\ud800"))
    assert "<h1>a\\x00\\u202eb\\ud800</h1>" in html
    assert html.encode("utf-8")


def test_the_way_to_repeat_it_is_exact(report: BuildReport) -> None:
    html = render_html(report)
    blocks = [unescape(block) for block in re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)]
    assert blocks[0] == report.command
    assert tomllib.loads(blocks[-2]) == report.config
    assert json.loads(blocks[-1]) == report.model.spec
    asked = render_html(report, command="mod-export build other.pt")
    assert "mod-export build other.pt" in asked
    assert str(report.command) not in asked
    assert "This build was made with" not in render_html(report.model_copy(update={"command": None}))


def test_absent_configuration_values_are_left_out(report: BuildReport) -> None:
    config = {**report.config, "nothing": None, "latency": {"samples": 5, "device": None}}
    html = render_html(report.model_copy(update={"config": config}))
    blocks = [unescape(block) for block in re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)]
    assert tomllib.loads(blocks[-2])["latency"] == {"samples": 5}


def test_what_was_not_measured_is_said(report: BuildReport) -> None:
    empty = without(report, "parity", "latency", "speedup", "cost", "artifacts", "targets", "stages")
    text = Page(render_html(empty)).text
    for sentence in (
        "There is nothing to deploy.",
        "No speed-up was measured on this machine.",
        "No latency was measured on this machine.",
        "Parity was not checked on this machine.",
        "No cost was counted.",
        "Every known target ran on this machine.",
    ):
        assert sentence in text


def test_a_single_setting_reads_well(report: BuildReport) -> None:
    one = report.model_copy(
        update={"speedup": report.speedup[:1], "parity": report.parity[:1], "latency": report.latency[:2]}
    )
    html = render_html(one)
    assert "Every gate was met in 1 setting on this machine." in html
    assert "<dd>1.52x<small>median latency, all 1 setting</small></dd>" in html


def test_a_failing_layer_is_open_and_others_are_closed(failed_report: BuildReport) -> None:
    html = render_html(failed_report)
    (opened,) = re.findall(r"<details open>\s*<summary>(.*?)</summary>", html)
    assert opened.startswith("inductor b1s512 float32: 6 routed layers against torch eager float32")
    assert "253 of 256" in html


def test_agreement_by_input_is_shown(report: BuildReport) -> None:
    row = report.parity[0]
    by_input = (InputAgreement(input="text", routed=96, agreed=95), InputAgreement(input="ties", routed=96, agreed=96))
    routing = row.routing.model_copy(update={"by_input": by_input})
    html = render_html(report.model_copy(update={"parity": (row.model_copy(update={"routing": routing}),)}))
    assert "Routed alike by input: text 95 of 96, ties all 96." in html
    assert "Routed alike by input, over all settings: text 95 of 96, ties all 96; " in html
