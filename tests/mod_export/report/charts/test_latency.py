from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mod_export.report import BuildReport
from mod_export.report.charts.latency import MOST_BINS, STRIP_PLACES, LatencyChart, latency_charts
from mod_export.report.latency_entries import LatencyEntry
from mod_export.report.summary import Setting


def chart_of(*samples_ms: float, median: float | None = None, flags: tuple[str, ...] = ()) -> LatencyChart:
    row = LatencyEntry(
        target="t", bucket="b", dtype="float32", model="mod", providers=("CPU",), threads=1, warmup=1,
        samples_ms=samples_ms, p50_ms=samples_ms[0] if median is None else median, p90_ms=1.0, p99_ms=1.0, mean_ms=1.0,
        stdev_ms=0.0, flags=flags,
    )  # fmt: skip
    setting = Setting(target="t", bucket="b", dtype="float32", parity=(), latency=(row,), speedup=None)
    (chart,) = latency_charts([setting])
    return chart


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.e+-]+) ([\d.e+-]+)", path)]


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=20))
def test_every_sample_is_in_the_strip_at_its_place(samples_ms: list[float]) -> None:
    chart = chart_of(*samples_ms)
    (bar,) = chart.bars
    end = chart.ticks[-1][0]
    drawn = [float(place) for place in re.findall(r"M([\d.e+-]+) 0v1", bar.strip)]
    for sample in samples_ms:
        assert min(abs(place - 100 * sample / end) for place in drawn) <= 50 / STRIP_PLACES + 1e-3
    assert bar.median == pytest.approx(100 * samples_ms[0] / end)


def test_thousands_of_samples_take_no_more_room_than_the_axis_has_places() -> None:
    chart = chart_of(*(1 + (index % 997) / 5000 for index in range(20_000)), median=1.1)
    assert len(chart.bars[0].strip) < 12 * STRIP_PLACES
    assert chart.series is not None
    assert chart.series.bins == MOST_BINS
    assert len(points(chart.series.series[0].path)) <= 2 * MOST_BINS


def test_thinning_out_keeps_every_extreme() -> None:
    samples = [10.0] * 5000
    samples[1234], samples[4321] = 13.0, 8.0
    chart = chart_of(*samples).series
    assert chart is not None
    (one,) = chart.series
    assert max(high for *_, high in one.bins) == 13.0
    assert min(low for _, _, low, _ in one.bins) == 8.0
    assert (one.bins[0][0], one.bins[-1][1]) == (1, 5000)
    assert all(after[0] == before[1] + 1 for before, after in zip(one.bins, one.bins[1:], strict=False))
    assert {round(y, 1) for _, y in points(one.path)} == {0.0, 60.0, 100.0}
    assert one.beyond == 0


def test_samples_are_drawn_in_their_order_as_shares_of_the_median() -> None:
    chart = chart_of(10.0, 11.0, 12.0, median=10.0).series
    assert chart is not None
    assert (chart.low, chart.high) == (0.95, 1.2)
    (one,) = chart.series
    drawn = points(one.path)
    assert [x for x, _ in drawn] == [pytest.approx(at, abs=0.1) for at in (100 / 6, 50, 500 / 6)]
    assert [y for _, y in drawn] == [pytest.approx(at, abs=0.1) for at in (80, 40, 0)]


def test_what_lies_far_outside_is_drawn_at_the_edge_and_counted() -> None:
    chart = chart_of(10.0, 100.0, 10.0, 70.0).series
    assert chart is not None
    assert (chart.low, chart.high, chart.series[0].beyond) == (0.95, 1.5, 2)
    assert min(y for _, y in points(chart.series[0].path)) == 0


def test_samples_that_are_not_finite_are_told_and_not_drawn() -> None:
    chart = chart_of(10.0, math.nan, math.inf, 10.5).series
    assert chart is not None
    (one,) = chart.series
    assert len(points(one.path)) == 2
    assert one.beyond == 2
    assert repr(one.bins[1][3]) == "nan"


def test_without_a_median_there_is_no_share_to_draw() -> None:
    assert chart_of(0.0, 0.0).series is None


def test_flags_ask_for_a_look() -> None:
    assert not chart_of(1.0).flagged
    assert chart_of(1.0, flags=("drift",)).flagged


def test_the_dense_model_comes_first(report: BuildReport) -> None:
    settings = [
        Setting(target="t", bucket="b", dtype="float32", parity=(), latency=report.latency[1::-1], speedup=None)
    ]
    (chart,) = latency_charts(settings)
    assert [bar.row.model for bar in chart.bars] == ["dense", "mod"]


def test_a_setting_without_samples_has_no_chart(report: BuildReport) -> None:
    empty = Setting(target="t", bucket="b", dtype="float32", parity=report.parity, latency=(), speedup=None)
    assert latency_charts([empty]) == ()
