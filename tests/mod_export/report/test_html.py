"""report.html as text: complete, self-contained, accessible, and safe with names from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import tomllib
from html import unescape
from typing import Any

from report_pages import DRAWN, Page
from sample_report import NO_BASELINE, renamed
from sample_rows import changed, parity_row, precision_row

from mod_export.report import render_html
from mod_export.report.wording import error_text, interval_text
from mod_export.rows.base import FailedRow
from mod_export.rows.correctness import InputAgreement, OutputParity
from mod_export.rows.report import BuildReport
from mod_export.rows.speed import GenerationReport


def words(html: str) -> str:
    return re.sub(r"\s+", " ", Page(html).text)


def test_without_a_baseline_nothing_dense_is_shown(alone_report: BuildReport) -> None:
    html = render_html(alone_report)
    text = words(html)
    assert "No speed-up is claimed: there is no dense baseline." in text
    assert f"Speed-up over the dense baseline Not compared: {NO_BASELINE}." in text
    medians = sorted(row.p50_ms for row in alone_report.latency)
    assert f"Latency{medians[0]:.0f} to {medians[-1]:.0f} msmedians of the settings" in text
    for absent in ("Dense baseline:", "against dense", "dense predicted", "contribution", "compared with its dense"):
        assert absent not in text
    assert "bar dense" not in html
    page_text = words(render_html(changed(alone_report, latency=alone_report.latency[:1])))
    assert f"Latency{alone_report.latency[0].p50_ms:.0f} msmedian Routing" in page_text


def test_of_a_model_that_reads_no_tokens_nobody_asks_for_text(report: BuildReport) -> None:
    (routing_map,) = report.routing_maps
    numbered = changed(routing_map, tokens=tuple(map(str, range(len(routing_map.tokens)))))
    causality = tuple(changed(row, suffixes=0, causal=True, statement="not probed: ...") for row in report.causality)
    model = changed(report.model, reads_tokens=False)
    images = changed(report, model=model, causality=causality, generation=None, routing_maps=(numbered,))
    html = render_html(images)
    text = words(html)
    for absent in ("autoregressive", "Causality", "Generation", "Held-out text in reading order", "Routing of a text"):
        assert absent in words(render_html(report))
        assert absent not in text
    assert "Routing of a sample The first sample, a number for each token, as the reference routes it." in text
    assert re.search(r">0</span> <span[^>]*>1</span> ", html)
    # With embeddings instead of tokens, causality was probed, but there is nothing to sample.
    probed = words(render_html(changed(images, causality=report.causality)))
    assert "Causality The end of a text was changed" in probed
    assert "May it be used" not in probed


def test_a_model_without_a_known_selection_is_told_so(report: BuildReport) -> None:
    unrouted = tuple(changed(row, routing=parity_row().routing) for row in report.parity)
    text = words(render_html(changed(report, parity=unrouted)))
    assert "Routing, layer by layer No routing site was found, so no selection is judged by itself; if the" in text
    assert "No routing site" not in words(render_html(report))


def test_perplexity_stands_beside_the_one_that_its_gate_compares(report: BuildReport) -> None:
    """With integer weights, that is PyTorch's with its own selection; the text may be Python's documentation."""
    row = next(row for row in report.parity if row.text)
    assert row.text is not None
    text = changed(row.text, reference_perplexity=18.5, own_perplexity=17.5)
    wide, narrow = changed(row, text=text), changed(row, text=text, dtype="int8")
    for parity, told, notes in (
        ((wide,), "real text, given the same routing; gate", (True, False)),
        ((narrow,), "real text, int8 with each model's own routing; gate", (False, True)),
        ((wide, narrow), "real text, given the same routing, int8 with each model's own routing; gate", (True, True)),
    ):
        page = words(render_html(changed(report, parity=parity)))
        assert f"predicted tokens of {told}" in page
        assert ("PyTorch 18.5000" in page, "PyTorch 17.5000" in page) == notes


def test_every_output_has_its_lane_among_the_errors(report: BuildReport) -> None:
    row = report.parity[0]
    error = changed(row.error, max_abs=0.25)
    further = OutputParity(name="pooled", error=error, rounding_error=None, allowed_max_abs=1.0)
    page = render_html(changed(report, parity=(changed(row, further_outputs=(further,)),)))
    assert f"{row.setting} MoD, pooled: largest error {error_text(0.25)}" in page
    assert f"Largest error of an output{error_text(0.25)}" in words(page)


def section(report: BuildReport, **fields: Any) -> str:
    """Section on generation, after a change of these fields."""
    if fields:
        assert report.generation is not None
        report = changed(report, generation=changed(report.generation, **fields))
    (found,) = re.findall(r'<section aria-labelledby="generation">.*?</section>', render_html(report), flags=re.DOTALL)
    return str(found)


def test_the_page_tells_everything(report: BuildReport) -> None:
    text = words(render_html(changed(report, precision=(precision_row(dtype="float32"), precision_row()))))
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
    assert "Lower precision" in text
    assert text.count("2.00x [1.90, 2.10]") == 2
    # The verdict also says whether sampling is safe.
    head = text[: text.index("What to deploy Files of")]
    assert "MoD: may not be used. Logits moved when only later tokens were changed." in head
    assert report.causality[0].statement in head
    assert "Dense baseline: may be used. Not refuted by 48 changed suffixes on 4 engines, which is no proof." in head
    # Time by part explains the speed-up if it is known.
    assert text.count("where the roofline predicts") == 2
    assert "The profiled times give a speed-up of 1.51x, where the roofline predicts 1.66x." in text
    assert "The parts add up to the difference of -0.15; most is lost to" in text


def test_the_verdict_comes_first_and_reasons_are_complete(report: BuildReport, failed_report: BuildReport) -> None:
    passed, failed = Page(render_html(report)).text, Page(render_html(failed_report)).text
    assert "PASS: medium, mod-export report" in passed
    assert passed.index("Every gate was met in 4 settings") < passed.index("What to deploy")
    assert "Fail, for 2 reasons" in failed
    for reason in failed_report.verdict.reasons:
        assert failed.index(reason) < failed.index("What to deploy")
    verdict = changed(failed_report.verdict, reasons=failed_report.verdict.reasons[:1])
    assert "Fail, for 1 reason<" in render_html(changed(failed_report, verdict=verdict))


def test_the_page_needs_nothing_from_outside(report: BuildReport) -> None:
    html = render_html(report)
    page = Page(html)
    assert not {tag for tag, _, _ in page.elements} & {"iframe", "img", "object", "embed", "base", "form"}
    assert page.all("script") == [{}]
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert re.findall(r"(?:https?:)?//[\w.]+|url\(|@import|@font-face", html) == []
    assert "prefers-color-scheme: dark" in html
    assert not re.search(r"@keyframes|animation|transition|scroll-behavior", html)
    # Every link leads to a place on the page itself.
    names = {attributes.get("id") for _, attributes, _ in page.elements}
    assert {str(anchor["href"]) for anchor in page.all("a")} <= {f"#{name}" for name in names}
    assert {section["aria-labelledby"] for section in page.all("section")} <= names


def test_the_policy_allows_the_one_script_and_nothing_else(report: BuildReport) -> None:
    html = render_html(report)
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policies = [meta for meta in Page(html).all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert [meta["content"] for meta in policies] == [
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    ]
    assert not re.search(r"\beval\b|Function\(|innerHTML|fetch|XMLHttpRequest|WebSocket|import\b", script)


def test_charts_and_tables_can_be_heard(report: BuildReport) -> None:
    page = Page(render_html(report))
    assert page.all("html") == [{"lang": "en"}]
    charts = [attributes for _, attributes, above in page.elements if attributes.get("role") == "img"]
    judged = [row for row in report.parity if row.role == "forward"]
    layers = sum(len(row.routing.layers) for row in judged)
    lanes = sum(len(routing_map.layers) for routing_map in report.routing_maps)
    bars = 2 * len({(row.target, row.bucket, row.model) for row in report.parts})
    parity = len(judged) + layers + lanes
    assert report.generation is not None
    assert report.generation.quality is not None
    bars += 2 * len(report.generation.decode) + len(report.generation.quality.selected)
    assert len(charts) == len(report.speedup) + 2 * len(report.latency) + len(report.cost) + parity + bars + 1
    assert all(chart["aria-label"] for chart in charts)
    headed = sum(1 for tag, _, above in page.elements if tag == "thead")
    assert headed == len(page.all("table"))
    roles = {"col": ("columnheader", None), "row": ("rowheader", None)}
    assert all(head.get("role") in roles[str(head["scope"])] for head in page.all("th"))
    assert all(cell["data-label"] for cell in page.all("td") if cell.get("role") == "cell")
    assert sum(tag == "h1" for tag, _, _ in page.elements) == 1


def assert_even(html: str) -> None:
    """Checks that every row of a table has as many cells as its head."""
    for table in re.findall(r"<table.*?</table>", html, flags=re.DOTALL):
        head, *rows = re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)
        assert rows
        assert {len(re.findall("<t[hd]", row)) for row in rows} == {len(re.findall("<th", head))}


def test_tables_are_even_and_coordinates_inside_the_chart(report: BuildReport, failed_report: BuildReport) -> None:
    for html in map(render_html, (report, failed_report)):
        assert_even(html)
        assert_inside(Page(html))


def assert_inside(page: Page) -> None:
    for tag, attributes, _ in page.elements:
        if tag in DRAWN:
            found = [str(attributes[name]) for name in ("x1", "x2", "cx", "x", "width") if name in attributes]
            shares = [float(mark.removesuffix("%")) for mark in found if mark.endswith("%")]
            assert all(0 <= share <= 100 for share in shares), attributes


def test_names_are_text(report: BuildReport) -> None:
    plain = {tag for tag, _, _ in Page(render_html(report)).elements}
    name = '</style><script>alert(1)</script>"><img src=x onerror=alert(1)>{{ 7 * 7 }} a & b'
    page = Page(render_html(renamed(report, name)))
    assert page.text.count(name) == 2
    assert {tag for tag, _, _ in page.elements} == plain
    # Control characters do not reach the page.
    html = render_html(renamed(report, "a\x00\u202eb\ud800"))
    assert "<h1>a\\x00\\u202eb\\ud800</h1>" in html
    assert html.encode("utf-8")


def test_every_string_of_a_report_is_escaped(failed_report: BuildReport) -> None:
    text = failed_report.to_json()
    strings = (
        "mod_transformer", "AMD EPYC", "engines/ort-cpu", "CPUExecutionProvider", "torch eager", "medium.pt",
        "no NVIDIA GPU;", "vocab_size", "drift: the last", "the control is", "layers.5.router", "node_linear_31",
        "must not be used", "ONNX Runtime", "best of 20", "shapes", "text: layer 5", "DejaVu",
    )  # fmt: skip
    text = text.replace('"d",', '"DejaVu",')
    for number, old in enumerate(strings):
        assert old in text, old
        text = text.replace(old, f"<script>{number}</script>")
    html = render_html(BuildReport.model_validate_json(text))
    for number, old in enumerate(strings):
        assert f"<script>{number}" not in html, old
        assert f"&lt;script&gt;{number}&lt;/script&gt;" in html, old


def test_the_way_to_repeat_it_is_exact(report: BuildReport) -> None:
    html = render_html(changed(report, config={**report.config, "nothing": None}))
    blocks = [unescape(block) for block in re.findall(r"<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)]
    assert blocks[0] == report.command
    assert tomllib.loads(blocks[-2]) == report.config
    assert json.loads(blocks[-1]) == report.model.spec
    assert "This build was made with" not in render_html(changed(report, command=None))
    assert blocks[1] == "mod-export build MODEL -c config.toml -o BUILD"
    call = "mod_export.build(Images, inputs=images, baseline=Dense, out='BUILD', config='config.toml')"
    text = words(render_html(changed(report, rebuild=call)))
    assert call in text
    assert "mod-export build MODEL" not in text


def test_what_failed_says_where_and_is_opened(failed_report: BuildReport) -> None:
    row = changed(failed_report.structure[0], passed=False, reasons=("weight blocks.3.w differs",))
    html = render_html(changed(failed_report, structure=(row, *failed_report.structure[1:])))
    text = words(html)
    for expected in (
        "3 of 4 files hold",
        "weight blocks.3.w differs",
        "It first differs from PyTorch at layers.5.router, operator node_linear_31, on input text: its output is off "
        "by 3.1e-02, where rounding explains 4.4e-06.",
        "faster in 2 of 4 settings, not faster in 1, inconclusive in 1",
        "In 1 setting the MoD engine did not measure as fast as itself",
        "1.040x [1.020, 1.060] not 1",
        *(f"{row.target} {row.bucket} {row.dtype}: {row.reason}" for row in failed_report.speedup if row.reason),
    ):
        assert expected in text, expected
    assert re.search(r"<details open>\s*<summary>What was checked in each file", html)
    # A failing layer is open; the others are closed.
    layers = html[html.index('<h2 id="layers">') : html.index('<h2 id="causality">')]
    assert re.findall(r"<details open>\s*<summary>(.*?)</summary>", layers) == [
        "inductor b1s512 float32: routing agreement 1,533 of 1,536 tokens of 6 routed layers, 1 near-tie, 2 faults"
    ]
    assert layers.count("<details>") == 3
    assert "253 of 256" in layers


def test_what_was_not_measured_is_said(report: BuildReport) -> None:
    fields = (
        "parity", "latency", "speedup", "cost", "artifacts", "targets", "stages", "structure", "causality",
        "routing_maps", "roofline", "parts",
    )  # fmt: skip
    empty = changed(report, **dict.fromkeys(fields, ()), generation=None)
    text = Page(render_html(empty)).text
    for sentence in (
        "There is nothing to deploy.",
        "No speed-up was measured on this machine.",
        "No latency was measured on this machine.",
        "Parity was not checked on this machine.",
        "No routed layer was compared on this machine.",
        "Causality was not probed on this machine, so nothing is claimed about autoregressive sampling.",
        "No map of a text or sample was made.",
        "No cost was counted.",
        "No engine was profiled, so time by part is unknown.",
        "Every known target ran on this machine.",
    ):
        assert sentence in text
    assert "#generation" not in render_html(empty)
    assert "Lower precision" not in text


def test_what_could_not_be_counted_or_built_is_said(report: BuildReport) -> None:
    for absent in ("Not counted:", "What failed", "Predictions leave out"):
        assert absent not in words(render_html(report))
    (first, *_) = report.speedup
    row = FailedRow(
        stage="engines", target=first.target, dtype=first.dtype, model="dense", role="forward", bucket=first.bucket,
        reason="<no room>",
    )  # fmt: skip
    html = render_html(
        changed(
            report,
            failed=(row,),
            speedup=report.speedup[1:],
            cost=tuple(changed(item, not_counted={"Loop": 1}) for item in report.cost[:1]),
            parts=tuple(changed(item, not_counted=2) for item in report.parts),
        )
    )
    text = words(html)
    cost = report.cost[0]
    assert f"Not counted: Loop (1) in {cost.model} {cost.bucket}. What a graph computes there is in no number" in text
    assert re.search(r"Predictions leave out \d+ nodes whose work is not known\.", text)
    assert "where the roofline predicts" in words(render_html(report))
    assert "where the roofline predicts" not in text
    assert f"Not compared: {first.setting}: the dense engine could not be built: <no room>" in text
    assert f"{row.what} engines <no room>" in text
    assert_even(html)


def test_a_speed_up_without_a_prediction_is_drawn_without_it(report: BuildReport) -> None:
    speedup = tuple(changed(speedup_row, predicted_flops=None, efficiency=None) for speedup_row in report.speedup)
    html = render_html(changed(report, speedup=speedup))
    assert "predicted by FLOPs" in render_html(report)
    assert "predicted by FLOPs" not in html
    assert "predicted by the roofline" in html
    assert_inside(Page(html))


def test_every_score_and_every_choice_can_be_read_without_the_script(report: BuildReport) -> None:
    html = render_html(report)
    tables = re.findall(r'<table class="scores">.*?</table>', html, flags=re.DOTALL)
    for map_, table in zip(report.routing_maps, tables, strict=True):
        rows = re.findall(r"<tr><th scope=\"row\">(\d+)</th><td>.*?</td>(.*?)</tr>", table, flags=re.DOTALL)
        assert len(rows) == len(map_.tokens)
        for position, (shown, cells) in enumerate(rows):
            found = re.findall(r"<td>([^<]*)</td>", cells)
            expected = [
                f"{layer.scores[position]:.3f}{' +' if position in layer.routed else ''}" for layer in map_.layers
            ]
            assert (int(shown), found) == (position, expected)


def test_a_single_setting_reads_well(report: BuildReport) -> None:
    row = report.parity[0]
    batches = (("text", 64, 63), ("ties", 96, 96), ("text", 32, 32))
    by_input = tuple(InputAgreement(input=kind, routed=routed, agreed=agreed) for kind, routed, agreed in batches)
    parity = (changed(row, routing=changed(row.routing, by_input=by_input)),)
    html = render_html(changed(report, speedup=report.speedup[:1], parity=parity, latency=report.latency[:2]))
    assert "Every gate was met in 1 setting on this machine." in html
    assert "<dd>1.52x<small>faster in 1 of 1 setting</small></dd>" in html
    assert "Routing agreement by input: text 95 of 96, ties all 96." in html
    assert "Routing agreement by input, over all settings: text 95 of 96, ties all 96; " in html


def test_generation_is_told(report: BuildReport) -> None:
    page = render_html(report)
    text = words(page)
    for expected in (
        "Those that generate route one token at a time.",
        "Speed-up of a decode step1.03x to 1.62xfaster in 1 of 2 settings, inconclusive in 1",
        "Slots of a text: 64 in layers 1, 3.",
        "ort-cpu, 1 text at once, 512 tokens: 1.62x [1.52, 1.73]",
        "ort-cpu, 8 texts at once, 512 tokens: 1.03x [0.96, 1.09]",
        "quality: perplexity 3.1377 selecting one token at a time, 3.0938 by the checkpoint's own selection",
        "keys and values ort-cpu b8s512: 9.0 MiB, dense 16.0 MiB; of routed layers 1.0 MiB, dense 8.0 MiB",
        "layer 3 12.4 %, 50 overflowed",
    ):
        assert expected in text, expected
    assert section(report).count("inconclusive</span>") == 2


def test_engines_that_could_not_be_asked_whether_they_look_ahead(report: BuildReport) -> None:
    """Engines that return only the last token's logits cannot be probed: other engines write the text, or none does."""
    rows = tuple(changed(row, suffixes=0, causal=True, statement="not probed: ...") for row in report.causality)
    text = words(render_html(changed(report, causality=rows)))
    assert "MoD: with the engines that generate. They read one token at a time, and were compared" in text
    # Engines that were not compared, as in a build without evidence, give no answer, nor do those that missed a gate.
    not_decode = tuple(row for row in report.parity if row.role != "decode")
    failed = tuple(changed(row, passed=False, reasons=("wrong",)) for row in report.parity if row.role == "decode")
    assert failed
    for parity in (not_decode, not_decode + failed):
        assert "MoD: unknown. It was not probed." in words(render_html(changed(report, causality=rows, parity=parity)))


def test_without_generation_there_is_the_reason(report: BuildReport) -> None:
    without_generation = changed(report, generation=GenerationReport(reason="<b>topk</b> looks ahead"))
    text = words(render_html(without_generation))
    assert "This build does not generate text: <b>topk</b> looks ahead" in text
    assert "Those that generate" not in text
    assert "Speed-up of a decode step" not in text


def test_an_engine_that_writes_and_failed_is_a_warning(report: BuildReport) -> None:
    first = next(row for row in report.parity if row.role == "prefill")
    bad = changed(first, passed=False, reasons=("cannot be run: <i>no</i>",))
    html = section(changed(report, parity=(bad, *(row for row in report.parity if row != first))))
    assert '<div class="warning"><b>ort-cpu prefill b1s128 float32 MoD</b>' in html
    assert "cannot be run: &lt;i&gt;no&lt;/i&gt;" in html
    assert html.count('<span class="mark fail">FAIL</span>') == 2


def test_what_of_generation_was_not_timed_or_not_judged_has_dashes(report: BuildReport) -> None:
    untimed = {"decode": (), "first_token": (), "texts": ()}
    assert_even(section(report, **untimed))
    assert_even(section(changed(report, parity=())))
    nothing = section(changed(report, parity=()), **untimed, quality=None, capacity={})
    assert "<table" not in nothing
    assert "Slots of a text" not in nothing


def test_numbers_of_steps_that_are_not_finite_are_not_drawn(report: BuildReport) -> None:
    assert report.generation is not None
    both = {"mod": math.nan, "dense": math.inf}
    first = report.generation.decode[0]
    compared = changed(
        first.compared, measured=math.nan, ci95=(math.nan, math.nan), verdict="inconclusive", efficiency=math.nan,
        predicted_bytes=math.nan,
    )  # fmt: skip
    row = changed(
        first, ms=both, tokens_per_second=both, predicted_ms=None, selected={"1": math.nan}, compared=compared
    )
    page = Page(section(report, decode=(row,), texts=()))
    assert "inconclusive" in page.text
    assert_inside(page)
