"""The section on generation of the page."""

from __future__ import annotations

import math
import re
from typing import Any

from report_pages import DRAWN, Page

from mod_export.report import render_html
from mod_export.results.generation import GenerationReport
from mod_export.results.report import BuildReport


def changed(report: BuildReport, **fields: Any) -> BuildReport:
    assert report.generation is not None
    return report.model_copy(update={"generation": report.generation.model_copy(update=fields)})


def without_parity(report: BuildReport) -> BuildReport:
    return report.model_copy(update={"parity": ()})


def section(report: BuildReport) -> str:
    (found,) = re.findall(r'<section aria-labelledby="generation">.*?</section>', render_html(report), flags=re.DOTALL)
    return str(found)


def words(html: str) -> str:
    return re.sub(r"\s+", " ", Page(html).text)


def test_the_section_tells_what_was_found(report: BuildReport) -> None:
    text = words(section(report))
    assert "Slots of a text: 64 in layers 1, 3." in text
    assert "ort-cpu, 1 text at once, 512 tokens: 1.62x [1.52, 1.73]" in text
    assert "ort-cpu, 8 texts at once, 512 tokens: 1.03x [0.96, 1.09]" in text
    assert "Perplexity 3.1377 when tokens are routed one at a time, 3.0938 with the checkpoint's own selection" in text
    assert "layer 3 12.4 %, 50 overflowed" in text
    assert section(report).count("inconclusive</span>") == 2


def test_the_answer_about_sampling_points_to_it(report: BuildReport) -> None:
    there = words(render_html(report))
    assert "Those that generate route one token at a time." in there
    assert "Speed-up of generation1.03x to 1.62xfaster in 1 of 2, inconclusive in 1 of 2 decode buckets" in there
    without = words(render_html(report.model_copy(update={"generation": GenerationReport(reason="no router")})))
    assert "Those that generate" not in without
    assert "Speed-up of generation" not in without


def test_without_generation_there_is_the_reason_or_nothing(report: BuildReport) -> None:
    one = report.model_copy(update={"generation": GenerationReport(reason="<b>topk</b> looks ahead")})
    assert "This build does not generate text: <b>topk</b> looks ahead" in words(section(one))
    old = render_html(report.model_copy(update={"generation": None}))
    assert 'id="generation"' not in old
    assert "#generation" not in old


def test_a_row_that_failed_is_a_warning(report: BuildReport) -> None:
    first = next(row for row in report.parity if row.role == "prefill")
    bad = first.model_copy(update={"passed": False, "reasons": ("cannot be run: <i>no</i>",)})
    html = section(report.model_copy(update={"parity": (bad, *(row for row in report.parity if row != first))}))
    assert '<div class="warning"><b>ort-cpu prefill b1s128 float32 MoD</b>' in html
    assert "cannot be run: &lt;i&gt;no&lt;/i&gt;" in html
    assert html.count('<span class="mark fail">fail</span>') == 2


def test_texts_that_are_not_pytorchs(report: BuildReport) -> None:
    assert report.generation is not None
    first, *rest = report.generation.texts
    other = first.model_copy(update={"identical": 3, "first_difference": 17})
    text = words(section(changed(report, texts=(other, *rest))))
    assert (
        "ort-cpu decode b1s512 float32 MoD: 1 of 4 texts differ from those of PyTorch, the first from new token 17 on."
        in text
    )


def test_a_model_without_text_or_routed_layers(report: BuildReport) -> None:
    text = words(section(changed(report, quality=None, capacity={})))
    assert "Not measured: no held-out text is known for this model's vocabulary." in text
    assert "Slots of a text" not in text


def test_what_was_not_timed_or_not_judged_has_dashes(report: BuildReport) -> None:
    for one in (changed(report, decode=(), first_token=(), texts=()), without_parity(report)):
        for table in re.findall(r"<table.*?</table>", section(one), flags=re.DOTALL):
            head, *rows = re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)
            assert {len(re.findall("<t[hd]", row)) for row in rows} == {len(re.findall("<th", head))}
    nothing = without_parity(changed(report, decode=(), first_token=(), texts=(), quality=None))
    assert "<table" not in section(nothing)


def test_numbers_that_are_not_finite_are_not_drawn(report: BuildReport) -> None:
    assert report.generation is not None
    row = report.generation.decode[0].model_copy(
        update={
            "ms": {"mod": math.nan, "dense": math.inf}, "tokens_per_second": {"mod": math.nan, "dense": math.inf},
            "measured": math.nan, "ci95": (math.nan, math.nan), "efficiency": math.nan, "predicted_bytes": math.nan,
            "predicted_ms": None, "selected": {"1": math.nan},
        }
    )  # fmt: skip
    page = Page(section(without_parity(changed(report, decode=(row,), texts=()))))
    assert "inconclusive" in page.text
    for tag, attributes, _ in page.elements:
        if tag in DRAWN:
            places = [str(attributes[name]) for name in ("x1", "x2", "cx", "x", "width") if name in attributes]
            assert all(0 <= float(place.removesuffix("%")) <= 100 for place in places if place.endswith("%"))
