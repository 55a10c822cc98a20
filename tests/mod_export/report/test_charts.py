from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.measure.cost import PARTS
from mod_export.report import BuildReport
from mod_export.report.charts import MOST_STEPS, flops_charts, latency_charts, speedup_chart
from mod_export.report.cost_entries import CostEntry
from mod_export.report.latency_entries import LatencyEntry, SpeedupEntry
from mod_export.report.summary import Setting

ratios = st.floats(min_value=1e-3, max_value=1e4)


def speedup(
    measured: float, low: float, high: float, predicted: float = 1.7, gate: float | None = None
) -> SpeedupEntry:
    return SpeedupEntry(
        target="t", bucket="b", dtype="float32", measured=measured, ci95=(low, high), predicted_flops=predicted,
        efficiency=measured / predicted, gate=gate, passed=None,
    )  # fmt: skip


def setting(*samples_ms: float) -> Setting:
    row = LatencyEntry(
        target="t", bucket="b", dtype="float32", model="mod", providers=("CPU",), threads=1, warmup=1,
        samples_ms=samples_ms, p50_ms=samples_ms[0], p90_ms=1.0, p99_ms=1.0, mean_ms=1.0, stdev_ms=0.0,
    )  # fmt: skip
    return Setting(target="t", bucket="b", dtype="float32", parity=(), latency=(row,), speedup=None)


@given(ratios, ratios, ratios, ratios)
def test_every_speedup_lies_on_the_axis_at_its_value(
    measured: float, low: float, high: float, predicted: float
) -> None:
    chart = speedup_chart([speedup(measured, low, high, predicted, gate=1.0)])
    (mark,) = chart.marks
    (first, _), (last, _) = chart.ticks[0], chart.ticks[-1]
    for place, value in (
        (mark.at, measured),
        (mark.low, low),
        (mark.high, high),
        (mark.predicted, predicted),
        (mark.gate, 1.0),
    ):
        assert place is not None
        assert 0 <= place <= 100
        assert first + place / 100 * (last - first) == pytest.approx(value, abs=1e-9 * last)
    assert mark.gate == chart.one
    assert 2 <= len(chart.ticks) <= MOST_STEPS + 4
    assert [at for _, at in chart.ticks] == sorted(at for _, at in chart.ticks)


def test_what_is_not_finite_is_not_drawn() -> None:
    (mark,) = speedup_chart([speedup(math.nan, math.nan, math.inf)]).marks
    assert (mark.at, mark.low, mark.high, mark.gate) == (None, None, None, None)
    assert mark.predicted is not None


def test_no_speedup_gives_an_empty_chart() -> None:
    assert speedup_chart([]).marks == ()


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=20))
def test_latency_starts_at_zero_and_fits(samples_ms: list[float]) -> None:
    (chart,) = latency_charts([setting(*samples_ms)])
    (bar,) = chart.bars
    end = chart.ticks[-1][0]
    assert chart.ticks[0] == (0, 0)
    assert chart.ticks[-1][1] == 100
    assert len(chart.ticks) <= MOST_STEPS + 1
    assert bar.samples == tuple(pytest.approx(100 * sample / end) for sample in samples_ms)
    assert max(bar.samples) <= 100
    assert bar.median == pytest.approx(100 * samples_ms[0] / end)


def test_a_setting_without_samples_has_no_chart(report: BuildReport) -> None:
    empty = Setting(target="t", bucket="b", dtype="float32", parity=report.parity, latency=(), speedup=None)
    assert latency_charts([empty]) == ()


def test_flops_share_one_axis_per_bucket(report: BuildReport) -> None:
    charts = flops_charts(report.cost)
    assert [chart.bucket for chart in charts] == ["b1s128", "b1s512"]
    for chart in charts:
        dense, mod = chart.bars
        assert (dense.row.model, mod.row.model) == ("dense", "mod")
        ends = [bar.segments[-1][1] + bar.segments[-1][2] for bar in chart.bars]
        assert ends == [pytest.approx(100), pytest.approx(100 * mod.row.flops / dense.row.flops)]
        assert [part for part, _, _ in mod.segments] == [part for part in PARTS if mod.row.flops_by_part[part]]


def test_a_graph_without_products_has_an_empty_bar() -> None:
    row = CostEntry(
        model="mod", bucket="b", flops=0, flops_by_part=dict.fromkeys(PARTS, 0), weight_bytes=0, activation_bytes=0,
        kv_bytes=0,
    )  # fmt: skip
    (chart,) = flops_charts([row])
    assert chart.bars[0].segments == ()
