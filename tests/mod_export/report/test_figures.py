"""Which numbers of a report become which marks, in charts of speed, of parity and routing, and of cost."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_pages import Page, drawn, paths, told
from sample_rows import changed, cost_row, latency_row

from mod_export.measure.parts import PARTS
from mod_export.report.charts import CLOCK_MS, axis_from_zero
from mod_export.report.figures.cost import flops_figures, roofline_figures, time_figures
from mod_export.report.figures.routing import (
    MOST_TOKENS,
    SHADES,
    error_figure,
    executed_figure,
    layers_figure,
    token_maps,
)
from mod_export.report.figures.speed import (
    MOST_BINS,
    STRIP_PLACES,
    LatencyFigure,
    latency_figures,
    speedup_figure,
    step_figure,
)
from mod_export.report.summary import SettingResults, settings_of
from mod_export.rows.correctness import MapLayer, RoutingMap
from mod_export.rows.report import BuildReport
from mod_export.rows.speed import DecodeRow


def in_lanes(html: str, kind: str) -> list[dict[str, float]]:
    """Marks of the chart itself, without its legend."""
    return drawn(html[html.index('<div class="chart') :], kind)


# Speed


def test_every_number_of_a_speedup_is_drawn_in_order(report: BuildReport) -> None:
    chart = speedup_figure(report.speedup)
    ones, points, flops = (in_lanes(chart, kind) for kind in ("one", "point", "predicted"))
    assert len(ones) == len(points) == len(flops) == len(in_lanes(chart, "interval")) == len(report.speedup)
    assert len(in_lanes(chart, "gate")) == 2
    scale = (flops[0]["cx"] - ones[0]["x1"]) / (report.speedup[0].predicted_flops - 1)
    for row, point, interval, control in zip(
        report.speedup, points, in_lanes(chart, "interval"), in_lanes(chart, "control"), strict=True
    ):
        for place, value in (
            (point["cx"], row.measured), (interval["x1"], row.ci95[0]), (interval["x2"], row.ci95[1]),
            (control["x1"], row.control.ci99[0]), (control["x2"], row.control.ci99[1]),
        ):  # fmt: skip
            assert place == pytest.approx(ones[0]["x1"] + scale * (value - 1), abs=0.05)
    assert "predicted by FLOPs 1.66x, by the roofline 1.59x; control 1.00x" in told(chart)[0]


def latency_of(*samples_ms: float, median: float | None = None, **fields: Any) -> LatencyFigure:
    row = latency_row(samples_ms, p50_ms=samples_ms[0] if median is None else median, **fields)
    (figure,) = latency_figures([SettingResults(setting=row.setting, rows=(row,))])
    return figure


def points(figure: LatencyFigure) -> list[tuple[float, float]]:
    (path,) = paths(figure.in_order, "series mod")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.e+-]+) ([\d.e+-]+)", path)]


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=20))
def test_every_sample_is_in_the_strip_at_its_place(samples_ms: list[float]) -> None:
    figure = latency_of(*samples_ms)
    axis = axis_from_zero(samples_ms, smallest=CLOCK_MS)
    (strip,) = paths(figure.distribution, "sample mod")
    places = [float(place) for place in re.findall(r"M([\d.e+-]+) 0v1", strip)]
    assert len(places) <= len(samples_ms)
    for sample in samples_ms:
        assert min(abs(place - axis.clamped(sample)) for place in places) <= 50 / STRIP_PLACES + 1e-3
    (median,) = drawn(figure.distribution, "bar mod")
    assert median.get("width", 100.0) == pytest.approx(axis.clamped(samples_ms[0]), abs=0.01)


def test_thinning_out_keeps_every_extreme() -> None:
    samples = [10.0] * 5000
    samples[1234], samples[4321] = 13.0, 8.0
    figure = latency_of(*samples)
    assert len(paths(figure.distribution, "sample mod")[0]) < 12 * STRIP_PLACES
    (bins,) = figure.bins
    assert len(bins) == MOST_BINS
    assert {high for *_, high in bins} == {"10.0", "13.0"}
    assert {low for _, _, low, _ in bins} == {"8.00", "10.0"}
    assert (bins[0][0], bins[-1][1]) == (1, 5000)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(bins))
    assert {round(y, 1) for _, y in points(figure)} == {0.0, 60.0, 100.0}
    assert "outside" not in figure.in_order


def test_samples_are_drawn_in_their_order_as_shares_of_the_median() -> None:
    figure = latency_of(10.0, 11.0, 12.0, median=10.0)
    assert (figure.low, figure.high) == (0.95, 1.2)
    assert points(figure) == [
        (pytest.approx(x, abs=0.1), pytest.approx(y, abs=0.1)) for x, y in ((100 / 6, 80), (50, 40), (500 / 6, 0))
    ]


def test_what_lies_far_outside_is_drawn_at_the_edge_and_counted() -> None:
    figure = latency_of(10.0, 100.0, 10.0, 70.0)
    assert (figure.low, figure.high) == (0.95, 1.5)
    assert "2 outside, drawn at the edge" in figure.in_order
    assert min(y for _, y in points(figure)) == 0


def test_samples_without_a_place_are_told_and_not_drawn() -> None:
    figure = latency_of(10.0, math.nan, math.inf, 10.5)
    assert len(points(figure)) == 2
    assert "2 outside" in figure.in_order
    assert figure.bins[0][1][3] == "nan"
    assert latency_of(0.0, 0.0).in_order == ""


def test_the_dense_model_comes_first_and_unsampled_settings_are_left_out(report: BuildReport) -> None:
    setting = report.latency[1].setting
    sampled, empty = (SettingResults(setting=setting, rows=rows) for rows in (report.latency[1::-1], report.parity))
    (figure,) = latency_figures([sampled, empty])
    assert [row.model for row in figure.rows] == ["dense", "mod"]


def test_steps_stand_beside_what_memory_takes(report: BuildReport) -> None:
    for steps in settings_of(report, "decode"):
        row = steps.written
        assert isinstance(row, DecodeRow)
        assert row.predicted_ms is not None
        chart = step_figure(steps)
        dense, mod = drawn(chart, "bar dense")[0]["width"], drawn(chart, "bar mod")[0]["width"]
        assert dense / mod == pytest.approx(row.ms["dense"] / row.ms["mod"], rel=1e-3)
        bounds = [mark["x1"] for mark in drawn(chart, "bound")]
        assert bounds[0] / dense == pytest.approx(row.predicted_ms["dense"] / row.ms["dense"], rel=1e-3)
        unknown = changed(row, predicted_ms=None, ms={"mod": math.nan, "dense": 1.0})
        nothing = step_figure(SettingResults(setting=steps.setting, rows=(unknown,)))
        assert drawn(nothing, "bound") == drawn(nothing, "bar mod") == []
        assert step_figure(SettingResults(setting=steps.setting, rows=())) == ""
        alone = step_figure(
            SettingResults(setting=steps.setting, rows=(changed(row, ms={"mod": row.ms["mod"]}, compared=None),))
        )
        assert (len(drawn(alone, "bar mod")), drawn(alone, "bar dense")) == (1, [])


# Parity and routing


def test_errors_stand_between_rounding_error_and_gate(report: BuildReport, failed_report: BuildReport) -> None:
    chart = error_figure(report.parity)
    for places in zip(*(in_lanes(chart, kind) for kind in ("mean", "bound", "point", "gate")), strict=True):
        at = [mark.get("cx", mark.get("x1", 100.0)) for mark in places]
        assert at == sorted(at)
    beyond = error_figure([row for row in failed_report.parity if not row.passed])
    assert in_lanes(beyond, "point bad")[0]["cx"] > in_lanes(beyond, "gate")[0]["x1"]


def test_a_fault_lies_right_of_the_bound_and_a_margin_too(failed_report: BuildReport) -> None:
    (row,) = (row for row in failed_report.parity if not row.passed)
    chart = layers_figure(row)
    bounds, margins = in_lanes(chart, "bound"), in_lanes(chart, "predicted")
    assert [words.partition(":")[0] for words in told(chart)] == [f"layer {layer}" for layer in (1, 3, 5, 7, 9, 11)]
    (flip,) = in_lanes(chart, "point bad")
    assert flip["cx"] > bounds[2]["x1"]
    assert all(margin["cx"] > bound["x1"] for margin, bound in zip(margins, bounds, strict=True))
    # Layers without distances have no chart.
    bare = tuple(changed(layer, min_margin=None, score_bound=math.nan, worst_flip=None) for layer in row.routing.layers)
    assert layers_figure(changed(row, routing=changed(row.routing, layers=bare))) == ""


def test_overflow_stands_behind_what_ran(report: BuildReport) -> None:
    generation = report.generation
    assert generation is not None
    chart = executed_figure(generation)
    first, second = in_lanes(chart, "ran")
    (overflow,) = in_lanes(chart, "lost")
    assert overflow["x"] == second["width"]
    assert overflow["width"] / second["width"] == pytest.approx((14.89 - 12.45) / 12.45, rel=1e-2)
    assert in_lanes(chart, "bound")[1]["x1"] / second["width"] == pytest.approx(12.5 / 12.45, rel=1e-2)
    assert first["width"] < second["width"]
    # Nothing is drawn without text or without depth routing.
    assert generation.quality is not None
    experts = {"0.expert0": 0.5}
    only = changed(generation.quality, wanted=experts, selected=experts, overflow={"0.expert0": 1})
    assert [executed_figure(changed(generation, quality=quality)) for quality in (None, only)] == ["", ""]


def map_of(tokens: int, *routed: tuple[int, ...]) -> RoutingMap:
    layers = tuple(
        MapLayer(layer=2 * index + 1, k=len(positions), routed=positions, scores=tuple(float(i) for i in range(tokens)))
        for index, positions in enumerate(routed)
    )
    return RoutingMap(bucket="b1s8", tokens=tuple("abcdefgh" * (tokens // 8))[:tokens], layers=layers)


def test_each_token_knows_the_layers_that_ran_it() -> None:
    (token_map,) = token_maps([map_of(8, (0, 1, 5), (1, 7))])
    assert [token.layers for token in token_map.tokens] == [(1,), (1, 3), (), (), (), (1,), (), (3,)]
    assert [token.shade for token in token_map.tokens] == [2, SHADES, 0, 0, 0, 2, 0, 2]
    assert (token_map.skipped, token_map.layers) == (4, (1, 3))
    assert token_map.tokens[3].scores == (3.0, 3.0)
    assert paths(token_map.chart, "ran") == ["M0 0h2v1h-2zM5 0h1v1h-1z", "M1 0h1v1h-1zM7 0h1v1h-1z"]


def test_a_long_text_is_cut_and_missing_scores_are_not_made_up(report: BuildReport) -> None:
    count = MOST_TOKENS + 8
    long, short = map_of(count, (0, count - 1)), map_of(8, (0, 7))
    short = changed(short, layers=(changed(short.layers[0], scores=(0.5,)),))
    found = token_maps([long, short, RoutingMap(bucket="b", tokens=(), layers=()), map_of(8), *report.routing_maps])
    assert [(len(token_map.tokens), token_map.total, token_map.skipped) for token_map in found[:2]] == [
        (MOST_TOKENS, count, count - 2), (8, 8, 6),
    ]  # fmt: skip
    assert told(found[0].chart) == [f"layer 1 ran 1 of the {MOST_TOKENS} positions shown"]
    assert [str(found[1].tokens[position].scores[0]) for position in (0, 7)] == ["0.5", "nan"]
    # A map without tokens is left out; a map without layers has no shades.
    assert {token.shade for token in found[2].tokens} == {0}
    assert [token_map.total for token_map in found[3:]] == [128]


# Cost


def test_flops_share_one_axis_per_bucket(report: BuildReport) -> None:
    charts = flops_figures(report.cost)
    assert list(charts) == ["b1s128", "b1s512"]
    for bucket, chart in charts.items():
        rows = {row.model: row for row in report.cost if row.bucket == bucket}
        parts = Page(chart).all("rect")
        widths = [float(str(one["width"]).removesuffix("%")) for one in parts]
        assert sum(widths) == pytest.approx(100 + 100 * rows["mod"].flops / rows["dense"].flops, abs=0.1)
        shown = [part for kind in ("dense", "mod") for part in PARTS if rows[kind].flops_by_part.get(part)]
        assert [one["class"] for one in parts] == [f"part-{part}" for part in shown]
    nothing = cost_row(0, flops_by_part=dict.fromkeys(PARTS, 0))
    assert Page(flops_figures([nothing])[nothing.bucket]).all("rect") == []


def test_times_are_predicted_and_measured_on_one_axis_per_setting(report: BuildReport) -> None:
    figures = time_figures(report.parts)
    assert [str(figure.setting) for figure in figures] == [
        "ort-cpu b1s128 float32", "ort-cpu b1s512 float32", "inductor b1s128 float32", "inductor b1s512 float32",
    ]  # fmt: skip
    for figure in figures:
        assert [words.partition(":")[0] for words in told(figure.chart)] == [
            "dense predicted", "dense measured", "MoD predicted", "MoD measured",
        ]  # fmt: skip
        setting_parts = [row for row in report.parts if row.setting.of("mod") == figure.setting]
        head = {row.model: row for row in setting_parts if row.part == "head"}
        dense, mod = drawn(figure.chart, "part-head")
        assert head["dense"].measured_ms is not None
        assert head["mod"].measured_ms is not None
        assert dense["width"] / mod["width"] == pytest.approx(
            head["dense"].measured_ms / head["mod"].measured_ms, rel=0.01
        )
        assert list(figure.rows) == list(dict.fromkeys(row.part for row in report.parts))
        routing = "routing" in told(figure.chart)[3]
        assert routing is (figure.setting.target != "inductor"), "the profile of torch cannot tell routing"
        # The difference of the speed-ups is shown only if every part was measured.
        assert (figure.gap is not None) is routing
        assert figure.gap is None or figure.gap.contributions.keys() == figure.rows.keys()


def test_a_setting_that_was_only_predicted_has_no_measured_bar(report: BuildReport) -> None:
    for figure in time_figures([changed(row, measured_ms=None) for row in report.parts if row.target == "ort-cpu"]):
        assert figure.measured_ms == {}
        assert not any("measured" in words for words in told(figure.chart))


def test_a_part_that_reaches_the_roof_lies_on_it(report: BuildReport) -> None:
    roof = report.roofline[0]
    part = next(part for part in report.parts if part.measured_ms is not None and part.flops)
    ms = part.flops / roof.gemm_gflops / 1e6
    fast = changed(part, bytes=part.flops // 100, measured_ms=ms)
    (chart,) = roofline_figures([roof], [fast, changed(fast, measured_ms=10 * ms)])
    _, flat = drawn(chart, "roof")
    assert flat["y1"] == flat["y2"]
    heights = [mark["cy"] for suffix in ("", " hollow") for mark in drawn(chart, f"part-{part.part}{suffix}")]
    assert heights[0] == pytest.approx(flat["y1"], abs=0.1)
    assert heights[1] > heights[0]
    # Work that has no place in the chart is left out.
    changes: tuple[dict[str, Any], ...] = (
        {"flops": 0}, {"bytes": 0}, {"measured_ms": None}, {"measured_ms": 0.0}, {"measured_ms": math.nan},
        {"dtype": "float16"},
    )  # fmt: skip
    (empty,) = roofline_figures([roof], [changed(part, **change) for change in changes])
    assert Page(empty).all("circle") == []
